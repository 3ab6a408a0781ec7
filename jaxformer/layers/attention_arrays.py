"""One small module a kind of attention that needs arrays: it declares them, and the function does the rest."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.attention import (
    block_summaries,
    draw_features,
    draw_hash_planes,
    draw_rotations,
    routing_update,
)
from jaxformer.layers.attention_arguments import Arrays, AttentionArguments
from jaxformer.layers.projection import Projection
from jaxformer.layers.state import STATE


class AdditiveArguments(AttentionArguments):
    """Two projections and a vector shared by the heads: Bahdanau et al. 2015, arXiv:1409.0473, appendix A.1.2.

    Args:
      hidden_dim: width of the hidden layer (None = head_dim).
    """

    makes = ("query_kernel", "key_kernel", "score_vector")

    hidden_dim: int | None = None

    @nn.compact
    def __call__(self, x: Array, query: Array, key: Array, **_: Any) -> Arrays:
        """Both kernels and the vector."""
        hidden = self.hidden_dim or self.head_dim
        init = nn.initializers.lecun_normal()
        arrays = {
            name: self.param(name, init, (self.head_dim, hidden), self.param_dtype)
            for name in ("query_kernel", "key_kernel")
        }
        return {**arrays, "score_vector": self.param("score_vector", _unit_sum, (hidden,), self.param_dtype)}, {}


class ConcatArguments(AttentionArguments):
    """A projection of query beside key and a vector, shared by the heads: Luong et al. 2015, arXiv:1508.04025.

    Args:
      hidden_dim: width of the hidden layer (None = head_dim).
    """

    makes = ("kernel", "score_vector")

    hidden_dim: int | None = None

    @nn.compact
    def __call__(self, x: Array, query: Array, key: Array, **_: Any) -> Arrays:
        """The kernel and the vector."""
        hidden = self.hidden_dim or self.head_dim
        init = nn.initializers.lecun_normal()
        kernel = self.param("kernel", init, (2 * self.head_dim, hidden), self.param_dtype)
        return {
            "kernel": kernel,
            "score_vector": self.param("score_vector", _unit_sum, (hidden,), self.param_dtype),
        }, {}


class BilinearArguments(AttentionArguments):
    """A matrix between query and key, shared by the heads: Luong et al. 2015, arXiv:1508.04025, equation 8."""

    makes = ("kernel",)

    @nn.compact
    def __call__(self, x: Array, query: Array, key: Array, **_: Any) -> Arrays:
        """The kernel, which begins as the scaled dot product."""

        def scaled_identity(rng: Array, shape: tuple[int, ...], dtype: Any) -> Array:
            return jnp.eye(shape[0], dtype=dtype) * jnp.asarray(shape[0] ** -0.5, dtype)

        return {"kernel": self.param("kernel", scaled_identity, (self.head_dim, self.head_dim), self.param_dtype)}, {}


class KernelArguments(AttentionArguments):
    """A learned width for each head, positive as an exponential, or a fixed one: Nadaraya 1964, doi:10.1137/1109020.

    Args:
      width: a fixed width of at least 1e-10, in the units of query and key, or one for each head; None = learned.
    """

    width: Any = None

    @nn.compact
    def __call__(self, x: Array, query: Array, key: Array, **_: Any) -> Arrays:
        """The widths, with which a Gaussian begins as the softmax of scaled dot products of equally long keys."""
        if isinstance(self.width, tuple | list):
            return {"width": np.asarray(self.width, np.float32)}, {}
        if self.width is not None:
            return {}, {}  # The function has it from the settings.
        start = nn.initializers.constant(math.log(self.head_dim) / 4)
        return {"width": jnp.exp(self.param("log_width", start, (self.num_heads,), self.param_dtype))}, {}


class ClusteredArguments(AttentionArguments):
    """Random planes that hash queries, drawn once: Vyas et al. 2020, arXiv:2007.04825, section 3.2.1.

    Args:
      num_bits: planes.
    """

    makes = ("hash_planes", "query_mask")

    num_bits: int = 63

    @nn.compact
    def __call__(self, x: Array, query: Array, key: Array, *, key_mask: Any, **_: Any) -> Arrays:
        """The planes; in self-attention padding is no query either."""
        planes = self.variable(
            STATE, "hash_planes", lambda: draw_hash_planes(self.make_rng("params"), self.head_dim, self.num_bits)
        )
        arrays = {"hash_planes": planes.value}
        return (
            arrays if key_mask is None or query.shape[1] != key.shape[1] else {**arrays, "query_mask": key_mask}
        ), {}


class LshArguments(AttentionArguments):
    """Random rotations, drawn once: Kitaev et al. 2020, arXiv:2001.04451, section 2.

    Args:
      num_hashes: rounds of hashing.
      num_buckets: buckets of a round, even; a tuple of even factors for many.
    """

    makes = ("rotations",)

    num_hashes: int = 2
    num_buckets: Any = 16

    @nn.compact
    def __call__(self, x: Array, query: Array, key: Array, **_: Any) -> Arrays:
        """The rotations."""
        rotations = self.variable(
            STATE,
            "rotations",
            lambda: draw_rotations(
                self.make_rng("params"), self.num_hashes, self.num_buckets, self.head_dim, self.num_heads
            ),
        )
        return {"rotations": rotations.value}, {}


class PerformerArguments(AttentionArguments):
    """Random features, drawn once or every so many training steps: Choromanski et al. 2021, arXiv:2009.14794.

    Args:
      num_features: features of a head.
      orthogonal: orthogonal in blocks of head_dim; else independent.
      redraw_every: training steps between draws; None = never again.
    """

    makes = ("projection",)

    num_features: int = 128
    orthogonal: bool = True
    redraw_every: int | None = None

    @nn.compact
    def __call__(self, x: Array, query: Array, key: Array, *, deterministic: bool, **_: Any) -> Arrays:
        """The projection."""
        if self.redraw_every is None:
            projection = self.variable(STATE, "projection", lambda: self._draw(self.make_rng("params")))
            return {"projection": projection.value}, {}
        seed = self.variable(STATE, "seed", lambda: jax.random.key_data(self.make_rng("params")))
        steps = self.variable(STATE, "steps", lambda: jnp.zeros((), jnp.int32))
        # The features follow from the number of steps, so a resumed run and a recomputation draw the same.
        rng = jax.random.fold_in(jax.random.wrap_key_data(seed.value), steps.value // self.redraw_every)
        if not deterministic and self.is_mutable_collection(STATE) and not self.is_initializing():
            steps.value = steps.value + 1
        return {"projection": self._draw(rng)}, {}

    def _draw(self, rng: Array) -> Array:
        return draw_features(
            rng, self.num_features, self.head_dim, num_kv_heads=self.num_kv_heads, orthogonal=self.orthogonal
        )


class RoutingArguments(AttentionArguments):
    """Centroids that follow queries and keys in training: Roy et al. 2021, arXiv:2003.05997, section 4.1.

    Args:
      num_clusters: clusters of a head.
      decay: share of a centroid that a training step keeps, in [0, 1].
      commitment: weight of the loss that pulls queries and keys to their centroids.
    """

    makes = ("centroids",)

    num_clusters: int = 8
    decay: float = 0.999
    commitment: float = 1e-4

    @nn.compact
    def __call__(self, x: Array, query: Array, key: Array, *, key_mask: Any, deterministic: bool, **_: Any) -> Arrays:
        """The centroids before this step."""
        shape = (self.num_heads, self.num_clusters, self.head_dim)
        stored = self.variable(STATE, "centroids", lambda: jax.random.normal(self.make_rng("params"), shape))
        centroids = stored.value
        if deterministic or self.is_initializing():
            return {"centroids": centroids}, {}
        moved, loss = routing_update(centroids, query, key, key_mask=key_mask, decay=self.decay)
        if self.is_mutable_collection(STATE):
            stored.value = moved
        return {"centroids": centroids}, {"routing_commitment": self.commitment * loss}


class LinformerArguments(AttentionArguments):
    """Learned projections over positions: Wang et al. 2020, arXiv:2006.04768, section 4.

    Of the paper's ways to share them, "headwise" and "key-value" are settings; "layerwise" is the function's alone:
    each layer of a model has projections of its own.

    Args:
      rank: slots that the positions are projected to.
      share_heads: one projection for all heads; else one a key head.
      share_key_value: values are projected like keys.
    """

    makes = ("key_projection", "value_projection")

    rank: int = 64
    share_heads: bool = True
    share_key_value: bool = False

    @nn.compact
    def __call__(self, x: Array, query: Array, key: Array, **_: Any) -> Arrays:
        """The projections, for positions below max_length."""
        if self.max_length is None:
            raise ValueError("max_length is None; linformer attention has one column for each position below it.")
        heads = () if self.share_heads else (self.num_kv_heads,)
        # A sum over the positions of independent keys keeps their variance.
        init = nn.initializers.normal(self.max_length**-0.5)
        names = ("key_projection",) if self.share_key_value else ("key_projection", "value_projection")
        shape = (*heads, self.rank, self.max_length)
        return {name: self.param(name, init, shape, self.param_dtype) for name in names}, {}


class SinkhornArguments(AttentionArguments):
    """The sorting network, block by block: Tay et al. 2020, arXiv:2002.11296, section 3.1.

    Args:
      block_size: tokens of a block.
    """

    makes = ("block_scores",)

    block_size: int = 16

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], query: Array, key: Array, *, key_mask: Any, causal: bool, **_: Any
    ) -> Arrays:
        """Scores of every block for every block."""
        if self.max_length is None:
            raise ValueError("max_length is None; sinkhorn attention scores each block of positions below it.")
        blocks = -(-self.max_length // self.block_size)
        summaries = block_summaries(x, self.block_size, key_mask=key_mask, causal=causal)
        hidden = nn.relu(self._projection("hidden", x.shape[-1], x.shape[-1])(summaries))
        scores = self._projection("scores", x.shape[-1], self.num_kv_heads * blocks)(hidden)
        scores = scores.reshape(*scores.shape[:2], self.num_kv_heads, blocks).transpose(0, 2, 1, 3)
        return {"block_scores": scores[..., : summaries.shape[1]]}, {}

    def _projection(self, name: str, inputs: int, outputs: int) -> Projection:
        init = nn.initializers.lecun_normal()
        return Projection(inputs, outputs, True, self.dtype, self.param_dtype, init, name=name)


class LongformerArguments(AttentionArguments):
    """Projections of their own for global tokens: Beltagy et al. 2020, arXiv:2004.05150, section 3.1."""

    makes = ("global_query", "global_key", "global_value")

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], query: Array, key: Array, **_: Any) -> Arrays:
        """Global queries, keys and values."""
        heads = {"query": self.num_heads, "key": self.num_kv_heads, "value": self.num_kv_heads}
        arrays = {}
        for name, count in heads.items():
            width = count * self.head_dim
            projection = Projection(
                x.shape[-1], width, True, self.dtype, self.param_dtype, self.kernel_init, name=f"global_{name}"
            )
            arrays[f"global_{name}"] = projection(x).reshape(*x.shape[:2], count, self.head_dim)
        return arrays, {}


class SparseArguments(AttentionArguments):
    """Learned keys and values that every query sees: Ainslie et al. 2020, arXiv:2004.08483, section 2.2.

    They have no slots in a cache: each decoded token meets them as it did in training. Chosen tokens of each example
    (``global_mask``) are the function's alone, since settings are the same for all examples; those at fixed positions
    are a pattern, ``global_tokens(indices)``, which decodes.

    Args:
      num_added: how many; none by default.
    """

    makes = ("global_key", "global_value")

    num_added: int = 0

    @nn.compact
    def __call__(self, x: Array, query: Array, key: Array, **_: Any) -> Arrays:
        """Keys and values, of unit variance as normalised inputs give."""
        shape = (1, self.num_added, self.num_kv_heads, self.head_dim)
        names = ("global_key", "global_value") if self.num_added else ()
        init = nn.initializers.normal(1.0)
        return {name: self.param(name, init, shape, self.param_dtype).astype(self.dtype) for name in names}, {}


class CompressedArguments(AttentionArguments):
    """Kernels of the strided convolution, if wanted: Liu et al. 2018, arXiv:1801.10198, section 4.2.3.

    Args:
      convolution: learned kernels, beginning as means of windows; else means.
      window_size: tokens a kernel covers (None = the stride).
      stride: tokens from one window to the next.
    """

    makes = ("key_kernel", "value_kernel")

    convolution: bool = False
    stride: int = 4
    window_size: int | None = None

    @nn.compact
    def __call__(self, x: Array, query: Array, key: Array, **_: Any) -> Arrays:
        """The kernels."""
        if not self.convolution:
            return {}, {}
        width = self.window_size or self.stride
        init = nn.initializers.constant(1 / width)
        names = ("key_kernel", "value_kernel")
        return {name: self.param(name, init, (width, self.head_dim), self.param_dtype) for name in names}, {}


def _unit_sum(rng: Array, shape: tuple[int], dtype: Any) -> Array:
    """A vector whose product with independent numbers of unit variance has unit variance."""
    return jax.random.normal(rng, shape, dtype) * jnp.asarray(shape[0] ** -0.5, dtype)
