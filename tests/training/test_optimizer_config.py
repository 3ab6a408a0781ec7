"""The optimizer's section of configs, what it means, and what is refused."""

import inspect
import re

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from jaxformer.training.config import bundled_configs, copy_config, differences, load_config
from jaxformer.training.optimizer_config import meant_optimizer, optimizer_arguments, optimizer_config
from jaxformer.training.optimizers import OPTIMIZERS, hyperparameters, make_optimizer

PARAMS = {
    "layers_0": {"norm": {"scale": jnp.ones(3), "bias": jnp.ones(3)}, "up": {"kernel": jnp.ones((3, 5))}},
    "token_embedding": {"embedding": jnp.ones((7, 3))},
}


def test_every_hyperparameter_is_a_field_of_the_section_and_of_make_optimizer():
    section = optimizer_config("sgd", learning_rate=0.1)
    fields = {name for optimizer in OPTIMIZERS for name in hyperparameters(optimizer)}
    assert all(section[name] is None for name in fields)
    arguments = set(inspect.signature(make_optimizer).parameters)
    assert fields < arguments
    # All arguments are fields, and the only subsection is that of the named optimizer.
    assert set(section) - arguments == {"for_sgd"}
    assert arguments - set(section) == {"params"}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("experiment", ["finetune", "language_model", "translation"])
def test_another_name_alone_is_a_change(experiment, name):
    run = load_config(experiment, [f"optimizer.name={name}"])
    arguments = optimizer_arguments(run.config.optimizer)
    make_optimizer(params=PARAMS, **arguments)
    own = {field: arguments[field] for field in hyperparameters(name) if arguments[field] is not None}
    assert (name == "adamw") == bool(own)


def test_experiments_train_with_the_same_values_as_ever():
    """Runs that began before there were other optimizers go on; theirs were flat, and all they had."""
    flat = {"name": "adamw", "learning_rate": 8e-3, "b1": 0.9, "b2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1}
    flat |= {"no_decay": (r"(^|/)(bias|scale|embedding)$",), "clip_norm": 1.0}
    new = load_config("language_model").config
    old = ConfigDict(copy_config(new).to_dict() | {"optimizer": flat})
    assert not differences(old, new)
    assert not differences(new, old)
    new = load_config("language_model", ["optimizer.b2=0.99"]).config
    assert differences(old, new) == ["optimizer.b2: 0.95 before, 0.99 now"]
    old.optimizer.clip_norm = None
    assert "optimizer.clip_norm: None before, 1.0 now" in differences(old, new)


def test_the_flat_field_is_before_the_subsection_and_that_before_the_default():
    config = load_config("translation").config
    assert meant_optimizer(config.optimizer)["b2"] == 0.98
    config = load_config("translation", ["optimizer.b2=0.97"]).config
    assert meant_optimizer(config.optimizer)["b2"] == 0.97
    config = load_config("translation", ["optimizer.for_adamw.b2=0.96"]).config
    assert meant_optimizer(config.optimizer)["b2"] == 0.96
    config = load_config("translation", ["optimizer.name=adam"]).config
    assert meant_optimizer(config.optimizer)["b2"] == 0.999
    assert meant_optimizer(config.optimizer)["weight_decay"] is None


def test_pairs_of_rates_can_be_given_as_text():
    run = load_config("language_model", ["optimizer.rate_factors=(('embedding', 0.5), ('scale', 0.0))"])
    arguments = optimizer_arguments(copy_config(run.config).optimizer)
    assert arguments["rate_factors"] == (("embedding", 0.5), ("scale", 0.0))
    _, report = make_optimizer(params=PARAMS, **arguments)
    assert list(report.frozen) == ["layers_0/norm/scale"]
    assert report.summary().splitlines()[2] == "frozen (3 parameters): layers_0/norm/scale"


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("sgd", {"b1": 0.9}, "b1 = 0.9: optimizer 'sgd' has no such hyperparameter, must be None; it has weight_decay"),
        ("adam", {"weight_decay": 0.0}, "weight_decay = 0.0: optimizer 'adam' has no such .* it has b1, b2, epsilon"),
        ("lion", {"nesterov": False, "momentum": 0.9}, "momentum = 0.9, nesterov = False: optimizer 'lion' has no"),
        ("momentum", {"momentum": 1.0}, r"momentum is 1.0, must be in \[0, 1\)"),
        ("rmsprop", {"initial_scale": -1.0}, "initial_scale is -1.0, must be at least 0"),
        ("adafactor", {"clip_update": 0.0}, "clip_update is 0.0, must be above 0$"),
        ("adafactor", {"smallest_factored": 0}, "smallest_factored is 0, must be at least 1"),
        ("muon", {"muon_scale": "depth"}, "muon_scale is 'depth', must be one of rms, width"),
        ("adamw", {"decay_multiplier": "peak"}, "decay_multiplier is 'peak', must be one of rate, schedule"),
        ("sgd", {"clip_value": 0.0}, "clip_value is 0.0, must be above 0, or None for no clipping"),
        ("sgd", {"clip_adaptive": float("nan")}, "clip_adaptive is nan, must be above 0"),
        ("sgd", {"frozen_layers": 2}, r"frozen_layers is 2, must be in \[0, 1\]"),
    ],
)
def test_what_an_optimizer_does_not_have_or_allow_is_refused(name, given, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(name, learning_rate=0.1, params=PARAMS, **given)


def test_the_papers_decay_needs_a_schedule_with_a_peak():
    params = {"kernel": jnp.ones(2)}
    given = {"params": params, "no_decay": (), "clip_norm": None, "decay_multiplier": "schedule"}
    with pytest.raises(ValueError, match="decay_multiplier is 'schedule', which needs a schedule with its peak"):
        make_optimizer(learning_rate=lambda step: jnp.float32(0.1), **given)
    optimizer, _ = make_optimizer(learning_rate=0.0, **given)  # a rate of 0 decays nothing
    updates, _ = optimizer.update(params, optimizer.init(params), params, step=0)
    assert not np.any(updates["kernel"])


def test_every_bundled_config_has_the_whole_section():
    for experiment in bundled_configs():
        section = load_config(experiment).config.optimizer
        assert {"clip_adaptive", "frozen_layers", "muon_scale", "rate_factors"} <= set(section), experiment
        assert re.fullmatch(r"\w+", section.name)
