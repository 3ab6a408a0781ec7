"""A run's attention as a page: what each kind of model reads, joined characters, and the command."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxformer.analysis import attention_view
from jaxformer.cli import main
from jaxformer.data import ByteTokenizer
from jaxformer.models import bert, encoder_decoder, gpt
from jaxformer.training.finished import load_run
from jaxformer.training.overrides import ConfigError
from jaxformer.training.translator import Translator
from jaxformer.training.viewing import read_texts, translation_maps, view_run

CLS, SEP = 256, 257


def test_a_decoder_s_weights_are_shown_by_characters(trained):
    workdir, _ = trained
    view = view_run(workdir, "a天b", heads=[1])
    shown = view.maps["attention"]
    assert shown.rows == shown.columns == ("<bos>", "a", "天", "b")
    model, variables, tokenizer = load_run(workdir)
    ids = jnp.array([[tokenizer.bos_id, *"a天b".encode()]])
    own = model.apply(variables, ids, return_weights=True).aux.weights["attention"][:, 0, 1]
    np.testing.assert_allclose(shown.weights[:, 0, 3, 2], own[:, 5, 2:5].sum(-1), atol=1e-6)
    np.testing.assert_allclose(shown.weights[:, 0, 2, 1], own[:, 2:5, 1].mean(-1), atol=1e-6)
    np.testing.assert_allclose(shown.weights.sum(-1), 1, atol=1e-5)
    assert view_run(workdir, "a天b", join=False).maps["attention"].rows[2] == "<229>"


@pytest.mark.parametrize("join", [True, False])
def test_a_part_is_recorded_alone_and_shown_as_of_the_whole(trained, join):
    workdir, _ = trained
    part = {"layers": [1], "heads": [0], "window": (2, 4), "title": "part"}
    whole = view_run(workdir, "a天bcd", join=join).maps
    assert view_run(workdir, "a天bcd", join=join, **part).html == attention_view(whole, **part).html


def test_the_command_writes_the_page(trained, tmp_path, capsys):
    workdir, _ = trained
    flags = [f"--workdir={workdir}", "--text=a天b", "--heads=1"]
    assert main(["view", *flags, f"--output={tmp_path / 'view.html'}"]) == 0
    assert "attention: 4 tokens to 4, 2 layers of 1 heads" in capsys.readouterr().err
    assert (tmp_path / "view.html").read_text(encoding="utf-8") == view_run(workdir, "a天b", heads=[1]).html
    for wrong, message in (
        (["--layers=x"], "--layers=x must be whole numbers"),
        (["--window=3"], "--window=3 must be two numbers"),
        (["--source=a"], "has no encoder of its own beside a decoder"),
        (["--text_b=b"], "second_text needs an encoder or a head of a task"),
    ):
        assert main(["view", *flags, *wrong, "--output=-"]) > 0
        assert message in capsys.readouterr().err


def test_each_model_reads_what_it_was_trained_on():
    tokenizer = ByteTokenizer()
    sizes = {"vocab_size": 259, "embed_dim": 8, "num_heads": 2, "mlp_dim": 8, "num_layers": 1}
    plain, task = ConfigDict(), ConfigDict({"head": {"task": "classification"}, "data": {"separators": 2}})
    for model, config, second, ids, token_types, start in (
        (gpt(**sizes), plain, None, [CLS, 104, 105], None, None),
        (bert(**sizes), plain, None, [CLS, 104, 105, SEP], None, None),
        (bert(**sizes), plain, "x", [CLS, 104, 105, SEP, 120, SEP], [0, 0, 0, 0, 1, 1], 4),
        (bert(**sizes), task, "x", [CLS, 104, 105, SEP, SEP, 120, SEP], [0, 0, 0, 0, 0, 1, 1], 5),
        (bert(**sizes, num_token_types=0, next_sentence=False), plain, "x", [CLS, 104, 105, SEP, 120, SEP], None, 4),
    ):
        given = read_texts(config, model, tokenizer, "hi", second)
        assert given.ids.tolist() == ids
        assert (None if given.token_types is None else given.token_types.tolist()) == token_types
        assert given.second == start
        if second is None:
            continue
        assert given.ids[given.second] == 120
    nameless = types.SimpleNamespace(encode=list, bos_id=None, eos_id=None)
    with pytest.raises(ConfigError, match="the text is empty"):
        read_texts(plain, gpt(**sizes), nameless, "", None)


@pytest.mark.slow
def test_a_translation_is_shown_by_characters_of_both_sides():
    model = encoder_decoder(vocab_size=259, num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8)
    ids, tokenizer = jnp.zeros((1, 2), jnp.int32), ByteTokenizer()
    params = jax.jit(lambda key: model.init(key, ids, source=ids))(jax.random.key(0))["params"]
    translator = Translator(model, params, {}, tokenizer, tokenizer, tokenizer.bos_id)
    maps = translation_maps(translator, "天x", "é")
    assert {name: (shown.rows, shown.columns) for name, shown in maps.items()} == {
        "encoder": (("天", "x", "<eos>"), ("天", "x", "<eos>")),
        "decoder": (("é", "<eos>"), ("<bos>", "é")),
        "cross": (("é", "<eos>"), ("天", "x", "<eos>")),
    }
    for shown in maps.values():
        np.testing.assert_allclose(shown.weights.sum(-1), 1, atol=1e-5)
    whole = translator.attention_maps("天x", "é")["cross"].weights
    np.testing.assert_allclose(maps["cross"].weights[0, 0, 0, 0], whole[0, 0, :2, :3].sum(-1).mean(), atol=1e-6)
    assert translation_maps(translator, "天x", "é", join=False)["cross"].weights.shape == whole.shape
