"""Three updates of every optimizer against its formula, written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxformer.training.optimizers import OPTIMIZERS, make_optimizer

RATES = (0.5, 0.25, 0.125)
DECAYED = "kernel"


def schedule(step):
    return jnp.asarray(RATES, jnp.float32)[step]


schedule.peak = 0.5


def rms(x):
    return np.sqrt(np.mean(x**2))


# Each takes the gradient, the parameter, what it kept (a dict), the number of the update (from 1), the decay of this
# parameter, the rate over its peak, and the hyperparameters; it returns the whole change of the parameter, over -rate.


def sgd(g, p, kept, t, decay, h):
    return g + decay * p


def momentum(g, p, kept, t, decay, h):
    g = g + decay * p
    kept["m"] = h["momentum"] * kept.get("m", 0.0) + g
    return g + h["momentum"] * kept["m"] if h.get("nesterov") else kept["m"]


def rmsprop(g, p, kept, t, decay, h):
    g = g + decay * p
    start = np.full_like(p, h.get("initial_scale", 0.0))
    kept["v"] = h["b2"] * kept.get("v", start) + (1 - h["b2"]) * g * g
    spread = kept["v"]
    if h.get("centered"):
        kept["mean"] = h["b2"] * kept.get("mean", 0.0) + (1 - h["b2"]) * g
        spread = spread - kept["mean"] ** 2
    if h.get("epsilon_in_root"):
        direction = g / np.sqrt(spread + h["epsilon"])
    else:
        direction = g / (np.sqrt(spread) + h["epsilon"])
    if "momentum" in h:
        direction = kept["sum"] = h["momentum"] * kept.get("sum", 0.0) + direction
    return direction


def adam(g, p, kept, t, decay, h):
    kept["m"] = h["b1"] * kept.get("m", 0.0) + (1 - h["b1"]) * g
    kept["v"] = h["b2"] * kept.get("v", 0.0) + (1 - h["b2"]) * g * g
    first, second = kept["m"] / (1 - h["b1"] ** t), kept["v"] / (1 - h["b2"] ** t)
    return first / (np.sqrt(second) + h["epsilon"])


def adam_l2(g, p, kept, t, decay, h):
    return adam(g + decay * p, p, kept, t, 0.0, h)


def adamw(g, p, kept, t, decay, h):
    return adam(g, p, kept, t, 0.0, h) + decoupled(decay, p, h)


def decoupled(decay, p, h):
    """(rate / peak) * decay * p of the paper, over the rate; or decay * p."""
    return decay * p / (RATES[0] if h.get("decay_multiplier") == "schedule" else 1.0)


def adafactor(g, p, kept, t, decay, h):
    keep = 1 - t ** -h.get("decay_exponent", 0.8)
    square = g * g + h["epsilon"]
    if p.ndim == 2:
        kept["r"] = keep * kept.get("r", 0.0) + (1 - keep) * square.mean(axis=1)
        kept["c"] = keep * kept.get("c", 0.0) + (1 - keep) * square.mean(axis=0)
        second = np.outer(kept["r"], kept["c"]) / kept["r"].mean()
    else:
        second = kept["v"] = keep * kept.get("v", 0.0) + (1 - keep) * square
    update = g / np.sqrt(second)
    update = update / max(1.0, rms(update) / h.get("clip_update", 1.0))
    if h.get("relative_scale", True):
        update = update * max(h.get("smallest_scale", 1e-3), rms(p))
    if "b1" in h:
        update = kept["mean"] = h["b1"] * kept.get("mean", 0.0) + (1 - h["b1"]) * update
    return update + decoupled(decay, p, h)


def lion(g, p, kept, t, decay, h):
    old = kept.get("m", 0.0)
    kept["m"] = h["b2"] * old + (1 - h["b2"]) * g
    return np.sign(h["b1"] * old + (1 - h["b1"]) * g) + decoupled(decay, p, h)


def muon(g, p, kept, t, decay, h):
    if p.ndim != 2:
        return adamw(g, p, kept, t, decay, h)
    beta = h["momentum"]
    kept["m"] = beta * kept.get("m", 0.0) + (1 - beta) * g
    x = kept["m"] / (1 - beta**t)
    if h.get("nesterov", True):
        x = beta * kept["m"] / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
    x = x / np.linalg.norm(x)
    for _ in range(h.get("newton_schulz_steps", 5)):
        square = x @ x.T
        x = 3.4445 * x - 4.775 * square @ x + 2.0315 * square @ square @ x
    inputs, outputs = p.shape
    scale = 0.2 * max(inputs, outputs) ** 0.5 if h.get("muon_scale") != "width" else max(1.0, outputs / inputs) ** 0.5
    return scale * x + decoupled(decay, p, h)


ADAM = {"b1": 0.8, "b2": 0.9, "epsilon": 1e-2}
CASES = [
    ("gradient_descent", sgd, {}),
    ("sgd", sgd, {"weight_decay": 0.1}),
    ("momentum", momentum, {"momentum": 0.7, "weight_decay": 0.1}),
    ("momentum", momentum, {"momentum": 0.7, "nesterov": True}),
    ("rmsprop", rmsprop, {"b2": 0.8, "epsilon": 0.05}),
    ("rmsprop", rmsprop, {"b2": 0.8, "epsilon": 0.05, "epsilon_in_root": True, "initial_scale": 0.5}),
    ("rmsprop", rmsprop, {"b2": 0.8, "epsilon": 0.05, "centered": True, "momentum": 0.6, "weight_decay": 0.1}),
    ("adam", adam, ADAM),
    ("adam_l2", adam_l2, {**ADAM, "weight_decay": 0.2}),
    ("adamw", adamw, {**ADAM, "weight_decay": 0.2}),
    ("adamw", adamw, {**ADAM, "weight_decay": 0.2, "decay_multiplier": "schedule"}),
    ("adafactor", adafactor, {"epsilon": 1e-3, "smallest_factored": 2, "weight_decay": 0.1}),
    (
        "adafactor",
        adafactor,
        {"epsilon": 1e-3, "smallest_factored": 2, "relative_scale": False, "clip_update": 0.6, "b1": 0.5},
    ),
    ("lion", lion, {"b1": 0.6, "b2": 0.8, "weight_decay": 0.1, "decay_multiplier": "schedule"}),
    ("muon", muon, {**ADAM, "momentum": 0.7, "weight_decay": 0.1}),
    ("muon", muon, {**ADAM, "momentum": 0.7, "muon_scale": "width", "nesterov": False, "weight_decay": 0.1}),
]


def by_hand(rule, params, gradients, h):
    params = dict(params)
    kept = {name: {} for name in params}
    for t, (step_gradients, rate) in enumerate(zip(gradients, RATES), start=1):
        for name, p in params.items():
            decay = h.get("weight_decay", 0.0) if name == DECAYED else 0.0
            params[name] = p - rate * rule(step_gradients[name], p, kept[name], t, decay, h)
        yield dict(params)


def drawn(seed):
    draw = np.random.default_rng(seed)
    return {"bias": draw.normal(size=5), "kernel": draw.normal(size=(3, 5))}


@pytest.mark.parametrize(("name", "rule", "given"), CASES, ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(CASES)])
def test_three_updates_are_those_of_the_paper(name, rule, given):
    params, gradients = drawn(0), [drawn(seed) for seed in (1, 2, 3)]
    optimizer, _ = make_optimizer(
        name, learning_rate=schedule, params=params, no_decay=("bias",), clip_norm=None, **given
    )
    state = optimizer.init(ours := jax.tree.map(jnp.float32, params))
    for step, expected in enumerate(by_hand(rule, params, gradients, given)):
        updates, state = optimizer.update(jax.tree.map(jnp.float32, gradients[step]), state, ours, step=jnp.int32(step))
        ours = optax.apply_updates(ours, updates)
        for leaf in params:
            np.testing.assert_allclose(ours[leaf], expected[leaf], rtol=1e-5, atol=3e-6, err_msg=f"{leaf}, step {step}")


def test_every_optimizer_has_a_formula_here():
    assert {name for name, _, _ in CASES} == set(OPTIMIZERS)


def test_l2_and_decoupled_decay_differ_as_the_paper_says():
    """Without a gradient AdamW shrinks p by the factor 1 - rate * decay; Adam with L2 moves it by the rate."""
    params = {"kernel": jnp.float32([2.0, -0.5])}
    moved = {}
    for name in ("adamw", "adam_l2"):
        optimizer, _ = make_optimizer(name, learning_rate=0.01, params=params, no_decay=(), weight_decay=0.5)
        updates, _ = optimizer.update({"kernel": jnp.zeros(2)}, optimizer.init(params), params, step=0)
        moved[name] = updates["kernel"]
    np.testing.assert_allclose(moved["adamw"], [-0.01, 0.0025], rtol=1e-6)
    np.testing.assert_allclose(moved["adam_l2"], [-0.01, 0.01], rtol=1e-5)


def test_the_papers_decay_does_not_depend_on_the_rate():
    params = {"kernel": jnp.float32([2.0])}
    for rate in (0.01, 0.1):
        decay = {"weight_decay": 0.25, "decay_multiplier": "schedule"}
        optimizer, _ = make_optimizer(learning_rate=rate, params=params, no_decay=(), **decay)
        updates, _ = optimizer.update({"kernel": jnp.zeros(1)}, optimizer.init(params), params, step=0)
        np.testing.assert_allclose(updates["kernel"], [-0.5], rtol=1e-6)


def test_clips_come_in_order():
    """Elements first, then units against their parameters, then the global norm."""
    params = {"kernel": jnp.float32([[3.0, 0.0], [4.0, 0.0]])}
    gradient = {"kernel": jnp.float32([[9.0, 3.0], [-9.0, 4.0]])}

    def clipped(**clips):
        clips = {"clip_norm": None, **clips}
        optimizer, _ = make_optimizer("sgd", learning_rate=1.0, params=params, no_decay=(), **clips)
        return -optimizer.update(gradient, optimizer.init(params), params, step=0)[0]["kernel"]

    np.testing.assert_allclose(clipped(clip_value=5.0), [[5, 3], [-5, 4]])
    # The first column's parameters have norm 5; the second's count as 1e-3.
    np.testing.assert_allclose(
        clipped(clip_value=5.0, clip_adaptive=0.5),
        [[2.5 / 2**0.5, 3e-4], [-2.5 / 2**0.5, 4e-4]],
        rtol=1e-5,
    )
    all_three = clipped(clip_value=5.0, clip_adaptive=0.5, clip_norm=1.0)
    np.testing.assert_allclose(all_three, [[0.5**0.5, 1.2e-4], [-(0.5**0.5), 1.6e-4]], rtol=1e-5)


@pytest.mark.parametrize("epsilon_in_root", [False, True])
def test_centred_rmsprop_survives_gradients_that_do_not_change(epsilon_in_root):
    params = {"kernel": jnp.zeros(64)}
    gradient = {"kernel": jnp.linspace(1.0, 300.0, 64)}
    given = {"centered": True, "epsilon_in_root": epsilon_in_root, "clip_norm": None}
    optimizer, _ = make_optimizer("rmsprop", learning_rate=1.0, params=params, no_decay=(), **given)

    def one(state, step):
        updates, state = optimizer.update(gradient, state, params, step=step)
        return state, updates["kernel"]

    _, updates = jax.lax.scan(one, optimizer.init(params), jnp.arange(400))
    assert np.all(np.isfinite(updates))
