"""Models that generation is tested with: a small GPT, and a recurrent one that knows no attention."""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from jaxformer.models import Transformer, TransformerConfig

VOCAB_SIZE = 23


@pytest.fixture(scope="session")
def make_gpt():
    """A GPT whose parameters are large enough that its choices vary, and those parameters."""

    @functools.cache
    def make(**fields: Any) -> tuple[Transformer, Any]:
        sizes = {"vocab_size": VOCAB_SIZE, "num_layers": 2, "embed_dim": 12, "num_heads": 3, "max_length": 40}
        model = Transformer(TransformerConfig(**{**sizes, "init_stddev": 0.5, **fields}))
        return model, jax.jit(model.init)(jax.random.key(7), jnp.zeros((1, 4), jnp.int32))["params"]

    return make


@pytest.fixture(scope="session")
def gpt(make_gpt):
    return make_gpt()


@pytest.fixture(scope="session")
def full_pass():
    """Logits of the last token of a sequence by one pass over all of it, without any cache: the oracle."""

    @functools.partial(jax.jit, static_argnums=0)
    def logits_of(model, params, tokens):
        return model.apply({"params": params}, tokens).logits[0]

    def last_logits(model, params, ids, width=40):
        # What stands to the right of a token does not reach it, so that one width serves every length.
        tokens = jnp.asarray([*ids, *[0] * (width - len(ids))])[None]
        return logits_of(model, params, tokens)[len(ids) - 1]

    return last_logits


class Output(NamedTuple):
    logits: jax.Array
    aux: Any


class Aux(NamedTuple):
    cache: Any


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    vocab_size: int = VOCAB_SIZE


class Recurrent(nn.Module):
    """The next token is the sum of all tokens so far plus an offset, which is no parameter, modulo the vocabulary."""

    config: RecurrentConfig = RecurrentConfig()

    @nn.nowrap
    def init_cache(self, batch_size: int, max_length: int) -> jax.Array:
        return jnp.zeros(batch_size, jnp.int32)

    @nn.compact
    def __call__(self, tokens, *, positions, key_mask, cache, select):
        offset = self.variable("averages", "offset", lambda: jnp.zeros((), jnp.int32)).value
        real = tokens if key_mask is None else jnp.where(key_mask, tokens, 0)
        sums = cache[:, None] + jnp.cumsum(real, axis=1)
        following = (jnp.take_along_axis(sums, select, axis=1) + offset) % self.config.vocab_size
        return Output(jax.nn.one_hot(following, self.config.vocab_size), Aux(sums[:, -1]))


@pytest.fixture
def recurrent():
    return Recurrent()
