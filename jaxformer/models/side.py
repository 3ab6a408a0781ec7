"""One side of a Transformer: positions, the stack of blocks and the norms around it; and what decoding carries."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.functional import AlibiBias, alibi_slopes
from jaxformer.layers import (
    STATE,
    AxialPositionEmbedding,
    LearnedPositionEmbedding,
    RelativePositionBias,
    SinusoidalPositionEmbedding,
)
from jaxformer.models.block import BlockAux, BlockInputs, make_norm, normalise, real_tokens
from jaxformer.models.config import TransformerConfig
from jaxformer.models.initializers import make_relative_bias_init
from jaxformer.models.position_settings import axial_shape
from jaxformer.models.stack import Stack
from jaxformer.models.universal import UniversalStack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DecoderCache:
    """What decoding carries from one call to the next.

    Attributes:
      layers: the attention's caches, stacked over depth; a tuple where the layers go through several attentions.
      index: int32 [], slots written so far (padding included).
      memory: cross-attention keys and values of every layer (a universal stack's: of all steps), or None.
      memory_mask: bool [B, S] of the encoder's output, or None.
    """

    layers: Any
    index: Array
    memory: tuple[Array, Array] | None = None
    memory_mask: Array | None = None


class Side(nn.Module):
    """One side of the model: positions, a norm of the embeddings where there is one, the stack and the final norm.

    Args:
      config: the model's configuration.
      num_layers: blocks.
      causal: self-attention sees the past only.
      cross: blocks have cross-attention.
    """

    config: TransformerConfig
    num_layers: int
    causal: bool
    cross: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: BlockInputs,
        *,
        shift: Int[Array, "B"] | None = None,
        cache: DecoderCache | None = None,
        deterministic: bool = True,
        return_weights: bool = False,
        readout: Callable[[Array, Array], dict[str, Array]] | None = None,
    ) -> tuple[Array, BlockAux]:
        """Embedded tokens [B, T, embed_dim] to final hidden states of the same shape, and the stack's ``BlockAux``.

        ``shift`` is added to the positions of each row where they are vectors, and only there. ``readout`` is called
        with the number of each layer and its output, through the final norm where there is one.
        """
        config = self.config
        if cache is not None and inputs.positions is None:
            inputs = inputs._replace(positions=cache.index + _arange(x))
        positions = self._count(x, inputs)
        coordinates = self._coordinates(positions if shift is None else positions + shift[:, None])
        universal = config.stack == "universal"
        if coordinates is not None and not universal:
            x = x + coordinates
        norms: Any = {"mask": real_tokens(inputs), "deterministic": deterministic}
        if config.embedding_norm:
            x = normalise(config, "embedding_norm", x, **norms)
        x = nn.Dropout(config.dropout_rate, name="embedding_dropout")(x, deterministic=deterministic)
        memory = None
        if cache is not None and cache.memory is not None:
            memory, inputs = cache.memory, inputs._replace(memory_mask=cache.memory_mask)
        make: Any = UniversalStack if universal else Stack
        stack = make(config, self.num_layers, causal=self.causal, cross=self.cross, name="stack")
        # The blocks' parameters stand directly under this side's name: ``decoder/layers``.
        nn.share_scope(self, stack)
        x, aux = stack(
            x,
            inputs._replace(bias=self._position_bias()),
            **({"coordinates": coordinates} if universal else {}),
            cache=None if cache is None else cache.layers,
            memory=memory,
            deterministic=deterministic,
            return_weights=return_weights,
            readout=self._normed(readout, norms),
        )
        if config.norm_placement == "pre":
            x = normalise(config, "final_norm", x, **norms)
        x = nn.Dropout(config.final_dropout_rate, name="final_dropout")(x, deterministic=deterministic)
        if cache is not None:
            cache = dataclasses.replace(cache, layers=aux.cache, index=cache.index + x.shape[1])
            aux = aux._replace(cache=cache)
        return x, aux

    def _normed(self, readout: Callable | None, norms: dict[str, Any]) -> Callable | None:
        """The readout of layers' outputs before the final norm, of which batch norm has each layer's own statistics."""
        config = self.config
        if readout is None or config.norm_placement != "pre" or config.norm == "none":
            return readout
        # Apart from this module: inside the scan none of its own can be called.
        norm = make_norm(config, None)
        names = ("params", STATE) if config.norm == "batch" else ("params",)
        variables: Any = {name: self.get_variable(name, "final_norm") for name in names}
        options = norms if config.norm == "batch" else {}
        return lambda layer, x: readout(layer, norm.apply(variables, x, **options))

    def _count(self, x: Array, inputs: BlockInputs) -> Int[Array, "B T"]:
        """The positions whose vectors are added: those given, or a count of tokens, from 0."""
        if inputs.positions is not None:
            return inputs.positions
        if self.config.positions_skip_padding and inputs.key_mask is not None:
            return jnp.maximum(jnp.cumsum(inputs.key_mask.astype(jnp.int32), axis=1) - 1, 0)
        return _arange(x)

    def _coordinates(self, positions: Int[Array, "B T"]) -> Float[Array, "B T D"] | None:
        """The vectors of the positions, where they are vectors."""
        config = self.config
        if config.positions == "learned":
            init = nn.initializers.normal(config.init_stddev)
            table = LearnedPositionEmbedding(
                config.max_length + config.position_offset,
                config.embed_dim,
                config.compute_dtype,
                config.parameter_dtype,
                init,
                name="position_embedding",
            )
            return table(positions + config.position_offset)
        if config.positions == "axial":
            axial = AxialPositionEmbedding(
                axial_shape(config),
                config.embed_dim,
                config.axial_dims,
                config.compute_dtype,
                config.parameter_dtype,
                nn.initializers.normal(config.init_stddev),
                name="position_embedding",
            )
            return axial(positions)
        if config.positions == "sinusoidal":
            return SinusoidalPositionEmbedding(config.embed_dim, config.compute_dtype)(positions)
        return None

    def _position_bias(self) -> Any:
        config = self.config
        if config.positions == "alibi":
            return AlibiBias(alibi_slopes(config.num_heads))
        if config.positions == "relative":
            return RelativePositionBias(
                config.num_heads,
                config.relative_buckets,
                config.relative_max_distance,
                bidirectional=not self.causal,
                param_dtype=config.parameter_dtype,
                embedding_init=make_relative_bias_init(config),
                name="relative_bias",
            )()
        return None


def _arange(x: Array) -> Array:
    """Positions 0, 1, … of every row, int32 [B, T]."""
    return jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
