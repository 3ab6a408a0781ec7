"""Losses of intermediate layers, future tokens and last positions against loops over shallower models and documents."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.models import MODELS, TransformerConfig
from jaxformer.training.auxiliary import future_targets, last_targets, vanishing_weights
from jaxformer.training.config import load_config, read_config
from jaxformer.training.finished import load_run
from jaxformer.training.loop import train_and_evaluate
from jaxformer.training.objectives import language_model_objective
from jaxformer.training.state import TrainState
from jaxformer.training.step import accumulate, step_metrics

FIELDS = {"vocab_size": 13, "num_layers": 3, "embed_dim": 8, "num_heads": 2, "max_length": 7, "mlp_dim": 12}
FIELDS |= {"init_stddev": 0.3, "vocab_multiple": 4}
# Documents of 4 and 3, of 2, 3 and 1 with a padded end, of 7, and of 5 with an unsupervised start.
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 3, 0], [1] * 7, [1] * 5 + [0] * 2], np.int32)
TOKENS = np.random.default_rng(0).integers(0, 13, SEGMENTS.shape, dtype=np.int32)


def make_batch():
    """The rows above, where a document's last token has no target."""
    following = np.pad(SEGMENTS[:, 1:], ((0, 0), (0, 1)))
    targets = np.where((following == SEGMENTS) & (SEGMENTS > 0), np.roll(TOKENS, -1, 1), -100)
    targets[3, :2] = -100
    batch = {"tokens": TOKENS, "targets": targets.astype(np.int32), "segments": SEGMENTS}
    return jax.tree.map(jnp.asarray, batch)


BATCH = make_batch()


def test_weights_of_layers_by_hand():
    expected = {0: [1, 1, 1, 0], 5: [0.5, 0.75, 5 / 6, 0], 10: [0, 0.5, 2 / 3, 0], 20: [0, 0, 1 / 3, 0], 30: [0] * 4}
    for step, weights in expected.items():
        np.testing.assert_allclose(vanishing_weights(4, step, 80), weights, rtol=0, atol=1e-6)
    # Layer l of n stops at l / 2n of the training, and not before.
    for layer in range(1, 6):
        assert vanishing_weights(6, layer * 100 - 1, 1200)[layer - 1] > 0
        assert vanishing_weights(6, layer * 100, 1200)[layer - 1] == 0


@pytest.mark.parametrize("packed", [True, False])
def test_targets_of_future_tokens_and_of_last_positions_by_a_loop(packed):
    targets, segments = np.asarray(BATCH["targets"]), BATCH["segments"] if packed else None
    documents = SEGMENTS if packed else np.ones_like(SEGMENTS)
    for offset in (1, 2, 9):
        expected = np.full_like(targets, -100)
        for row, t in np.ndindex(targets.shape):
            if t + offset < 7 and documents[row, t] == documents[row, t + offset]:
                expected[row, t] = targets[row, t + offset]
        np.testing.assert_array_equal(future_targets(BATCH["targets"], offset, segments), expected)
    expected = np.full_like(targets, -100)
    for row, targets_of_row in enumerate(targets):
        for document in np.unique(documents[row]):
            supervised = np.flatnonzero((documents[row] == document) & (targets_of_row != -100))
            expected[row, supervised[-1:]] = targets_of_row[supervised[-1:]]
    np.testing.assert_array_equal(last_targets(BATCH["targets"], segments), expected)
    assert (expected != -100).sum() == (6 if packed else 4)


def supervised(offset):
    """By a loop: (row, position, target) of all tokens that have a target that far on in their document."""
    targets = np.asarray(BATCH["targets"])
    found = [
        (row, t, targets[row, t + offset])
        for row, t in np.ndindex(targets.shape)
        if t + offset < 7 and SEGMENTS[row, t] == SEGMENTS[row, t + offset] and targets[row, t + offset] != -100
    ]
    return tuple(map(np.array, zip(*found)))


def naive_losses(name, fields, params):
    """(next-token loss, loss of the token after the next) of every layer: of a model that ends there."""
    layers = []
    for depth in range(1, 4):
        model = MODELS[name](**FIELDS | fields | {"num_layers": depth})
        decoder = dict(params["decoder"])
        if "layers" in decoder:
            decoder["layers"] = jax.tree.map(lambda leaf, depth=depth: leaf[:depth], decoder["layers"])
        variables = {"params": params | {"decoder": decoder}}
        hidden, _ = model.apply(variables, BATCH["tokens"], segments=BATCH["segments"], method="hidden")
        head = params["output_head"]["kernel"] if "output_head" in params else params["token_embedding"]["embedding"].T
        losses = []
        for offset, kernel in enumerate((head, params["future_2_head"]["kernel"])):
            log_probs = jax.nn.log_softmax((hidden @ kernel)[..., :13])
            losses.append(-log_probs[supervised(offset)].sum())
        layers.append(losses)
    return layers


OPTIONS = {"intermediate_weight": 0.7, "intermediate_steps": 50, "future_weight": 0.3}

KINDS = {"scanned": ("gpt", {})}
SLOW = {
    "reversible": ("gpt", {"residual": "reversible", "residual_merge": "concatenate", "tie_embeddings": False}),
    "unrolled": ("gpt", {"scan_layers": False, "remat": "full"}),
    "universal": ("universal_transformer", {}),
    "post": ("gpt", {"norm_placement": "post", "tie_embeddings": False}),
    "full": ("gpt", {"remat": "full"}),
    "sqrt": ("gpt", {"remat": "sqrt"}),
    "dots": ("gpt", {"remat": "dots"}),
    "reversible_unrolled": ("gpt", {"residual": "reversible", "scan_layers": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, *SLOW])
def test_losses_and_gradients_are_those_of_models_that_end_at_each_layer(name):
    kind, fields = (KINDS | SLOW)[name]
    model = MODELS[kind](**FIELDS, **fields, num_future_tokens=2)
    params = jax.jit(lambda: model.init(jax.random.key(1), BATCH["tokens"]))()["params"]
    # At a tenth of the training layers 1 and 2 of 3 weigh 1 - 0.1 / (1 / 6) and 1 - 0.1 / (2 / 6).
    weights = [0.7 * 0.4, 0.7 * 0.7, 1.0]

    def ours(params):
        output = language_model_objective(model, params, {}, BATCH, step=5, **OPTIONS)
        return output.loss_sum, output

    def naive(params):
        losses = naive_losses(kind, fields, params)
        return sum(weight * (main + 0.3 * later) for weight, (main, later) in zip(weights, losses)), losses

    (loss, output), gradients = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    (expected, losses), expected_gradients = jax.jit(jax.value_and_grad(naive, has_aux=True))(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(
        lambda ours, naive: np.testing.assert_allclose(ours, naive, rtol=2e-4, atol=2e-4), gradients, expected_gradients
    )
    tokens = (BATCH["targets"] != -100).sum()
    later = (future_targets(BATCH["targets"], 1, BATCH["segments"]) != -100).sum()
    figures = {
        "next_token_loss": (losses[2][0], tokens),
        "future_2_loss": (losses[2][1], later),
        "intermediate_loss": (losses[0][0] + losses[1][0], 2 * tokens),
        "intermediate_layers": (2 * tokens, tokens),
    }
    assert set(output.metrics) == {"accuracy", *figures}
    for figure, sums in figures.items():
        np.testing.assert_allclose(output.metrics[figure], sums, rtol=1e-5)


GPT = MODELS["gpt"](**FIELDS, num_future_tokens=2)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda: GPT.init(jax.random.key(1), BATCH["tokens"]))()["params"]


def test_a_layer_that_has_vanished_counts_no_more(params):
    run = jax.jit(lambda step: language_model_objective(GPT, params, {}, BATCH, step=step, **OPTIONS))
    tokens = (BATCH["targets"] != -100).sum()
    for step, count in ((0, 2), (8, 2), (9, 1), (16, 1), (17, 0), (60, 0)):
        metrics = run(step).metrics
        assert float(metrics["intermediate_layers"][0]) == count * tokens
        assert float(metrics["intermediate_loss"][1]) == count * tokens
    expected = metrics["next_token_loss"][0] + 0.3 * metrics["future_2_loss"][0]
    np.testing.assert_allclose(run(17).loss_sum, expected, rtol=1e-6)


def test_last_positions_alone_are_supervised_in_training(params):
    model = MODELS["gpt"](**FIELDS)

    @jax.jit
    def run(params):
        objective = functools.partial(language_model_objective, model, params, {})
        by_hand = BATCH | {"targets": last_targets(BATCH["targets"], BATCH["segments"])}
        trained = objective(BATCH, positions="last"), objective(by_hand)
        return *trained, objective(BATCH, positions="last", deterministic=True)

    last, by_hand, evaluated = run(params)
    assert float(last.weight_sum) == 6
    assert float(last.loss_sum) == pytest.approx(float(by_hand.loss_sum), rel=1e-6)
    assert float(evaluated.weight_sum) == (BATCH["targets"] != -100).sum()


@pytest.mark.slow
def test_micro_batches_add_up_to_the_whole(params):
    objective = functools.partial(language_model_objective, **OPTIONS)

    def sums(parts):
        state = TrainState(jnp.int32(6), params, opt_state=(), model_state={}, rng_data=())
        gradients, output = accumulate(GPT, objective, state, BATCH, jax.random.key(0), parts)
        return gradients, step_metrics(output, gradients)

    (whole, figures), (parts, figures_of_parts) = (jax.jit(functools.partial(sums, count))() for count in (1, 2))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5), whole, parts)
    assert figures["intermediate_layers"] == 2
    for name, value in figures.items():
        np.testing.assert_allclose(figures_of_parts[name], value, rtol=1e-5, err_msg=name)


def test_evaluation_and_decoding_know_nothing_of_them(params):
    plain = MODELS["gpt"](**FIELDS)
    own = jax.jit(lambda: plain.init(jax.random.key(1), BATCH["tokens"]))()["params"]
    assert set(params) - set(own) == {"future_2_head"}
    jax.tree.map(np.testing.assert_array_equal, own, {name: params[name] for name in own})

    def look(model, params, options):
        cache = model.init_cache(4, 7)
        output = model.apply({"params": params}, BATCH["tokens"][:, :3], cache=cache)
        return output.logits, language_model_objective(model, params, {}, BATCH, deterministic=True, **options)

    looked = jax.jit(functools.partial(look, GPT, options=OPTIONS))(params)
    expected = jax.jit(functools.partial(look, plain, options={}))(own)
    jax.tree.map(np.testing.assert_array_equal, looked, expected)


def test_a_loss_that_is_off_adds_nothing_to_the_computation(params):
    plain = MODELS["gpt"](**FIELDS)

    def trace(**options):
        return str(jax.make_jaxpr(lambda params: language_model_objective(plain, params, {}, BATCH, **options))(params))

    assert trace() == trace(step=5, intermediate_weight=0.0, intermediate_steps=9, future_weight=0.9, positions="all")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"positions": "first"}, "positions is 'first', must be one of all, last"),
        ({"positions": "last"}, "positions is 'last', must be 'all' with num_future_tokens=2"),
        ({"intermediate_weight": -1.0}, "intermediate_weight is -1.0, must be finite and at least 0"),
        ({"future_weight": float("inf")}, "future_weight is inf, must be finite"),
        ({"intermediate_weight": 1.0}, "intermediate_steps is None, must be the training's updates"),
        ({"intermediate_weight": 1.0, "intermediate_steps": 9}, "step is None"),
    ],
)
def test_options_that_do_not_fit_are_refused(params, options, match):
    with pytest.raises(ValueError, match=match):
        language_model_objective(GPT, params, {}, BATCH, **options)


def test_models_without_such_layers_are_refused():
    with pytest.raises(ValueError, match="num_future_tokens=2 needs a decoder"):
        TransformerConfig(**FIELDS, architecture="encoder", num_future_tokens=2)
    with pytest.raises(ValueError, match="num_future_tokens=0 must be an integer of at least 1"):
        MODELS["gpt"](**FIELDS, num_future_tokens=0)
    model = MODELS["universal_transformer"](**FIELDS, halting="act")
    params = jax.jit(lambda: model.init(jax.random.key(1), BATCH["tokens"]))()["params"]
    with pytest.raises(ValueError, match="readout can't be given with halting='act'"):
        language_model_objective(model, params, {}, BATCH, step=0, **OPTIONS)


@pytest.mark.slow
def test_run_with_vanishing_weights_logs_its_losses_and_goes_on_exactly(text, tiny_config, tmp_path):
    changes = (
        "train.steps=8",
        "checkpoint.every_steps=4",
        "log.every_steps=1",
        "model.num_future_tokens=2",
        "loss.intermediate_weight=0.5",
    )
    train_and_evaluate(tiny_config(text, *changes), tmp_path / "straight")
    lines = [json.loads(line) for line in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
    training = [line for line in lines if line["split"] == "train"]
    # One layer of two, which vanishes after a quarter of eight steps.
    assert [line["intermediate_layers"] for line in training] == [1, 1, 0, 0, 0, 0, 0, 0]
    assert training[0]["loss"] > training[0]["next_token_loss"] + 0.5 * training[0]["future_2_loss"] > 0
    validation = next(line for line in lines if line["split"] == "validation")
    assert not [name for name in validation if "future" in name or "intermediate" in name]
    for steps in (1, 3, 8):
        stopped = (*changes, f"train.steps={steps}", "loss.intermediate_steps=8", "schedule.decay_steps=8")
        train_and_evaluate(tiny_config(text, *stopped), tmp_path / "stopped")
    straight, stopped = load_run(tmp_path / "straight")[1], load_run(tmp_path / "stopped")[1]
    jax.tree.map(np.testing.assert_array_equal, straight, stopped)
    assert read_config(tmp_path / "straight" / "config.json")[1]["loss.intermediate_steps"] == 8


PROGRAM = """
import functools, mesh_program
objective = functools.partial(
    mesh_program.OBJECTIVES["language_model"], intermediate_weight=1.0, intermediate_steps=18
)
mesh_program.OBJECTIVES = {"language_model": objective}
mesh_program.FIELDS |= {"num_future_tokens": 2}
mesh_program.main("data=8", "data=2,fsdp=2,tensor=2")
"""


@pytest.mark.slow
def test_several_devices_change_no_loss():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *filter(None, sys.path)]),
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    for report in json.loads(done.stdout.splitlines()[-1])["reports"].values():
        np.testing.assert_allclose(report["losses"], report["single_losses"], rtol=0, atol=1e-5)


def test_config_has_every_knob():
    config = load_config("language_model:size=tiny").config
    assert (config.loss.positions, config.loss.intermediate_weight, config.loss.future_weight) == ("all", 0.0, 0.5)
    assert config.model.num_future_tokens == 1
