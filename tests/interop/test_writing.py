"""What is written is what was read; tied embeddings are one array; heads are new by request only."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import (
    BERT_CONFIG,
    GPT2_CONFIG,
    LLAMA_CONFIG,
    bert_tensors,
    gpt2_tensors,
    llama_tensors,
    write_folder,
)
from safetensors.numpy import load_file

from jaxformer.interop import PretrainedError, load_pretrained, read_pretrained, resize_vocabulary, save_pretrained
from jaxformer.interop.families import find_family
from jaxformer.models import HeadConfig, TaskModel, bert, gpt

TINY = {**GPT2_CONFIG, "vocab_size": 3, "n_embd": 2, "n_head": 1, "n_layer": 1}


def tensors_of(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_same_bytes(ours, theirs):
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert ours[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize(
    ("config", "tensors"),
    [(GPT2_CONFIG, gpt2_tensors), (BERT_CONFIG, bert_tensors), (LLAMA_CONFIG, llama_tensors)],
    ids=["gpt2", "bert", "llama"],
)
@pytest.mark.parametrize(
    "scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["stacked", "unrolled"]
)
def test_what_is_written_is_what_was_read_byte_for_byte(tmp_path, config, tensors, scan_layers):
    folder = write_folder(tmp_path / "a", config, tensors())
    model, params, _ = load_pretrained(folder, fields={"scan_layers": scan_layers})
    save_pretrained(tmp_path / "b", model, params, max_file_bytes=700)
    assert (tmp_path / "b" / "model.safetensors.index.json").is_file()
    assert_same_bytes(tensors_of(tmp_path / "b"), tensors())
    again, params_again, _ = load_pretrained(tmp_path / "b", fields={"scan_layers": scan_layers})
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, params, params_again)


def test_names_dtypes_and_settings_of_the_checkpoint_are_kept(tmp_path):
    tensors = gpt2_tensors(prefix="")
    tensors = {name: tensor.astype(jnp.bfloat16) if ".mlp." in name else tensor for name, tensor in tensors.items()}
    tensors["lm_head.weight"] = tensors["wte.weight"]
    config = {**GPT2_CONFIG, "summary_type": "mean", "task_specific_params": {"a": 1}}
    folder = write_folder(tmp_path / "a", config, tensors)
    model, params, _ = load_pretrained(folder)
    save_pretrained(tmp_path / "b", model, params, like=folder)
    assert_same_bytes(tensors_of(tmp_path / "b"), tensors)
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == config
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in bert_tensors().items()}
    folder = write_folder(tmp_path / "c", BERT_CONFIG, old)
    save_pretrained(tmp_path / "d", *load_pretrained(folder)[:2], like=folder)
    assert_same_bytes(tensors_of(tmp_path / "d"), old)


def test_tied_embeddings_are_one_array_with_the_head_there_absent_or_refused(tmp_path):
    tensors = gpt2_tensors(TINY)
    found = read_pretrained(write_folder(tmp_path / "absent", TINY, tensors))
    assert "output_head" not in found.params
    shapes = jax.tree.map(lambda leaf: leaf.size, found.params)
    assert sum(jax.tree.leaves(shapes)) == sum(tensor.size for tensor in tensors.values())
    table = tensors["transformer.wte.weight"]
    same = read_pretrained(write_folder(tmp_path / "same", TINY, {**tensors, "lm_head.weight": table}))
    jax.tree.map(np.testing.assert_array_equal, found.params, same.params)
    disagreeing = {**tensors, "lm_head.weight": table + 1}
    folder = write_folder(tmp_path / "other", TINY, disagreeing)
    with pytest.raises(PretrainedError, match=r"lm_head\.weight and transformer\.wte\.weight, which differ although"):
        read_pretrained(folder)
    untied = read_pretrained(write_folder(tmp_path / "untied", {**TINY, "tie_word_embeddings": False}, disagreeing))
    np.testing.assert_array_equal(untied.params["output_head"]["kernel"], (table + 1).T)


def test_a_tied_tables_gradient_has_both_parts(tmp_path):
    model, params, _ = load_pretrained(write_folder(tmp_path, TINY, gpt2_tensors(TINY)))
    tokens = jnp.array([[2, 0, 1]])

    @jax.jit
    def loss(table):
        logits = model.apply({"params": {**params, "token_embedding": {"embedding": table}}}, tokens).logits
        return jax.nn.logsumexp(logits, -1).sum() - logits[..., 1].sum()

    table = params["token_embedding"]["embedding"]
    gradient = jax.grad(loss)(table)
    step = 1e-2
    for row in range(3):
        change = jnp.zeros_like(table).at[row, 1].set(step)
        slope = (loss(table + change) - loss(table - change)) / (2 * step)
        np.testing.assert_allclose(gradient[row, 1], slope, atol=2e-2, rtol=2e-2)


def test_a_resized_vocabulary_keeps_its_rows_and_its_ties(tmp_path):
    model, params, _ = load_pretrained(write_folder(tmp_path / "a", TINY, gpt2_tensors(TINY)))
    larger, resized = resize_vocabulary(model, params, 5, rng=jax.random.key(0))
    table = resized["token_embedding"]["embedding"]
    assert table.shape == (5, 2)
    np.testing.assert_array_equal(table[:3], params["token_embedding"]["embedding"])
    assert float(jnp.abs(table[3:]).min()) > 0
    save_pretrained(tmp_path / "b", larger, resized)
    again, reloaded, _ = load_pretrained(tmp_path / "b")
    assert (again.config.vocab_size, again.config.tie_embeddings) == (5, True)
    np.testing.assert_array_equal(reloaded["token_embedding"]["embedding"], table)
    assert "output_head" not in reloaded
    with pytest.raises(ValueError, match="vocab_size=2 must be at least that of the model, 3"):
        resize_vocabulary(model, params, 2, rng=jax.random.key(0))


def test_a_head_that_is_not_there_is_drawn_by_request_only(tmp_path):
    body = {name: tensor for name, tensor in bert_tensors().items() if not name.startswith("cls.")}
    folder = write_folder(tmp_path, BERT_CONFIG, body)
    with pytest.raises(PretrainedError, match=r"lacks 7 tensors: cls\.predictions\.bias.*rng=… draws"):
        load_pretrained(folder)
    model, params, _ = load_pretrained(folder, head=None)
    assert set(params) == {"token_embedding", "token_type_embedding", "encoder", "pooler"}
    head = HeadConfig(task="classification", num_classes=4)
    with pytest.raises(PretrainedError, match=r"lacks 2 tensors: classifier\.bias, classifier\.weight"):
        load_pretrained(folder, head=head)
    with pytest.warns(UserWarning, match="drawn anew: classifier/bias, classifier/kernel"):
        model, own, _ = load_pretrained(folder, head=head, rng=jax.random.key(0))
    assert isinstance(model, TaskModel)
    assert own["classifier"]["kernel"].shape == (6, 4)
    np.testing.assert_array_equal(own["pooler"]["kernel"], params["pooler"]["kernel"])


def test_a_masked_head_left_out_is_named(tmp_path):
    folder = write_folder(tmp_path, BERT_CONFIG, bert_tensors())
    with pytest.warns(UserWarning, match=r"no such head: cls\.predictions\.bias"):
        load_pretrained(folder, head=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positions": "alibi"}, "can't be written as gpt2: positions='alibi' .would be read as 'learned'"),
        ({"attention": "local", "attention_args": {"window": 3}}, "attention="),
        ({"norm": "rms"}, "norm='rms'"),
    ],
)
def test_models_that_no_family_can_say_are_refused_with_what_stands_in_the_way(tmp_path, fields, message):
    sizes = {"vocab_size": 13, "num_layers": 1, "embed_dim": 6, "num_heads": 3, "max_length": 11}
    with pytest.raises(PretrainedError, match=message):
        save_pretrained(tmp_path / "out", gpt(**sizes, **fields), {})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [{"norm_placement": "pre"}, {"positions": "rotary"}, {"activation": "swiglu"}])
def test_what_stands_in_the_way_of_an_encoder_is_said_of_a_family_of_encoders(value):
    ((name, given),) = value.items()
    with pytest.raises(PretrainedError, match=rf"can't be written as (distil)?bert: .*\b{name}='{given}'"):
        find_family(bert(vocab_size=13, num_layers=1, embed_dim=6, num_heads=3, max_length=11, **value).config)


def test_a_folder_that_holds_files_is_not_written_to(tmp_path):
    model, params, _ = load_pretrained(write_folder(tmp_path, TINY, gpt2_tensors(TINY)))
    with pytest.raises(PretrainedError, match=r"must be empty or not exist, holds config\.json"):
        save_pretrained(tmp_path, model, params)
