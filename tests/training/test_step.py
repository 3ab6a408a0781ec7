"""The train step: one update a step whatever the micro-batches, good parameters whatever the gradients."""

import functools
import math
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.models import MODELS, stack_layers
from jaxformer.training.objectives import OBJECTIVES, ObjectiveOutput
from jaxformer.training.optimizers import make_optimizer, scale_by_rate
from jaxformer.training.schedules import make_schedule
from jaxformer.training.state import TrainState, abstract_params, abstract_state, init_state
from jaxformer.training.step import jit_train_step, make_eval_step, make_train_step, split_rows

language_model = OBJECTIVES["language_model"]
NO_MODEL = nn.Module()  # for objectives that compute by themselves
TINY = {"vocab_size": 13, "num_layers": 2, "embed_dim": 8, "num_heads": 2, "max_length": 7, "mlp_dim": 12}


def make_batch(rows=4, length=7, seed=0):
    """Random tokens; row i supervises its first i + 2 positions, so that micro-batches differ in their counts."""
    tokens = np.random.default_rng(seed).integers(0, 13, (rows, length + 1), dtype=np.int32)
    supervised = np.arange(length)[None, :] < np.arange(2, rows + 2)[:, None]
    return {"tokens": tokens[:, :-1], "targets": np.where(supervised, tokens[:, 1:], -100).astype(np.int32)}


def linear_objective(model, params, model_state, batch, *, rng, deterministic, step=None):
    """Loss of a row: its slope times the one parameter; a row weighs what the batch says."""
    loss_sum = (params["w"] * batch["slope"] * batch["weight"]).sum()
    return ObjectiveOutput(loss_sum, batch["weight"].sum(), {}, model_state)


def linear_state(optimizer, step=0):
    params = {"w": jnp.ones(())}
    return TrainState(
        step=jnp.int32(step),
        params=params,
        opt_state=optimizer.init(params),
        model_state={},
        rng_data=jax.random.key_data(jax.random.key(0)),
    )


def linear_batch(slopes, weights=None):
    slopes = jnp.asarray(slopes, jnp.float32)
    return {"slope": slopes, "weight": jnp.ones_like(slopes) if weights is None else jnp.asarray(weights, jnp.float32)}


def test_accumulated_loss_is_the_mean_over_all_tokens_of_the_step():
    optimizer = scale_by_rate(1.0)
    step = make_train_step(NO_MODEL, linear_objective, optimizer, lambda step: jnp.float32(1), accumulation_steps=2)
    _, metrics = jax.jit(step)(linear_state(optimizer), linear_batch([1.0, 3.0], [2.0, 6.0]))
    assert float(metrics["loss"]) == 2.5
    assert float(metrics["weight_sum"]) == 8.0
    assert float(metrics["gradient_norm"]) == 2.5


def test_schedule_counts_updates_not_micro_batches():
    def schedule(step):
        return jnp.asarray(step + 1, jnp.float32)

    optimizer = scale_by_rate(schedule)
    step = jax.jit(make_train_step(NO_MODEL, linear_objective, optimizer, schedule, accumulation_steps=2))
    state, changes = linear_state(optimizer), []
    for pair in ([1, 2], [3, 4], [5, 6]):
        before = float(state.params["w"])
        state, metrics = step(state, linear_batch(pair))
        changes.append(float(state.params["w"]) - before)
    assert changes == [-1.5, -7.0, -16.5]
    assert int(state.step) == 3
    assert float(metrics["learning_rate"]) == 3.0


@pytest.mark.parametrize("start", [0, 7])
def test_reported_rate_is_the_one_used(start):
    schedule = make_schedule("constant", learning_rate=1e-3, warmup_steps=10)
    optimizer = scale_by_rate(schedule)
    step = jax.jit(make_train_step(NO_MODEL, linear_objective, optimizer, schedule))
    state = linear_state(optimizer, start).replace(params={"w": jnp.zeros(())})
    for index in range(start, 12):
        state, metrics = step(state.replace(params={"w": jnp.zeros(())}), linear_batch([1.0]))
        assert float(metrics["learning_rate"]) == pytest.approx(min(index / 10, 1) * 1e-3)
        assert float(state.params["w"]) == -float(metrics["learning_rate"])


@functools.cache
def tiny_training(accumulation_steps=1, **fields):
    """A tiny GPT with plain gradient descent: the change of the parameters is minus the gradient."""
    model, batch, optimizer = MODELS["gpt"](**TINY, **fields), make_batch(), optax.sgd(1.0)
    state = init_state(model, optimizer, 0, batch)
    step = make_train_step(
        model, language_model, optimizer, lambda step: jnp.float32(1), accumulation_steps=accumulation_steps
    )
    # Unoptimised code compiles in half the time; what it computes is the same.
    return state, jax.jit(step, compiler_options={"xla_backend_optimization_level": "0"}), batch


def assert_trees_close(left, right, tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), left, right)


@pytest.mark.parametrize("accumulation_steps", [2, 4])
def test_accumulation_equals_the_big_batch(accumulation_steps):
    state, step, batch = tiny_training()
    whole, whole_metrics = step(state, batch)
    parts, parts_metrics = tiny_training(accumulation_steps)[1](state, batch)
    assert_trees_close(whole.params, parts.params, 1e-6)
    assert_trees_close(whole_metrics, parts_metrics, 1e-5)


def test_no_supervised_token_changes_nothing():
    state, step, batch = tiny_training(2)
    new, metrics = step(state, batch | {"targets": np.full_like(batch["targets"], -100)})
    assert (float(metrics["loss"]), float(metrics["weight_sum"]), float(metrics["skipped"])) == (0.0, 0.0, 0.0)
    assert_trees_close(new.params, state.params, 0)


def test_micro_batch_without_supervised_token_adds_nothing():
    state, step, batch = tiny_training(2)
    # Micro-batch 1 holds rows 1 and 3.
    mixed, _ = step(state, batch | {"targets": np.where(np.arange(4)[:, None] % 2, -100, batch["targets"])})
    _, single_step, _ = tiny_training()
    alone, _ = single_step(state, {name: rows[::2] for name, rows in batch.items()})
    assert_trees_close(mixed.params, alone.params, 1e-6)


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_step_that_is_not_finite_changes_nothing_but_the_step(accumulation_steps):
    optimizer, _ = make_optimizer(learning_rate=0.1, params={"w": jnp.ones(())}, no_decay=())
    step = jax.jit(
        make_train_step(
            NO_MODEL, linear_objective, optimizer, lambda step: jnp.float32(0.1), accumulation_steps=accumulation_steps
        )
    )
    state, _ = step(linear_state(optimizer), linear_batch([1.0, 2.0]))
    for bad in (jnp.nan, jnp.inf):
        kept, metrics = step(state, linear_batch([1.0, bad]))
        assert float(metrics["skipped"]) == 1.0
        assert int(kept.step) == int(state.step) + 1
        assert_trees_close((kept.params, kept.opt_state), (state.params, state.opt_state), 0)
    new, metrics = step(kept, linear_batch([1.0, 2.0]))
    assert float(metrics["skipped"]) == 0.0
    assert float(new.params["w"]) != float(kept.params["w"])


def mask_objective(model, params, model_state, batch, *, rng, deterministic, step=None):
    """The gradient is the random mask itself, one for each row."""
    masks = jax.random.bernoulli(rng, 0.5, (batch["row"].shape[0], 64)).astype(jnp.float32)
    return ObjectiveOutput((params * masks.sum(0)).sum(), jnp.float32(1), {}, model_state)


def drawn_mask(step_number, accumulation_steps=1, seed=0):
    optimizer = scale_by_rate(-1.0)
    state = TrainState(
        step=jnp.int32(step_number),
        params=jnp.zeros(64),
        opt_state=optimizer.init(None),
        model_state={},
        rng_data=jax.random.key_data(jax.random.key(seed)),
    )
    step = make_train_step(
        NO_MODEL, mask_objective, optimizer, lambda step: jnp.float32(1), accumulation_steps=accumulation_steps
    )
    new, metrics = step(state, {"row": jnp.zeros((accumulation_steps, 3))[:, :1]})
    np.testing.assert_array_equal(new.rng_data, state.rng_data)
    return np.asarray(new.params) * float(metrics["weight_sum"])


def test_randomness_depends_on_seed_step_and_micro_batch():
    mask = drawn_mask(3)
    np.testing.assert_array_equal(mask, drawn_mask(3))
    for other in (drawn_mask(4), drawn_mask(3, seed=1)):
        assert 0.2 < np.mean(mask == other) < 0.8
    # Two micro-batches with the same mask would give sums of 0 and 2 only.
    both = drawn_mask(3, accumulation_steps=2)
    assert set(both) == {0.0, 1.0, 2.0}


def test_dropout_repeats_for_a_step_and_changes_with_it():
    state, step, batch = tiny_training(dropout_rate=0.3)
    loss = float(step(state, batch)[1]["loss"])
    assert float(step(state, batch)[1]["loss"]) == loss
    assert float(step(state.replace(step=jnp.int32(1)), batch)[1]["loss"]) != loss


@pytest.mark.slow
def test_scanned_and_unrolled_stacks_take_the_same_step():
    unrolled, unrolled_step, batch = tiny_training(dropout_rate=0.3, scan_layers=False)
    _, step, _ = tiny_training(dropout_rate=0.3)
    scanned = unrolled.replace(params=stack_layers(unrolled.params))
    scanned, metrics = step(scanned, batch)
    unrolled, expected = unrolled_step(unrolled, batch)
    assert_trees_close(metrics, expected, 1e-5)
    assert_trees_close(scanned.params, stack_layers(unrolled.params), 1e-5)


def test_whole_run_traces_the_model_once():
    traces = []

    def counted(*args, **kwargs):
        traces.append(1)
        return language_model(*args, **kwargs)

    model, batch = MODELS["gpt"](**TINY, dropout_rate=0.1), make_batch()
    schedule = make_schedule("cosine", learning_rate=1e-2, warmup_steps=2, decay_steps=9)
    optimizer, _ = make_optimizer(learning_rate=schedule, params=abstract_params(model, batch))
    step = jit_train_step(make_train_step(model, counted, optimizer, schedule, accumulation_steps=2))
    state = init_state(model, optimizer, 0, batch)
    first = state
    for index in range(10):
        state, metrics = step(state, make_batch(seed=index))
    assert len(traces) == 1
    assert int(state.step) == 10
    assert int(optax.tree.get(state.opt_state, "count")) == 10, "moments advance once a step"
    assert math.isfinite(float(metrics["loss"]))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first)), "the state is donated"


def test_training_learns_one_batch_by_heart():
    model, batch = MODELS["gpt"](**TINY), make_batch()
    schedule = make_schedule("constant", learning_rate=3e-2)
    optimizer, _ = make_optimizer(learning_rate=schedule, params=abstract_params(model, batch))
    step = jit_train_step(make_train_step(model, language_model, optimizer, schedule))
    state = init_state(model, optimizer, 0, batch)
    for _ in range(60):
        state, metrics = step(state, batch)
    assert float(metrics["loss"]) < 0.1
    assert float(metrics["accuracy"]) == 1.0


def test_bfloat16_computes_low_and_keeps_float32_parameters():
    state, step, batch = tiny_training(dtype="bfloat16")
    new, metrics = step(state, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves((new.params, metrics))} == {jnp.dtype("float32")}
    exact_state, exact_step, _ = tiny_training()
    assert_trees_close(state.params, exact_state.params, 0)
    _, exact = exact_step(exact_state, batch)
    assert float(metrics["loss"]) == pytest.approx(float(exact["loss"]), rel=1e-2)
    assert float(metrics["loss"]) != float(exact["loss"])


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_train_step_lowers_without_a_device(platform):
    model, batch = MODELS["gpt"](**TINY, dropout_rate=0.1, dtype="bfloat16"), make_batch()
    schedule = make_schedule("cosine", learning_rate=1e-2, decay_steps=9)
    optimizer, _ = make_optimizer(learning_rate=schedule, params=abstract_params(model, batch))
    step = jit_train_step(make_train_step(model, language_model, optimizer, schedule, accumulation_steps=2))
    state = abstract_state(model, optimizer, batch)
    exported = jax.export.export(step, platforms=[platform])(state, jax.eval_shape(lambda: batch))
    assert exported.platforms == (platform,)
    assert len(exported.out_avals) == len(jax.tree.leaves(state)) + 7


def test_rows_are_dealt_out_so_that_devices_keep_theirs():
    parts = split_rows({"tokens": jnp.arange(12).reshape(6, 2)}, 3)["tokens"]
    np.testing.assert_array_equal(parts[:, :, 0], [[0, 6], [2, 8], [4, 10]])


def test_micro_batches_that_do_not_divide_are_refused():
    state, step, batch = tiny_training(3)
    with pytest.raises(ValueError, match="accumulation_steps is 3, must divide the batch's 4 rows"):
        step(state, batch)
    with pytest.raises(ValueError, match="accumulation_steps is 0"):
        make_train_step(NO_MODEL, language_model, optax.sgd(1.0), lambda step: 1.0, accumulation_steps=0)


class FixedLosses(nn.Module):
    """The negative log-likelihood of target 0 is the token itself times ln 2."""

    @nn.compact
    def __call__(self, tokens, *, deterministic):
        rest = jnp.log(2.0**tokens - 1.0)
        aux = SimpleNamespace(losses={}, metrics={})
        return SimpleNamespace(logits=jnp.stack([jnp.zeros_like(rest), rest], -1), aux=aux)


def test_evaluation_sums_give_perplexity_over_tokens():
    step = jax.jit(make_eval_step(FixedLosses(), language_model))
    targets = [jnp.zeros((1, 4), jnp.int32), jnp.asarray([[0, -100, -100, -100]])]
    tokens = [jnp.full((1, 4), 1), jnp.full((1, 4), 3)]
    sums = [step({}, {}, {"tokens": t, "targets": y}) for t, y in zip(tokens, targets)]
    total = jax.tree.map(lambda *values: float(sum(values)), *sums)
    assert math.exp(total["loss_sum"] / total["weight_sum"]) == pytest.approx(2.6390158, rel=1e-6)
    assert total["accuracy_count"] == 5.0


def test_state_is_the_same_for_the_same_seed_alone():
    model, optimizer = MODELS["gpt"](**TINY), optax.sgd(1.0)
    first, second, other = (init_state(model, optimizer, seed, make_batch()) for seed in (0, 0, 1))
    assert_trees_close(first, second, 0)
    assert not np.array_equal(first.rng_data, other.rng_data)
    kernels = [state.params["decoder"]["layers"]["mlp"]["up"]["kernel"] for state in (first, other)]
    assert not np.allclose(*kernels)
    with pytest.raises(ValueError, match="seed is -1"):
        init_state(model, optimizer, -1, make_batch())
