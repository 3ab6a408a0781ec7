"""Multi-head attention: projections, rotary positions and caches around any attention function."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention import ATTENTION, AttentionKind
from jaxformer.functional import apply_rotary
from jaxformer.layers.attention_settings import ATTENTION_ARGUMENTS, argument_defaults, check_decoding, check_settings
from jaxformer.layers.projection import Projection, project


class AttentionOutput(NamedTuple):
    """What ``MultiHeadAttention`` returns.

    Attributes:
      output: [B, T, embed_dim].
      cache: the updated cache, or None without one.
      weights: [B, N, T, S] before dropout when asked for, else None.
      losses: auxiliary losses by name, scalars; most kinds have none.
    """

    output: Array
    cache: Any = None
    weights: Array | None = None
    losses: Mapping[str, Array] = MappingProxyType({})


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention with ``num_heads`` heads over any attention function.

    What a kind draws once or lets follow the data (Performer's features, LSH's rotations, the centroids of routing) is
    in the collection "state": ``variables = module.init(…)`` holds it beside "params", ``module.apply(variables, …)``
    reads it, and training applies with ``mutable=["state"]`` to get it back changed.

    Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, section 3.2.2; grouped heads: Ainslie et al.
    2023, arXiv:2305.13245; rotary positions: Su et al. 2021, arXiv:2104.09864.

    Args:
      num_heads: query heads.
      num_kv_heads: key and value heads, a divisor of ``num_heads`` (None = num_heads; 1 = multi-query).
      head_dim: width of a head (None = embed_dim / num_heads, which must divide).
      attention: an ``AttentionKind`` of the catalogue, or any function (query [B, T, N, H], key [B, S, K, H],
        value [B, S, K, H]) -> [B, T, N, H] (which then can't decode with a cache). What else this layer is given
        (``causal=True``, ``key_mask``, …) is passed on by ``dense_attention``'s names, only when set. A kind that
        takes no positions counts tokens by their place in the row; one that shares query and key has no key
        projection.
      attention_args: further keyword arguments of the function, and of the module that makes the arrays it needs
        (``jaxformer.layers.ATTENTION_ARGUMENTS``): a mapping, or (name, value) pairs.
      scale: factor on the logits (None = the function's own, 1/sqrt(head_dim)).
      rotary_base: wavelength base of rotary positions; None = no rotation.
      dropout_rate: dropout of attention weights, fraction in [0, 1).
      use_bias: whether projections have biases.
      max_length: longest sequence in tokens, for kinds whose arrays have one entry a position.
      dtype: dtype of the computation.
      param_dtype: dtype of the parameters.
      kernel_init: initialiser of the query, key and value kernels [embed_dim, heads * head_dim].
      query_kernel_init: initialiser of the query kernel (None = kernel_init).
      out_kernel_init: initialiser of the output kernel [num_heads * head_dim, embed_dim].

    Raises:
      ValueError: num_heads < 1, num_heads not divisible by num_kv_heads, embed_dim not divisible by num_heads while
        head_dim is None, a cache or weights asked of a function that has none, or an argument given that the kind
        does not take, or that it does not take with a cache.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    attention: Any = ATTENTION["dense"]
    attention_args: Any = ()
    scale: float | None = None
    rotary_base: float | None = None
    dropout_rate: float = 0.0
    use_bias: bool = True
    max_length: int | None = None
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    kernel_init: Callable = nn.initializers.normal(0.02)
    query_kernel_init: Callable | None = None
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
          causal: a query sees keys of its own and of smaller positions only; with a cache always so.
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
          ``AttentionOutput``: ``output`` [B, T, embed_dim], ``cache`` and ``weights`` where asked for, and ``losses``,
          to be added to what is trained (routing's commitment).
        """
        heads, _, head_dim = self._sizes(x.shape[-1])
        shared = self._check(memory)
        query, key, value = self._project(x, memory, shared)
        if memory is None:
            key_positions, key_segments = query_positions, query_segments
            query, key = self._rotate(query, query_positions), self._rotate(key, key_positions)
        tensors = (query,) if shared else (query, key)
        arrays, losses = self._arrays(x, query, query if shared else key, key_mask, causal, deterministic)
        given = {"bias": bias, "scale": self.scale, "key_mask": key_mask}
        weights = None
        if cache is not None:
            step = self._step(memory, mask, deterministic, return_weights)
            given |= {"positions": query_positions, "segments": query_segments, "layer": layer}
            attended, cache = step(
                cache, *tensors, value, **self._accepted(step, given), **{**self._args(step), **arrays}
            )
        else:
            given |= {"query_positions": query_positions, "key_positions": key_positions, "mask": mask}
            given |= {"query_segments": query_segments, "key_segments": key_segments, "causal": causal}
            attended = self._attend(tensors, value, given, arrays, deterministic)
            if return_weights:
                weights = self._weights(tensors, given, arrays)
        out = self._projection("out", heads * head_dim, x.shape[-1], self.out_kernel_init)
        merged = attended.reshape(*attended.shape[:2], heads * head_dim)
        return AttentionOutput(project(merged, *out, dtype=self.dtype), cache, weights, losses)

    def _check(self, memory: Any) -> bool:
        """Refuse a kind or settings that can't be, and say whether the kind shares query and key."""
        kind = self.attention
        if not isinstance(kind, AttentionKind):
            if not callable(kind):
                raise ValueError(
                    f"attention={kind!r} must be a function or a record of jaxformer.attention.ATTENTION; a pattern "
                    "goes to ATTENTION['sparse'] as its setting 'pattern'"
                )
            return False
        check_settings(kind, dict(self.attention_args))
        if kind.shared_query_key and memory is not None:
            raise ValueError(f"attention={kind.name!r} shares query and key: it can't attend to memory")
        return kind.shared_query_key

    def _project(
        self, x: Float[Array, "B T D"], memory: Any, shared: bool
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Queries, keys and values by heads; where query and key are shared, the values stand for the keys."""
        heads, kv_heads, head_dim = self._sizes(x.shape[-1])

        def by_heads(name: str, source: Array, count: int, init: Callable | None = None) -> Array:
            arrays = self._projection(name, source.shape[-1], count * head_dim, init)
            return _split_heads(project(source, *arrays, dtype=self.dtype), count)

        query = by_heads("query", x, heads, self.query_kernel_init)
        if isinstance(memory, tuple):
            return query, *memory
        source = x if memory is None else memory
        key = None if shared else by_heads("key", source, kv_heads)
        value = by_heads("value", source, kv_heads)
        return query, value if key is None else key, value

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
        return kind

    def _step(self, memory: Any, mask: Any, deterministic: bool, return_weights: bool) -> Callable:
        """The kind's step, refused with what it can't do as the call for a whole sequence would."""
        kind = self._kind("cache")
        unmet = {
            "memory": memory is not None,
            "mask": mask is not None,
            "return_weights": return_weights,
            f"dropout_rate={self.dropout_rate} and deterministic=False": self.dropout_rate and not deterministic,
        }
        for setting, is_unmet in unmet.items():
            if is_unmet:
                raise ValueError(f"{setting} can't be given with a cache")
        check_decoding(kind, dict(self.attention_args), kind.name)
        assert kind.step is not None  # Or it was refused.
        return kind.step

    def _arrays(
        self, x: Array, query: Array, key: Array, key_mask: Array | None, causal: bool, deterministic: bool
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        """The arrays that the kind needs beside query, key and value, and auxiliary losses."""
        if not isinstance(self.attention, AttentionKind) or self.attention.name not in ATTENTION_ARGUMENTS:
            return {}, {}
        maker, own = ATTENTION_ARGUMENTS[self.attention.name], argument_defaults(self.attention.name)
        module = maker(
            num_heads=query.shape[2],
            num_kv_heads=key.shape[2],
            head_dim=query.shape[3],
            max_length=self.max_length,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            **{name: value for name, value in dict(self.attention_args).items() if name in own},
            name="arguments",
        )
        return module(x, query, key, key_mask=key_mask, causal=causal, deterministic=deterministic)

    def _args(self, function: Callable, *, every: bool = False) -> dict[str, Any]:
        """The further arguments that the function takes; with ``every``, also those that nothing takes."""
        own = argument_defaults(self.attention.name) if isinstance(self.attention, AttentionKind) else {}
        known = _names(function)
        return {
            name: value
            for name, value in {**own, **dict(self.attention_args)}.items()
            if name in known or (every and name not in own)
        }

    def _accepted(self, function: Callable, given: dict[str, Any]) -> dict[str, Any]:
        """What is set of the arguments; refused where the function does not take it, but for the places of tokens.

        Raises:
          ValueError: an argument that is set and that the function does not take.
        """
        known = _names(function)
        accepted = {}
        for name, value in given.items():
            if value is None or value is False:
                continue
            if name in known:
                accepted[name] = value
            elif name not in ("query_positions", "key_positions"):
                described = self.attention.name if isinstance(self.attention, AttentionKind) else self.attention
                raise ValueError(f"attention={described!r} does not take {name}")
        return accepted

    def _attend(
        self, tensors: tuple[Array, ...], value: Array, given: dict, arrays: dict, deterministic: bool
    ) -> Array:
        function = self.attention.function if isinstance(self.attention, AttentionKind) else self.attention
        if self.dropout_rate and not deterministic:
            given = {**given, "dropout_rate": self.dropout_rate, "rng": self.make_rng("dropout")}
        accepted = self._accepted(function, given)
        # A module's setting that an array replaces (None where it is learned) is the function's argument, too.
        return function(*tensors, value, **accepted, **{**self._args(function, every=True), **arrays})

    def _weights(self, tensors: tuple[Array, ...], given: dict, arrays: dict) -> Array:
        kind = self._kind("weights")
        if kind.weights is None:
            raise ValueError(f"attention={kind.name!r} has no weights")
        known = _names(kind.weights)
        arrays = {name: array for name, array in arrays.items() if name in known}
        accepted = self._accepted(kind.weights, given)
        return kind.weights(*tensors, **accepted, **{**self._args(kind.weights), **arrays})


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


def _names(function: Callable) -> set[str]:
    """The names of a function's arguments."""
    return set(inspect.signature(function).parameters)
