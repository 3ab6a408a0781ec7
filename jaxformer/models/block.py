"""One Transformer block: self-attention, optional cross-attention and feed-forward around residual additions."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jaxtyping import Array, Float

from jaxformer.layers import (
    ConvolutionCache,
    DepthwiseConvolution,
    FeedForward,
    MixtureOfExperts,
    MultiHeadAttention,
    make_norm_layer,
)
from jaxformer.models.attention_choice import AttentionChoice
from jaxformer.models.config import TransformerConfig
from jaxformer.models.initializers import make_kernel_init, make_query_init


class BlockInputs(NamedTuple):
    """What every block of a stack reads beside the residual stream; any field may be None.

    Attributes:
      positions: int [B, T].
      segments: int [B, T]; tokens see their own segment only.
      key_mask: bool [B, T], True = the token exists.
      bias: array broadcastable to [B, N, T, T], or a position bias.
      memory: the encoder's output [B, S, embed_dim].
      memory_mask: bool [B, S].
      memory_segments: int [B, S].
    """

    positions: Array | None = None
    segments: Array | None = None
    key_mask: Array | None = None
    bias: Any = None
    memory: Array | None = None
    memory_mask: Array | None = None
    memory_segments: Array | None = None


class BlockAux(NamedTuple):
    """What a block or a stack returns beside the residual stream.

    Attributes:
      losses: auxiliary losses by name; a stack gives each a leading layer axis.
      state: what is neither parameter nor cache (centroids, running averages), by name.
      cache: the updated cache, or None.
      weights: attention weights by sub-layer name, when asked for; a stack gives each a leading layer axis.
      metrics: figures that are only reported, by name, each (sum, count) of this batch; a stack gives both a leading
        layer axis.
      maps: what is reported of every token, by name, each [B, T]; only a stack with halting has any.
      readouts: what the call's ``readout`` made of the layer's output, by name; a stack gives each a leading layer
        axis.
    """

    losses: dict[str, Array]
    state: dict[str, Array]
    cache: Any
    weights: dict[str, Array]
    metrics: dict[str, tuple[Array, Array]] = {}  # noqa: RUF012
    maps: dict[str, Array] = {}  # noqa: RUF012
    readouts: dict[str, Array] = {}  # noqa: RUF012


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BlockCache:
    """The cache of blocks with a convolution.

    Attributes:
      attention: of the self-attention.
      convolution: of the convolution in front of the feed-forward layer.
    """

    attention: Any
    convolution: ConvolutionCache


class TransformerBlock(nn.Module):
    """Attention and feed-forward sub-layers, each ``x + sublayer(norm(x))`` (pre) or ``norm(x + sublayer(x))`` (post).

    Vaswani et al. 2017, arXiv:1706.03762, section 3.1 (post-norm); pre-norm: Xiong et al. 2020, arXiv:2002.04745.
    Without placement (none) ``x + sublayer(x)``.

    Args:
      config: the model's configuration.
      attention: the self-attention of this layer.
      causal: self-attention sees the past only.
      cross: there is a cross-attention sub-layer.
      experts: the feed-forward layer is the configured mixture of experts, where there is one.
      residual_additions: residual additions of the whole stack, for the scaled initialisation.
    """

    config: TransformerConfig
    attention: AttentionChoice
    causal: bool
    cross: bool = False
    experts: bool = True
    residual_additions: int = 2

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"] | tuple[Array, Array],
        inputs: BlockInputs,
        *,
        cache: Any = None,
        layer: Any = None,
        memory: tuple[Array, Array] | None = None,
        deterministic: bool = True,
        return_weights: bool = False,
    ) -> tuple[Any, BlockAux]:
        """Apply the block.

        Args:
          x: residual stream [B, T, embed_dim], or the two streams of a reversible stack: the attentions read the
            second and are added to the first, the feed-forward reads the first and is added to the second.
          inputs: positions, masks, bias and memory.
          cache: self-attention cache stacked over depth; a ``BlockCache`` of such where there is a convolution.
          layer: index of this block in it.
          memory: cross-attention keys and values projected before, in place of ``inputs.memory``.
          deterministic: switches dropout off.
          return_weights: also return attention weights.

        Returns:
          What was given as ``x``, changed, and a ``BlockAux``.
        """

        parts = cache if isinstance(cache, BlockCache) else None

        def attend(hidden: Array) -> tuple[Array, Array, BlockAux]:
            return self.attend(
                hidden,
                inputs,
                cache=cache if parts is None else parts.attention,
                layer=layer,
                memory=memory,
                deterministic=deterministic,
                return_weights=return_weights,
            )

        def feed(hidden: Array) -> tuple[Array, Array, BlockAux]:
            before = None if parts is None else parts.convolution
            return self.feed(hidden, inputs, cache=before, layer=layer, deterministic=deterministic)

        if isinstance(x, tuple):
            first, second = x
            _, change, aux = attend(second.astype(self.config.compute_dtype))
            first = first + change.astype(first.dtype)
            _, change, more = feed(first.astype(self.config.compute_dtype))
            x = first, second + change.astype(second.dtype)
        else:
            x, _, aux = attend(x)
            x, _, more = feed(x)
        if parts is not None:
            aux = aux._replace(cache=BlockCache(aux.cache, more.cache))
        losses, state, metrics = aux.losses | more.losses, aux.state | more.state, aux.metrics | more.metrics
        return x, aux._replace(losses=losses, state=state, metrics=metrics)

    @nn.compact
    def attend(
        self,
        x: Float[Array, "B T D"],
        inputs: BlockInputs,
        *,
        cache: Any = None,
        layer: Any = None,
        memory: tuple[Array, Array] | None = None,
        deterministic: bool = True,
        return_weights: bool = False,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], BlockAux]:
        """The attention sub-layers; arguments as for a call.

        Returns:
          The stream after them, the sum of what they add to it (pre-norm only), both [B, T, embed_dim], and a
          ``BlockAux``.
        """
        weights: dict[str, Any] = {}
        losses: dict[str, Any] = {}

        def self_attention(hidden: Array) -> Array:
            nonlocal cache
            out = self._attention("attention", self.attention)(
                hidden,
                causal=self.causal,
                key_mask=inputs.key_mask,
                query_positions=inputs.positions,
                query_segments=inputs.segments,
                bias=inputs.bias,
                cache=cache,
                layer=layer,
                deterministic=deterministic,
                return_weights=return_weights,
            )
            cache = out.cache
            losses.update(out.losses)
            if return_weights:
                weights["attention"] = out.weights
            return out.output

        def cross_attention(hidden: Array) -> Array:
            out = self._attention("cross_attention", self.config.cross, rotary=False)(
                hidden,
                inputs.memory if memory is None else memory,
                key_mask=inputs.memory_mask,
                query_segments=None if inputs.memory_segments is None else inputs.segments,
                key_segments=inputs.memory_segments,
                deterministic=deterministic,
                return_weights=return_weights,
            )
            if return_weights:
                weights["cross_attention"] = out.weights
            return out.output

        x, change = self._residual("attention", self_attention, x, inputs, deterministic)
        if self.cross:
            x, further = self._residual("cross_attention", cross_attention, x, inputs, deterministic)
            change = change + further
        return x, change, BlockAux(losses=losses, state={}, cache=cache, weights=weights)

    @nn.compact
    def feed(
        self,
        x: Float[Array, "B T D"],
        inputs: BlockInputs,
        *,
        cache: ConvolutionCache | None = None,
        layer: Any = None,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], BlockAux]:
        """The feed-forward sub-layer, whose variables' names begin with ``mlp``; returns as ``attend`` does.

        ``cache`` is the convolution's.
        """
        losses: dict[str, Array] = {}
        metrics: dict[str, tuple[Array, Array]] = {}

        def feed_forward(hidden: Array) -> Array:
            nonlocal cache
            if self.config.convolution_width is not None:
                hidden, cache = self._convolution(self.config.convolution_width)(
                    hidden, key_mask=inputs.key_mask, segments=inputs.segments, cache=cache, layer=layer
                )
            if self.config.num_experts is None or not self.experts:
                return self._feed_forward()(hidden, mask=real_tokens(inputs), deterministic=deterministic)
            out = self._experts()(hidden, key_mask=real_tokens(inputs), deterministic=deterministic)
            losses.update(out.losses)
            metrics.update(out.metrics)
            return out.output

        x, change = self._residual("mlp", feed_forward, x, inputs, deterministic)
        return x, change, BlockAux(losses=losses, state={}, cache=cache, weights={}, metrics=metrics)

    def _residual(
        self, name: str, sublayer: Callable[[Array], Array], x: Array, inputs: BlockInputs, deterministic: bool
    ) -> tuple[Array, Array]:
        """One sub-layer with its norm, dropout and residual addition: the stream after it, and what was added."""
        # Without the barrier XLA fuses the whole chain of residual additions into every consumer of the norm (on the
        # CPU into the strided copies for the weight gradients), again in each layer.
        x = jax.lax.optimization_barrier(x)
        placement = self.config.norm_placement
        norm = functools.partial(
            normalise, self.config, f"{name}_norm", mask=real_tokens(inputs), deterministic=deterministic
        )
        dropout = nn.Dropout(self.config.dropout_rate, name=f"{name}_dropout")
        change = dropout(sublayer(norm(x) if placement == "pre" else x), deterministic=deterministic)
        return norm(x + change) if placement == "post" else x + change, change

    def _attention(self, name: str, choice: AttentionChoice, rotary: bool = True) -> MultiHeadAttention:
        config = self.config
        return MultiHeadAttention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            attention=choice.kind,
            attention_args=choice.args,
            scale=config.attention_scale,
            rotary_base=config.rotary_base if rotary and config.positions == "rotary" else None,
            dropout_rate=config.attention_dropout_rate,
            use_bias=config.use_bias,
            max_length=config.max_length,
            dtype=config.compute_dtype,
            param_dtype=config.parameter_dtype,
            kernel_init=make_kernel_init(config),
            query_kernel_init=make_query_init(config),
            out_kernel_init=make_kernel_init(config, self.residual_additions),
            name=name,
        )

    def _feed_forward(self) -> FeedForward:
        config = self.config
        return FeedForward(
            mlp_dim=config.hidden_dim,
            activation=config.activation,
            use_bias=config.use_bias,
            dropout_rate=config.mlp_dropout_rate,
            chunk_size=config.mlp_chunk_size,
            norm=config.mlp_norm,
            norm_placement=config.mlp_norm_placement or "before",
            norm_epsilon=config.norm_epsilon,
            norm_momentum=config.kept_average,
            dtype=config.compute_dtype,
            param_dtype=config.parameter_dtype,
            kernel_init=make_kernel_init(config),
            out_kernel_init=make_kernel_init(config, self.residual_additions),
            name="mlp",
        )

    def _convolution(self, width: int) -> DepthwiseConvolution:
        config = self.config
        return DepthwiseConvolution(
            width=width,
            causal=self.causal,
            use_bias=config.use_bias,
            dtype=config.compute_dtype,
            param_dtype=config.parameter_dtype,
            name="mlp_convolution",
        )

    def _experts(self) -> MixtureOfExperts:
        config = self.config
        return MixtureOfExperts(
            num_experts=config.num_experts or 1,
            mlp_dim=config.hidden_dim,
            experts_per_token=config.experts_per_token,
            capacity_factor=config.expert_capacity_factor,
            dispatch=config.expert_dispatch,
            router_jitter=config.router_jitter,
            shared_expert=config.shared_expert,
            balance_loss_weight=config.balance_loss_weight,
            router_z_loss_weight=config.router_z_loss_weight,
            activation=config.activation,
            use_bias=config.use_bias,
            dropout_rate=config.mlp_dropout_rate,
            dtype=config.compute_dtype,
            param_dtype=config.parameter_dtype,
            kernel_init=make_kernel_init(config),
            out_kernel_init=make_kernel_init(config, self.residual_additions),
            name="mlp",
        )


def real_tokens(inputs: BlockInputs) -> Array | None:
    """Which tokens exist: those of the key mask whose segment is not 0."""
    if inputs.segments is None:
        return inputs.key_mask
    real = inputs.segments != 0
    return real if inputs.key_mask is None else real & inputs.key_mask


def make_norm(config: TransformerConfig, name: str | None) -> nn.Module:
    """The configured normalisation layer under ``name`` (None: of no module, to be applied to parameters)."""
    return make_norm_layer(
        config.norm,
        epsilon=config.norm_epsilon,
        momentum=config.kept_average,
        use_bias=config.use_bias,
        param_dtype=config.parameter_dtype,
        name=name,
    )


def normalise(
    config: TransformerConfig, name: str, x: Float[Array, "B T D"], *, mask: Array | None, deterministic: bool
) -> Float[Array, "B T D"]:
    """``x`` through the configured norm, a submodule ``name`` of the module that calls this.

    ``mask`` (True = the token exists) and ``deterministic`` are for batch norm: the others see one token at a time.
    """
    if config.norm == "none":
        return x
    norm: Any = make_norm(config, name)
    return norm(x, mask=mask, deterministic=deterministic) if config.norm == "batch" else norm(x)
