"""A configuration is checked when it is made, and names what is wrong."""

import dataclasses

import pytest

from jaxformer.models import GPT_SIZES, TransformerConfig, gpt

BASE = {"vocab_size": 11, "num_layers": 2, "embed_dim": 8, "num_heads": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "embed_dim=8 must be divisible by num_heads=3"),
        ({"num_heads": 0}, "num_heads=0 must be an integer of at least 1"),
        ({"num_kv_heads": 3, "num_heads": 4}, "num_heads=4 must be divisible by num_kv_heads=3"),
        ({"vocab_size": 0}, "vocab_size=0 must be an integer of at least 1"),
        ({"num_layers": True}, "num_layers=True must be an integer"),
        ({"mlp_dim": -1}, "mlp_dim=-1"),
        ({"dropout_rate": 1.0}, r"dropout_rate=1.0 must be a number in \[0, 1\)"),
        ({"positions": "rotery"}, "positions='rotery' must be one of learned, sinusoidal, rotary"),
        ({"attention": "dens"}, "attention='dens' must be one of .*dense"),
        ({"remat": "some"}, "remat='some' must be one of none, full"),
        ({"dtype": "fp32"}, "dtype='fp32' must be one of float32"),
        ({"norm_epsilon": -1.0}, "norm_epsilon=-1.0 must be a positive number"),
        ({"rotary_base": 0.0}, "rotary_base=0.0 must be a positive number"),
        ({"attention_args": {"blok_size": 4}}, "attention_args has 'blok_size', which attention='dense' does not know"),
        ({"dtype": "float64"}, "float64 only with jax_enable_x64"),
        ({"positions": "rotary", "head_dim": 3}, "head_dim=3 must be even for rotary"),
    ],
)
def test_bad_values_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**BASE, **change})


def test_explicit_head_dim_need_not_divide():
    config = TransformerConfig(**BASE, head_dim=5)
    assert config.width_of_head == 5


def test_configs_are_frozen_hashable_and_comparable():
    first = TransformerConfig(**BASE, attention_args={"implementation": "xla", "block_size": 4})
    second = TransformerConfig(**BASE, attention_args={"block_size": 4, "implementation": "xla"})
    assert hash(first) == hash(second)
    assert first == second
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.num_layers = 3


def test_unknown_size_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=f"size='huge' must be one of {', '.join(GPT_SIZES)}"):
        gpt("huge")
