"""Every public function lowers for the three platforms, which needs none of their devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxformer import functional

X = jnp.ones((2, 3, 5, 8))
LOGITS = jnp.ones((3, 300))
POSITIONS = np.array([[0, 1, 2], [4, 5, 6]])
LABELS = np.array([1, -100, 299])
KEY = jax.random.key(0)

CALLS = {
    "as_mask": lambda: functional.as_mask(POSITIONS),
    "causal_mask": lambda: functional.causal_mask(POSITIONS, POSITIONS),
    "segment_mask": lambda: functional.segment_mask(POSITIONS, POSITIONS),
    "padding_mask": lambda: functional.padding_mask(POSITIONS),
    "combine_masks": lambda: functional.combine_masks(POSITIONS, POSITIONS[:1]),
    "mask_from_lengths": lambda: functional.mask_from_lengths(POSITIONS, 7),
    "sinusoidal_positions": lambda: functional.sinusoidal_positions(POSITIONS, 5),
    "alibi_slopes": lambda: functional.alibi_slopes(5),
    "relative_position_bucket": lambda: functional.relative_position_bucket(POSITIONS, bidirectional=True),
    "first_argmax": lambda: functional.first_argmax(LOGITS),
    "sample_logits": lambda: functional.sample_logits(KEY, LOGITS, top_k=7, top_p=0.9, min_p=0.1),
    "top_k_filter": lambda: functional.top_k_filter(LOGITS, 7),
    "top_p_filter": lambda: functional.top_p_filter(LOGITS, 0.9),
    "min_p_filter": lambda: functional.min_p_filter(LOGITS, 0.1),
    "apply_repetition_penalty": lambda: functional.apply_repetition_penalty(LOGITS, LOGITS > 0, 1.2),
}
GRADIENTS = {
    "masked_softmax": lambda x: functional.masked_softmax(x, POSITIONS[:, :, None, None]),
    "layer_norm": lambda x: functional.layer_norm(x, x[0, 0, 0], x[0, 0, 0]),
    "batch_statistics": lambda x: functional.batch_statistics(x, mask=x[..., 0] > 0).variance,
    "BatchStatistics": lambda x: functional.BatchStatistics(*functional.batch_statistics(x)).mean,
    "batch_norm": lambda x: functional.batch_norm(x, mean=x[0, 0, 0], variance=jnp.square(x[0, 0, 0])),
    "update_running": lambda x: functional.update_running(x[0, 0, 0], x[0, 0, 0], functional.batch_statistics(x))[1],
    "pool_tokens": lambda x: sum(
        functional.pool_tokens(x[0], x[0, ..., 0] > 0, pooling=p) for p in functional.POOLINGS
    ),
    "rms_norm": lambda x: functional.rms_norm(x, x[0, 0, 0]),
    "elu_features": lambda x: functional.elu_features(x),
    "relu_features": lambda x: functional.relu_features(x),
    "softplus_features": lambda x: functional.softplus_features(x),
    "apply_rotary": lambda x: functional.apply_rotary(x, POSITIONS),
    "AlibiBias": lambda x: functional.AlibiBias(x[0, 0, 0])(POSITIONS, POSITIONS),
    "RelativeBias": lambda x: functional.RelativeBias(x[0, 0].T, bidirectional=True)(POSITIONS, POSITIONS),
    "CrossEntropy": lambda x: functional.CrossEntropy(*x[0, 0, 0, :4]).loss_sum,
    "cross_entropy": lambda x: functional.cross_entropy(jnp.tile(x[0, 0, :3], (1, 40)), LABELS).loss_sum,
    "chunked_cross_entropy": lambda x: (
        functional.chunked_cross_entropy(x[0, 0, :3], jnp.ones((8, 300)), LABELS, chunk_size=2).loss_sum
    ),
    "mean_loss": lambda x: functional.mean_loss(x.sum(), x.sum()),
    "halting_weights": lambda x: functional.halting_weights(x).weights,
    "ponder_cost": lambda x: functional.ponder_cost(POSITIONS, x[0, 0, :2, :3]),
    "adaptive_steps": lambda x: functional.adaptive_steps(lambda n, y, c: (y[..., 0], 2.0 * y, c, None), x, 3).output,
}


def dispatched(dispatch, x, factor):
    routes = functional.route_tokens(x[0, :, :, :4], experts_per_token=2)

    def experts(inputs, owners, tokens):
        kernels = jnp.ones((4, 8, 8))
        return inputs @ kernels if owners is None else functional.grouped_matmul(inputs, kernels, owners)

    return dispatch(x[0], routes, experts, capacity_factor=factor)[0]


def reversible(x):
    """Two layers of one kind."""

    def change(kernel, stream, index, shared):
        return stream @ kernel * index.astype(x.dtype), {}, None

    kernels = jnp.ones((2, 8, 8))
    return functional.reversible_stack([(change, change)], [(kernels, kernels)], functional.split_streams(x))


GRADIENTS |= {
    "reversible_stack": lambda x: reversible(x).streams[0],
    "ReversibleOutput": lambda x: functional.ReversibleOutput(*reversible(x)).streams[1],
    "split_streams": lambda x: functional.split_streams(x, "halve")[1],
    "merge_streams": lambda x: functional.merge_streams((x, x), "concatenate"),
    "route_tokens": lambda x: functional.route_tokens(x[0], experts_per_token=2).gates,
    "ExpertRoutes": lambda x: functional.ExpertRoutes(*functional.route_tokens(x[0])).gates,
    "balance_loss": lambda x: functional.balance_loss(functional.route_tokens(x[0])),
    "router_z_loss": lambda x: functional.router_z_loss(x[0]),
    "router_jitter": lambda x: functional.router_jitter(x[0], KEY, 0.1),
    "grouped_matmul": lambda x: functional.grouped_matmul(x[0], jnp.ones((4, 8, 2)), POSITIONS[0]),
    "sort_dispatch": lambda x: (
        dispatched(functional.sort_dispatch, x, None) + dispatched(functional.sort_dispatch, x, 1.0)
    ),
    "einsum_dispatch": lambda x: dispatched(functional.einsum_dispatch, x, 1.0),
}
WITHOUT_ARRAYS = {
    *("DISPATCHES", "FEATURE_MAPS", "POOLINGS"),
    *("check_experts", "check_sampling", "compute_dtype", "expert_capacities"),
}


def test_every_public_function_is_lowered_here():
    assert set(CALLS) | set(GRADIENTS) | WITHOUT_ARRAYS == set(functional.__all__)


@pytest.mark.parametrize("name", [*CALLS, *GRADIENTS])
def test_lowers_for_cpu_cuda_and_tpu(name):
    if name in CALLS:
        function, arguments = CALLS[name], ()
    else:
        function, arguments = jax.grad(lambda x: GRADIENTS[name](x).sum()), (X,)
    exported = export.export(jax.jit(function), platforms=("cpu", "cuda", "tpu"))(*arguments)
    assert set(exported.platforms) == {"cpu", "cuda", "tpu"}
