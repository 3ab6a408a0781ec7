"""Runs with other attentions than dense: their state is saved and goes on exactly, and data are packed as they can."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import ATTENTION, PATTERNS
from jaxformer.training.assembly import make_model
from jaxformer.training.config import bundled_configs, load_config, resolve
from jaxformer.training.finished import load_run
from jaxformer.training.generating import generate_from_run
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.overrides import ConfigError

ROUTING = (
    "model.attention_args.num_clusters=2",
    "model.attention_args.window=8",
    "train.steps=4",
    "checkpoint.every_steps=2",
)


@pytest.mark.slow
def test_run_with_running_state_goes_on_exactly(text, tiny_config, tmp_path):
    arg = "size=tiny,attention=routing"
    train_and_evaluate(tiny_config(text, *ROUTING, arg=arg), tmp_path / "straight")
    lines = [json.loads(line) for line in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["routing_commitment"] > 0 for line in lines if line["split"] == "train")
    train_and_evaluate(tiny_config(text, *ROUTING, "train.steps=2", arg=arg), tmp_path / "stopped")
    train_and_evaluate(tiny_config(text, *ROUTING, arg=arg), tmp_path / "stopped")
    model, straight, _ = load_run(tmp_path / "straight")
    _, stopped, _ = load_run(tmp_path / "stopped")
    assert set(straight) == {"params", "state"}
    jax.tree.map(np.testing.assert_array_equal, straight, stopped)
    begun = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["state"]
    moved = jax.tree.map(lambda now, then: (now != then).any(), straight["state"], begun)
    assert all(jax.tree.leaves(moved))
    assert "".join(generate_from_run(tmp_path / "straight", ["be"], max_new_tokens=3, seed=1))


def test_packed_documents_are_refused_where_they_would_meet(text, tiny_config, tmp_path):
    run = tiny_config(text, "data.packing=packed", arg="size=tiny,attention=lsh")
    with pytest.raises(ConfigError, match=r"attention='lsh' can't keep packed documents apart.*'contiguous'"):
        train_and_evaluate(run, tmp_path)


def test_config_takes_every_causal_attention_and_packs_as_it_can():
    spec = importlib.util.spec_from_file_location("language_model", bundled_configs()["language_model"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = module.ATTENTION_ARGS
    causal = {name for name, kind in [*ATTENTION.items(), *PATTERNS.items()] if kind.causal}
    assert set(names) == causal - {"sparse"}
    for name in names:
        config = load_config(f"language_model:attention={name}").config
        record = PATTERNS.get(name) or ATTENTION[name]
        assert config.data.packing == ("packed" if record.packing else "contiguous")
        assert (config.sample.max_new_tokens > 0) == (name in PATTERNS or record.decodes)


def test_encoders_are_pretrained_with_other_attentions():
    config = load_config("masked_lm:size=tiny,attention=local", ["model.attention_args.window=5"]).config
    model = make_model(resolve(config, {"model.vocab_size": 50, "model.max_length": 64}))
    assert [(choice.name, choice.args) for choice in model.config.attentions] == [("local", (("window", 5),))]
