"""Tensors go where they belong: orientation, parts, layers, shards, dtypes and shardings; what is wrong is refused."""

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
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import save_file

from jaxformer.interop import PretrainedError, load_pretrained, read_pretrained
from jaxformer.interop.checkpoint import open_checkpoint
from jaxformer.interop.reading import _read
from jaxformer.interop.rules import Rule, Source

SQUARE = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def layer_of(params, side="decoder"):
    return params[side]["layers"]


def test_conv1d_kernels_stay_and_linear_kernels_are_transposed(tmp_path):
    # Two heads of width 1, so that every kernel is square and would load either way.
    config = {**GPT2_CONFIG, "n_embd": 2, "n_head": 2, "n_layer": 1, "n_inner": 2}
    tensors = gpt2_tensors(config)
    tensors["transformer.h.0.attn.c_proj.weight"] = SQUARE
    _, params, _ = load_pretrained(write_folder(tmp_path / "a", config, tensors))
    x = np.array([1.0, 0.0], np.float32)
    np.testing.assert_array_equal(x @ layer_of(params)["attention"]["out"]["kernel"][0], [1, 2])
    config = {**BERT_CONFIG, "hidden_size": 2, "num_attention_heads": 2, "intermediate_size": 2}
    tensors = bert_tensors(config)
    tensors["bert.encoder.layer.1.attention.output.dense.weight"] = SQUARE
    _, params, _ = load_pretrained(write_folder(tmp_path / "b", config, tensors))
    np.testing.assert_array_equal(x @ layer_of(params, "encoder")["attention"]["out"]["kernel"][1], [1, 3])


def test_a_fused_projection_is_split_into_query_key_value_and_then_heads(tmp_path):
    config = {**GPT2_CONFIG, "n_embd": 4, "n_head": 2, "n_layer": 1}
    tensors = gpt2_tensors(config)
    fused = np.arange(48, dtype=np.float32).reshape(4, 12)
    tensors["transformer.h.0.attn.c_attn.weight"] = fused
    tensors["transformer.h.0.attn.c_attn.bias"] = fused[0]
    model, params, _ = load_pretrained(write_folder(tmp_path, config, tensors))
    attention = layer_of(params)["attention"]
    for number, name in enumerate(("query", "key", "value")):
        columns = slice(4 * number, 4 * number + 4)
        np.testing.assert_array_equal(attention[name]["kernel"][0], fused[:, columns])
        np.testing.assert_array_equal(attention[name]["bias"][0], fused[0, columns])
    assert model.config.width_of_head == 2


def numbered_layers(folder, count):
    """A checkpoint whose layers' first norms have their numbers as scales."""
    config = {**GPT2_CONFIG, "n_layer": count}
    tensors = gpt2_tensors(config)
    for layer in range(count):
        tensors[f"transformer.h.{layer}.ln_1.weight"][:] = layer
    return write_folder(folder, config, tensors), tensors


def test_layer_10_comes_after_layer_9(tmp_path):
    folder, tensors = numbered_layers(tmp_path, 11)
    _, params, _ = load_pretrained(folder)
    np.testing.assert_array_equal(np.asarray(layer_of(params)["attention_norm"]["scale"])[:, 0], np.arange(11))
    kernels = np.asarray(layer_of(params)["mlp"]["up"]["kernel"])
    np.testing.assert_array_equal(kernels[10], tensors["transformer.h.10.mlp.c_fc.weight"])


@pytest.mark.parametrize("count", [2, pytest.param(11, marks=pytest.mark.slow)])
def test_unrolled_layers_have_their_numbers(tmp_path, count):
    folder, tensors = numbered_layers(tmp_path, count)
    model, own, _ = load_pretrained(folder, fields={"scan_layers": False})
    assert not model.config.scan_layers
    for layer in range(count):
        params = own["decoder"][f"layers_{layer}"]
        np.testing.assert_array_equal(params["attention_norm"]["scale"], np.full(6, layer))
        np.testing.assert_array_equal(params["mlp"]["up"]["kernel"], tensors[f"transformer.h.{layer}.mlp.c_fc.weight"])


def test_settings_come_from_the_files_and_missing_ones_are_the_familys(tmp_path):
    model, _, _ = load_pretrained(write_folder(tmp_path / "a", GPT2_CONFIG, gpt2_tensors()))
    assert model.config.norm_epsilon == 2e-4
    assert model.config.dropout_rate == 0.1
    assert model.config.activation == "gelu_tanh"
    model, _, _ = load_pretrained(write_folder(tmp_path / "b", BERT_CONFIG, bert_tensors()))
    assert (model.config.norm_epsilon, model.config.activation) == (1e-12, "gelu")
    assert model.config.next_sentence
    config = {**LLAMA_CONFIG, "rope_theta": 5e5}
    model, _, _ = load_pretrained(write_folder(tmp_path / "c", config, llama_tensors()))
    assert (model.config.rotary_base, model.config.tie_embeddings, model.config.kv_heads) == (5e5, False, 1)


def test_shards_are_read_through_their_index(tmp_path):
    whole = write_folder(tmp_path / "whole", GPT2_CONFIG, gpt2_tensors())
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "config.json").write_text(json.dumps(GPT2_CONFIG))
    names = sorted(gpt2_tensors())
    groups = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, group in groups.items():
        save_file({name: gpt2_tensors()[name] for name in group}, parts / file)
    places = {name: file for file, group in groups.items() for name in group}
    index = parts / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    _, expected, _ = load_pretrained(whole)
    _, params, _ = load_pretrained(parts)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    index.write_text(json.dumps({"weight_map": {**places, "transformer.more": next(iter(groups))}}))
    with pytest.raises(PretrainedError, match=r"names tensors that its files do not hold: transformer\.more"):
        load_pretrained(parts)
    (parts / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(PretrainedError, match="names files that are not there: model-00002"):
        load_pretrained(parts)


@pytest.mark.parametrize("options", [{}, {"transposed": True}, {"part": (1, 3)}])
@pytest.mark.parametrize("stacked", [True, False])
def test_a_slice_of_a_parameter_is_that_of_the_whole(tmp_path, options, stacked):
    rule = Rule("p", "t.{}", **options)
    tensors = gpt2_tensors()
    shape = (4, 6)
    stored = Source(rule, (), False).stored_shape(shape)
    tensors |= {f"t.{i}": np.random.default_rng(i).normal(size=stored).astype(np.float32) for i in range(3)}
    checkpoint = open_checkpoint(write_folder(tmp_path, GPT2_CONFIG, tensors))
    source = Source(rule, tuple(f"t.{i}" for i in range(3 if stacked else 1)), stacked)
    if stacked:
        shape = (3, *shape)
    whole = _read(checkpoint, source, shape, np.float32, tuple(slice(0, size) for size in shape))
    assert whole.shape == shape
    index = ((slice(1, 3),) if stacked else ()) + (slice(1, 3), slice(2, 5))
    np.testing.assert_array_equal(_read(checkpoint, source, shape, np.float32, index), whole[index])


def test_every_parameter_goes_to_the_sharding_of_its_path(tmp_path):
    asked = {}
    place = SingleDeviceSharding(jax.devices()[0])

    def sharding(path, shape):
        asked[path] = shape
        return place

    _, params, _ = load_pretrained(write_folder(tmp_path, GPT2_CONFIG, gpt2_tensors()), shardings=sharding)
    assert asked["decoder/layers/mlp/up/kernel"] == (2, 6, 10)
    assert len(asked) == len(jax.tree.leaves(params))


def test_dtypes_are_those_of_the_files_unless_asked_for(tmp_path):
    half = {name: tensor.astype(jnp.bfloat16) for name, tensor in gpt2_tensors().items()}
    folder = write_folder(tmp_path / "a", GPT2_CONFIG, half)
    model, params, _ = load_pretrained(folder)
    assert (model.config.dtype, model.config.param_dtype) == ("bfloat16", "bfloat16")
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))
    model, wide, _ = load_pretrained(folder, dtype="float32")
    table = wide["token_embedding"]["embedding"]
    assert table.dtype == jnp.float32
    np.testing.assert_array_equal(table, params["token_embedding"]["embedding"].astype(jnp.float32))
    mixed = half | {"transformer.ln_f.weight": np.ones(6, np.float32)}
    model, _, _ = load_pretrained(write_folder(tmp_path / "b", GPT2_CONFIG, mixed))
    assert model.config.param_dtype == "float32"


def test_old_files_buffers_are_skipped_and_named_and_names_without_prefix_known(tmp_path):
    tensors = gpt2_tensors(prefix="")
    tensors |= {"h.0.attn.bias": np.ones((1, 1, 11, 11), np.float32), "h.1.attn.masked_bias": np.float32(-1e4)}
    folder = write_folder(tmp_path / "a", GPT2_CONFIG, tensors)
    with pytest.warns(
        UserWarning, match=r"no parameters: transformer\.h\.0\.attn\.bias, transformer\.h\.1\.attn\.masked"
    ):
        _, params, _ = load_pretrained(folder)
    _, expected, _ = load_pretrained(write_folder(tmp_path / "b", GPT2_CONFIG, gpt2_tensors()))
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
           for name, tensor in bert_tensors().items()}  # fmt: skip
    assert not set(old) & {"bert.embeddings.LayerNorm.weight"}
    _, params, _ = load_pretrained(write_folder(tmp_path / "c", BERT_CONFIG, old))
    np.testing.assert_array_equal(
        params["encoder"]["embedding_norm"]["scale"], bert_tensors()["bert.embeddings.LayerNorm.weight"]
    )


def test_unknown_missing_and_misshapen_tensors_are_listed_and_refused(tmp_path):
    tensors = gpt2_tensors()
    more = {**tensors, "transformer.h.2.ln_1.weight": np.ones(6, np.float32), "adapter": np.ones(2, np.float32)}
    with pytest.raises(PretrainedError, match=r"2 tensors that a gpt2 .* adapter, transformer\.h\.2\.ln_1\.weight"):
        load_pretrained(write_folder(tmp_path / "a", GPT2_CONFIG, more))
    less = {name: tensor for name, tensor in tensors.items() if "h.1.ln_2" not in name}
    with pytest.raises(PretrainedError, match=r"lacks 2 tensors: transformer\.h\.1\.ln_2\.bias, transformer"):
        load_pretrained(write_folder(tmp_path / "b", GPT2_CONFIG, less), rng=jax.random.key(0))
    wide = {**tensors, "transformer.wte.weight": np.ones((14, 6), np.float32)}
    with pytest.raises(PretrainedError, match=r"transformer\.wte\.weight is \[14, 6\], must be \[13, 6\]"):
        load_pretrained(write_folder(tmp_path / "c", GPT2_CONFIG, wide))
    counted = {**tensors, "transformer.wte.weight": np.ones((13, 6), np.int8)}
    with pytest.raises(PretrainedError, match="dtype I8"):
        load_pretrained(write_folder(tmp_path / "d", GPT2_CONFIG, counted))


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (GPT2_CONFIG, {"model_type": "opt"}, "model_type='opt', must be one of gpt2"),
        (GPT2_CONFIG, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (GPT2_CONFIG, {"activation_function": "silu"}, "activation_function='silu', must be one of gelu"),
        (GPT2_CONFIG, {"architectures": ["GPT2DoubleHeadsModel"]}, "GPT2DoubleHeadsModel, whose head is not known"),
        (BERT_CONFIG, {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        (BERT_CONFIG, {"is_decoder": True}, "is_decoder=True"),
        (LLAMA_CONFIG, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling of type 'llama3'"),
        (LLAMA_CONFIG, {"rope_parameters": {"rope_type": "yarn"}}, "rope_scaling of type 'yarn'"),
        (LLAMA_CONFIG, {"mlp_bias": True}, "mlp_bias=True, which can't be read"),
        ({"model_type": "t5"}, {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj='gated-tanh'"),
        (GPT2_CONFIG, {"n_head": 4}, "embed_dim=6 must be divisible by num_heads=4"),
        (GPT2_CONFIG, {"model_type": ["gpt2"]}, r"model_type=\['gpt2'\], must be one of gpt2"),
        (GPT2_CONFIG, {"activation_function": ["gelu"]}, r"activation_function=\['gelu'\], must be one of gelu"),
        (GPT2_CONFIG, {"architectures": "GPT2LMHeadModel"}, "architectures='GPT2LMHeadModel', must be a list"),
    ],
)
def test_settings_that_can_not_be_represented_are_refused_by_name(tmp_path, config, values, message):
    folder = write_folder(tmp_path, {**config, **values}, gpt2_tensors())
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder)


def test_folders_that_are_no_checkpoints_are_refused_with_the_reason(tmp_path):
    with pytest.raises(PretrainedError, match=r"it has no config\.json"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GPT2_CONFIG))
    with pytest.raises(PretrainedError, match=r"neither model\.safetensors nor"):
        load_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(PretrainedError, match="nothing is unpickled"):
        load_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(PretrainedError, match="cannot be read"):
        load_pretrained(tmp_path)
    with pytest.raises(ValueError, match="fields has num_layers, which the checkpoint decides"):
        load_pretrained(tmp_path, fields={"num_layers": 3})


def test_dropouts_that_differ_are_told(tmp_path):
    found = read_pretrained(write_folder(tmp_path, {**GPT2_CONFIG, "embd_pdrop": 0.0}, gpt2_tensors()))
    assert found.notes == ["dropout_rate is resid_pdrop=0.1, also where embd_pdrop=0.0 would be used"]
