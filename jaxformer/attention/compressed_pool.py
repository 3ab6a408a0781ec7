"""Windows of tokens and what they pool to: which slots and tokens a query sees, convolutions and masked means."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention.inputs import as_array, check_count, check_flag
from jaxformer.attention.products import einsum
from jaxformer.functional import compute_dtype


@dataclass(frozen=True)
class Windows:
    """Slot c pools the positions c stride .. c stride + size - 1.

    Attributes:
      stride: tokens from one window to the next.
      size: tokens of a window, at least `stride`.
      recent: causal queries also see the tokens that no visible slot covers.
      causal: slots are seen only when all of their window lies in the past.
    """

    stride: int
    size: int
    recent: bool
    causal: bool

    @classmethod
    def checked(cls, stride: int, window_size: int | None, recent: bool, causal: bool) -> "Windows":
        """The windows that a user asks for."""
        stride = check_count(stride, "stride")
        window_size = stride if window_size is None else check_count(window_size, "window_size")
        if window_size < stride:
            raise ValueError(f"window_size is {window_size}; shorter than the stride {stride} it would skip tokens.")
        return cls(stride, window_size, check_flag(recent, "recent"), check_flag(causal, "causal"))

    @property
    def near(self) -> bool:
        """Whether any token is seen as it is."""
        return self.causal and self.recent

    def num_slots(self, length: int) -> int:
        """Windows that start among `length` tokens."""
        return -(-length // self.stride)

    def first_recent(self, positions: Int[Array, "..."]) -> Int[Array, "..."]:
        """The token after the last slot that a query at this position sees."""
        whole = (positions - self.size) // self.stride
        return jnp.where(whole < 0, 0, whole * self.stride + self.size)

    def sees_slot(self, positions: Int[Array, "..."], num_slots: int) -> Bool[Array, "... C"]:
        """Which slots a query at each position sees, if they hold any token."""
        ends = jnp.arange(num_slots, dtype=jnp.int32) * self.stride + (self.size - 1 + self.recent)
        ends = ends.reshape((1,) * positions.ndim + (num_slots,))
        return ends <= positions[..., None] if self.causal else jnp.ones((*positions.shape, num_slots), bool)

    def sees_token(self, positions: Int[Array, "..."], tokens: Int[Array, "..."]) -> Bool[Array, "..."]:
        """Which tokens a query sees as they are; positions of queries and of tokens broadcast."""
        return (self.first_recent(positions) <= tokens) & (tokens <= positions)

    def query_blocks(self, num_queries: int, num_keys: int) -> tuple[int, int, int]:
        """(first, number, size): blocks of queries whose recent tokens start together, from position `first` on."""
        start = num_keys - num_queries
        if not self.near:
            return start, 1, num_queries
        first = start - (start - self.size) % self.stride
        return first, -(-(num_keys - first) // self.stride), self.stride

    @property
    def reach(self) -> int:
        """How far before its block the recent tokens of a query may start: before the first window is whole."""
        return self.size - self.stride if self.near else 0


def take_blocks(array: Array, start: int, count: int, stride: int, size: int) -> Array:
    """[B, count, size, ..]: the tokens from start + i stride on, of [B, S, ..]; zeros outside."""
    pieces = -(-size // stride) if stride else 0
    if size == 0 or count == 0:
        return jnp.zeros((array.shape[0], count, size, *array.shape[2:]), array.dtype)
    stop = start + (count + pieces - 1) * stride
    before, after = max(0, -start), max(0, stop - array.shape[1])
    rest = [(0, 0)] * (array.ndim - 2)
    array = jnp.pad(array, [(0, 0), (before, after), *rest])[:, start + before : stop + before]
    array = array.reshape(array.shape[0], count + pieces - 1, stride, *array.shape[2:])
    # Windows longer than their stride are laid together from as many shifted views.
    return jnp.concatenate([array[:, i : i + count] for i in range(pieces)], 2)[:, :, :size]


def pool(
    array: Float[Array, "#B S K H"],
    kernel: Float[Array, "..."] | None,
    key_mask: Bool[Array, "#B S"] | None,
    windows: Windows,
) -> tuple[Float[Array, "#B C K H"], Bool[Array, "#B C"]]:
    """The slots, in float32 or wider, and whether each holds any token; the array holds zeros where none exists."""
    dtype = compute_dtype(array.dtype)
    num_slots = windows.num_slots(array.shape[1])
    cut = (0, num_slots, windows.stride, windows.size)
    tokens = take_blocks(array, *cut).astype(dtype)
    mask = jnp.ones((1, array.shape[1]), bool) if key_mask is None else key_mask
    counts = take_blocks(mask, *cut).sum(2, dtype=jnp.int32)
    if kernel is None:
        slots = tokens.sum(2) / jnp.maximum(counts, 1).astype(dtype)[:, :, None, None]
    else:
        slots = einsum(f"bcwkh,{kernel_axes(kernel)}", tokens, kernel.astype(dtype), dtype)
    return slots, counts > 0


def kernel_axes(kernel: Float[Array, "..."]) -> str:
    """The rest of the einsum that applies a kernel to windows of tokens."""
    return {1: "w->bckh", 2: "wh->bckh", 4: "wkhd->bckd"}[kernel.ndim]


def check_kernel(
    kernel: ArrayLike | None, name: str, windows: Windows, num_kv_heads: int, size: int
) -> Float[Array, "..."] | None:
    """A convolution's weights, refused unless they fit the windows and heads."""
    if kernel is None:
        return None
    kernel = as_array(kernel, name)
    width = windows.size
    shapes = ((width,), (width, size), (width, num_kv_heads, size, size))
    if kernel.shape not in shapes:
        raise ValueError(f"{name} has shape {kernel.shape}; it must be one of {shapes}.")
    if not jnp.issubdtype(kernel.dtype, jnp.floating):
        raise ValueError(f"{name} is {kernel.dtype}; it must be floating.")
    return kernel
