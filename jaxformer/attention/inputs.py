"""What every attention checks first: users' arrays in, arrays of known shape and dtype out, or a clear ValueError."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional import as_mask, compute_dtype


def check_tensor(array: ArrayLike, name: str, axes: str) -> Float[Array, "..."]:
    """The array, refused unless it is floating with the four axes that `axes` names."""
    array = as_array(array, name)
    if array.ndim != 4:
        raise ValueError(f"{name} has shape {array.shape}; it must be {axes}.")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} is {array.dtype}; it must be floating.")
    return array


def check_query_key(query: ArrayLike, key: ArrayLike) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"]]:
    """Query and key of one batch, dtype and head size, with key heads that divide the query heads."""
    query = check_tensor(query, "query", "[batch, queries, heads, head_dim]")
    key = check_tensor(key, "key", "[batch, keys, kv_heads, head_dim]")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or query.shape[3] == 0:
        raise ValueError(
            f"query {query.shape} and key {key.shape} must have equal batch sizes and equal head_dim >= 1."
        )
    if query.dtype != key.dtype:
        raise ValueError(f"query is {query.dtype} and key is {key.dtype}; they must have the same dtype.")
    num_heads, num_kv_heads = query.shape[2], key.shape[2]
    if num_kv_heads == 0 or num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"query has {num_heads} heads and key has {num_kv_heads}; key heads must divide query heads.")
    return query, key


def check_value(value: ArrayLike, key: Float[Array, "B S K H"]) -> Float[Array, "B S K Hv"]:
    """The value, refused unless it stands token by token and head by head beside the key."""
    value = check_tensor(value, "value", "[batch, keys, kv_heads, value_dim]")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value {value.shape} and key {key.shape} must have equal batch, keys and heads.")
    return value


def check_key_mask(key_mask: ArrayLike | None, batch_size: int, length: int) -> Bool[Array, "#B S"] | None:
    """The key mask as bool [B, S] or [1, S]."""
    if key_mask is None:
        return None
    key_mask = as_mask(key_mask, "key_mask")
    if key_mask.ndim != 2 or key_mask.shape[0] not in (1, batch_size) or key_mask.shape[1] != length:
        raise ValueError(f"key_mask has shape {key_mask.shape}; it must be {(batch_size, length)} (batch, keys).")
    return key_mask


def check_token_numbers(
    queries: ArrayLike | None, keys: ArrayLike | None, what: str, batch_size: int, num_queries: int, num_keys: int
) -> tuple[Int[Array, "#B T"] | None, Int[Array, "#B S"] | None]:
    """Positions or segments of queries and keys; one alone serves both where T = S."""
    if queries is None and keys is None:
        return None, None
    if queries is None or keys is None:
        if num_queries != num_keys:
            raise ValueError(
                f"query_{what} and key_{what} go together where the {num_queries} queries are not the {num_keys} keys."
            )
        queries = keys = keys if queries is None else queries
    checked = []
    for numbers, role, length in ((queries, "query", num_queries), (keys, "key", num_keys)):
        numbers = as_array(numbers, f"{role}_{what}")
        if not jnp.issubdtype(numbers.dtype, jnp.integer):
            raise ValueError(f"{role}_{what} is {numbers.dtype}; it must be integer.")
        if numbers.ndim != 2 or numbers.shape[0] not in (1, batch_size) or numbers.shape[1] != length:
            raise ValueError(f"{role}_{what} has shape {numbers.shape}; it must be {(batch_size, length)}.")
        checked.append(numbers.astype(jnp.int32))
    return checked[0], checked[1]


def check_broadcast(array_shape: tuple[int, ...], name: str, shape: tuple[int, int, int, int]) -> tuple[int, ...]:
    """The array's shape filled up to four axes, refused unless it broadcasts to `shape`, [B, N, T, S]."""
    try:
        fits = np.broadcast_shapes(array_shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"{name} has shape {array_shape}; it must broadcast to (batch, heads, queries, keys) = {shape}."
        )
    return (1,) * (4 - len(array_shape)) + array_shape


def check_count(value: Any, name: str, least: int = 1) -> int:
    """A static number of things: a Python or numpy integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}.")
    return int(value)


def check_indices(indices: Any, name: str) -> tuple[int, ...]:
    """Different static places, from 0 on."""
    if isinstance(indices, str) or not hasattr(indices, "__len__") or not hasattr(indices, "__iter__"):
        raise ValueError(f"{name} is {indices!r}; it must be a sequence of integers.")
    checked = tuple(check_count(index, name, 0) for index in indices)
    if len(set(checked)) < len(checked):
        raise ValueError(f"{name} is {checked}; it must be different numbers, none of them twice.")
    return checked


def check_dtype(dtype: Any, name: str = "dtype") -> jnp.dtype:
    """A floating dtype, given as one or by name."""
    try:
        checked = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        checked = None
    if checked is None:
        raise ValueError(f"{name} is {dtype!r}; it must be a floating dtype or its name.")
    if not jnp.issubdtype(checked, jnp.floating):
        raise ValueError(f"{name} is {checked}; it must be floating.")
    return checked


def check_number(value: Any, name: str, least: float = -math.inf, most: float = math.inf) -> float:
    """A static, finite number from `least` to `most`."""
    if isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer) and value.ndim == 0:
        value = value.item()
    known = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not known or not math.isfinite(value) or not least <= value <= most:
        limits = "" if least == -math.inf else f" of at least {least:g}"
        limits = limits if most == math.inf else f" in [{least:g}, {most:g}]"
        raise ValueError(f"{name} is {value!r}; it must be a finite number{limits}.")
    return float(value)


def check_flag(value: Any, name: str) -> bool:
    """A static bool."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} is traced; it is static, a Python bool: close over it or name it in static_argnames.")
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} is {value!r}; it must be True or False.")
    return bool(value)


def check_rng(rng: Any) -> Array:
    """One typed key."""
    if not isinstance(rng, jax.Array) or not jax.dtypes.issubdtype(rng.dtype, jax.dtypes.prng_key) or rng.ndim:
        raise ValueError("rng must be one typed key, as jax.random.key(seed) makes it.")
    return rng


def as_array(array: Any, name: str) -> Array:
    """The argument as a JAX array, refused where it is missing or no array at all."""
    try:
        return jnp.asarray(array)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {array!r}; it must be an array of numbers.") from None


def check_scale(scale: ArrayLike | None, head_dim: int) -> float | Float[Array, ""]:
    """The factor on the logits: 1 / sqrt(head_dim) unless given."""
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, int | float | str | np.bool_ | np.number):
        return check_number(scale, "scale")
    scale = jnp.asarray(scale)
    if scale.ndim or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(f"scale is {scale.dtype} {scale.shape}; it must be a number.")
    return scale


def scale_query(query: Float[Array, "B T N H"], scale: float | Float[Array, ""]) -> Float[Array, "B T N H"]:
    """The query times the scale, so that no implementation has to know it; rounded once to the query's dtype."""
    dtype = compute_dtype(query.dtype)
    return (query.astype(dtype) * jnp.asarray(scale, dtype)).astype(query.dtype)


def check_dropout(dropout_rate: float, rng: Array | None) -> float:
    """The rate in force: 0 without an rng."""
    dropout_rate = check_number(dropout_rate, "dropout_rate")
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate is {dropout_rate}; it must be in [0, 1).")
    if rng is None:
        return 0.0
    check_rng(rng)
    return dropout_rate


def hide_missing(array: Float[Array, "B S K H"], key_mask: Bool[Array, "#B S"] | None) -> Float[Array, "B S K H"]:
    """Zeros where no key exists, so that nothing stored there, NaN included, reaches an output or a gradient."""
    return array if key_mask is None else jnp.where(key_mask[:, :, None, None], array, jnp.zeros((), array.dtype))
