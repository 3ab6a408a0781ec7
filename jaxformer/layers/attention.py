"""Multi-head attention: projections, rotary positions and caches around any attention function."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention import ATTENTION, AttentionKind
from jaxformer.functional import apply_rotary
from jaxformer.layers.projection import Projection, project


class AttentionOutput(NamedTuple):
    """What ``MultiHeadAttention`` returns.

    Attributes:
      output: [B, T, embed_dim].
      cache: the updated cache, or None without one.
      weights: [B, N, T, S] before dropout when asked for, else None.
    """

    output: Array
    cache: Any = None
    weights: Array | None = None


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention with ``num_heads`` heads over any attention function.

    Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, section 3.2.2; grouped heads: Ainslie et al.
    2023, arXiv:2305.13245; rotary positions: Su et al. 2021, arXiv:2104.09864.

    Args:
      num_heads: query heads.
      num_kv_heads: key and value heads, a divisor of ``num_heads`` (None = num_heads; 1 = multi-query).
      head_dim: width of a head (None = embed_dim / num_heads, which must divide).
      attention: an ``AttentionKind`` of the catalogue, or any function (query [B, T, N, H], key [B, S, K, H],
        value [B, S, K, H]) -> [B, T, N, H] (which then can't decode with a cache). What else this layer is given
        (``causal=True``, ``key_mask``, …) is passed on by ``dense_attention``'s names, only when set.
      attention_args: further keyword arguments of the function as (name, value) pairs, hashable.
      scale: factor on the logits (None = the function's own, 1/sqrt(head_dim)).
      rotary_base: wavelength base of rotary positions; None = no rotation.
      dropout_rate: dropout of attention weights, fraction in [0, 1).
      use_bias: whether projections have biases.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      kernel_init: initialiser of the query, key and value kernels [embed_dim, heads * head_dim].
      out_kernel_init: initialiser of the output kernel [num_heads * head_dim, embed_dim].

    Raises:
      ValueError: num_heads < 1, num_heads not divisible by num_kv_heads, embed_dim not divisible by num_heads while
        head_dim is None, or a cache or weights asked of a function that has none.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    attention: AttentionKind | Callable = ATTENTION["dense"]
    attention_args: tuple[tuple[str, Any], ...] = ()
    scale: float | None = None
    rotary_base: float | None = None
    dropout_rate: float = 0.0
    use_bias: bool = True
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    kernel_init: Callable = nn.initializers.normal(0.02)
    out_kernel_init: Callable = nn.initializers.normal(0.02)

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Float[Array, "B S M"] | tuple[Array, Array] | None = None,
        *,
        causal: bool = False,
        key_mask: Bool[Array, "B S"] | None = None,
        query_positions: Int[Array, "B T"] | None = None,
        key_positions: Int[Array, "B S"] | None = None,
        query_segments: Int[Array, "B T"] | None = None,
        key_segments: Int[Array, "B S"] | None = None,
        mask: Array | None = None,
        bias: Any = None,
        cache: Any = None,
        layer: Any = None,
        deterministic: bool = True,
        return_weights: bool = False,
    ) -> AttentionOutput:
        """Attend from ``x`` to itself, or to ``memory``.

        Args:
          x: queries' input [B, T, embed_dim].
          memory: None for self-attention; keys' input [B, S, memory_dim]; or a pair (key, value), each
            [B, S, num_kv_heads, head_dim], projected before by ``project_memory``.
          causal: a query sees keys of its own and of smaller positions only.
          key_mask: bool [B, S], True = the key exists ([B, T] of the new tokens with a cache).
          query_positions: int [B, T], in tokens; in self-attention the keys' positions too.
          key_positions: int [B, S] of the memory.
          query_segments: int [B, T]; a query sees keys of its own segment; in self-attention the keys' too.
          key_segments: int [B, S] of the memory.
          mask: bool or 0/1, broadcastable to [B, N, T, S], True = may attend.
          bias: array broadcastable to [B, N, T, S], or a position bias evaluated block by block.
          cache: of the attention kind; new keys and values are written into it.
          layer: index into a cache stacked over depth.
          deterministic: switches dropout off.
          return_weights: also return the weights [B, N, T, S], taken before dropout.

        Returns:
          ``AttentionOutput``: ``output`` [B, T, embed_dim], and ``cache`` and ``weights`` where asked for.
        """
        heads, kv_heads, head_dim = self._sizes(x.shape[-1])
        query_projection = self._projection("query", x.shape[-1], heads * head_dim)
        if isinstance(memory, tuple):
            query = _split_heads(project(x, *query_projection, dtype=self.dtype), heads)
            key, value = memory
        else:
            source = x if memory is None else memory
            key_projection = self._projection("key", source.shape[-1], kv_heads * head_dim)
            value_projection = self._projection("value", source.shape[-1], kv_heads * head_dim)
            query = _split_heads(project(x, *query_projection, dtype=self.dtype), heads)
            key = _split_heads(project(source, *key_projection, dtype=self.dtype), kv_heads)
            value = _split_heads(project(source, *value_projection, dtype=self.dtype), kv_heads)
        if memory is None:
            key_positions, key_segments = query_positions, query_segments
            query, key = self._rotate(query, query_positions), self._rotate(key, key_positions)
        shared = {"bias": bias, "scale": self.scale}
        if cache is not None:
            if mask is not None or return_weights:
                raise ValueError("mask and return_weights can't be given with a cache")
            given = {
                **shared,
                "positions": query_positions,
                "segments": query_segments,
                "key_mask": key_mask,
                "layer": layer,
            }
            attended, cache = self._kind("cache").step(cache, query, key, value, **_set(given))
            weights = None
        else:
            given = {
                **shared,
                "key_mask": key_mask,
                "query_positions": query_positions,
                "key_positions": key_positions,
                "query_segments": query_segments,
                "key_segments": key_segments,
                "mask": mask,
                "causal": causal,
                **dict(self.attention_args),
            }
            attended = self._attend(query, key, value, given, deterministic)
            weights = self._weights(query, key, given) if return_weights else None
        out = self._projection("out", heads * head_dim, x.shape[-1], self.out_kernel_init)
        merged = attended.reshape(*attended.shape[:2], heads * head_dim)
        return AttentionOutput(project(merged, *out, dtype=self.dtype), cache, weights)

    def _sizes(self, embed_dim: int) -> tuple[int, int, int]:
        """Query heads, key/value heads and head width, checked."""
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        check_heads(embed_dim, self.num_heads, kv_heads, self.head_dim)
        return self.num_heads, kv_heads, self.head_dim or embed_dim // self.num_heads

    def _projection(self, name: str, inputs: int, outputs: int, init: Callable | None = None):
        return Projection(
            inputs, outputs, self.use_bias, self.dtype, self.param_dtype, init or self.kernel_init, name=name
        ).arrays()

    def _rotate(self, x: Array, positions: Array | None) -> Array:
        if self.rotary_base is None:
            return x
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
        return apply_rotary(x, positions, base=self.rotary_base)

    def _kind(self, wanted: str) -> AttentionKind:
        kind = self.attention
        if not isinstance(kind, AttentionKind):
            raise ValueError(f"attention={kind!r} is a bare function and has no {wanted}; pass an AttentionKind")
        if wanted == "cache" and kind.step is None:
            raise ValueError(f"attention={kind.name!r} can't decode with a cache")
        return kind

    def _attend(self, query: Array, key: Array, value: Array, given: dict, deterministic: bool) -> Array:
        function = self.attention.function if isinstance(self.attention, AttentionKind) else self.attention
        if self.dropout_rate and not deterministic:
            given = {**given, "dropout_rate": self.dropout_rate, "rng": self.make_rng("dropout")}
        return function(query, key, value, **_set(given))

    def _weights(self, query: Array, key: Array, given: dict) -> Array:
        kind = self._kind("weights")
        if kind.weights is None:
            raise ValueError(f"attention={kind.name!r} has no weights")
        return kind.weights(query, key, **_set({**given, "implementation": None, "block_size": None}))


def project_memory(params: dict[str, Any], memory: Float[Array, "B S M"], num_kv_heads: int, dtype: Any):
    """Keys and values of an encoder's output, computed once and reused at every decoding step.

    Args:
      params: the parameters of a ``MultiHeadAttention`` (its ``key`` and ``value`` projections are read).
      memory: the encoder's output [B, S, memory_dim].
      num_kv_heads: key and value heads.
      dtype: dtype of the computation.

    Returns:
      (key, value), each [B, S, num_kv_heads, head_dim], to be given as ``memory``.
    """
    return tuple(
        _split_heads(project(memory, params[name]["kernel"], params[name].get("bias"), dtype=dtype), num_kv_heads)
        for name in ("key", "value")
    )


def check_heads(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> None:
    """Refuse sizes that don't fit together, naming them.

    Raises:
      ValueError: a count below 1, num_heads not divisible by num_kv_heads, or embed_dim not divisible by num_heads
        while head_dim is None.
    """
    for name, count in {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}.items():
        if count is None and name == "head_dim":
            continue
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name}={count!r} must be an integer of at least 1")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} must be divisible by num_kv_heads={num_kv_heads}")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(f"embed_dim={embed_dim} must be divisible by num_heads={num_heads}, or head_dim be given")


def _split_heads(x: Float[Array, "B T F"], heads: int) -> Float[Array, "B T N H"]:
    return x.reshape(*x.shape[:2], heads, x.shape[-1] // heads)


def _set(arguments: dict[str, Any]) -> dict[str, Any]:
    """Only the arguments that say something: an attention function need not know the optional ones."""
    return {name: value for name, value in arguments.items() if value is not None and value is not False}
