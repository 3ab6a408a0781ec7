"""What a run of a config costs before it is begun: its model by part, and the memory of its training state."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from jaxformer.analysis.model_cost import ModelCost, model_cost
from jaxformer.analysis.model_costs.traffic import array_bytes
from jaxformer.analysis.roofline import Bound
from jaxformer.training.assembly import example_batch, extras, load_data, make_model, make_objective, make_updates
from jaxformer.training.config import RunConfig, resolve
from jaxformer.training.decided import decided_values
from jaxformer.training.starting import start_values
from jaxformer.training.state import abstract_params, abstract_state


@dataclasses.dataclass(frozen=True)
class RunCost:
    """The cost of training a config's model and of generating with it.

    Attributes:
      name: the model's.
      model: what it costs, at `batch_size` rows of `length` tokens.
      batch_size: rows computed at a time.
      length: tokens of a row.
      accumulation_steps: how often so many rows are computed for one update.
      gradient_bytes: of one gradient.
      optimizer_bytes: what the optimizer keeps from step to step, and averages of the parameters.
    """

    name: str
    model: ModelCost
    batch_size: int
    length: int
    accumulation_steps: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def training_bytes(self) -> int:
        """Memory of training: parameters, gradient, optimizer, other state and activations, none of them shared."""
        kept = sum(self.model.parameter_bytes.values()) + sum(self.model.activation_bytes.values())
        return kept + self.gradient_bytes + self.optimizer_bytes + self.model.state_bytes


def run_cost(run: RunConfig, *, compiled: bool = False) -> RunCost:
    """The cost of a config's model at the sizes that it trains with; reads the data, computes nothing.

    Args:
      run: from `load_config`.
      compiled: also the compiler's figures of memory.

    Raises:
      ConfigError: the config, or data that it needs, cannot be used.
      ValueError: the model refuses a field.
    """
    config, _ = decide(run)
    model = make_model(config)
    batch = example_batch(config.data.length, model)
    params = abstract_params(model, batch)
    updates = make_updates(config, model, make_objective(config), params)
    state = abstract_state(model, updates.optimizer, batch, **extras(config))
    steps = config.train.accumulation_steps
    rows = max(1, config.train.batch_size // steps)
    loss = config.get("loss", {})
    cost = model_cost(model, rows, config.data.length, loss_chunk_size=loss.get("chunk_size"), compiled=compiled)
    return RunCost(
        name=config.model.name,
        model=cost,
        batch_size=rows,
        length=config.data.length,
        accumulation_steps=steps,
        gradient_bytes=array_bytes(params),
        optimizer_bytes=array_bytes(state) - array_bytes(params) - array_bytes(state.model_state),
    )


def decide(run: RunConfig) -> tuple[ConfigDict, Any]:
    """The config with all values that a new run would decide (None), and the data, which are read for it."""
    begun = resolve(run.config, start_values(run.config))
    data = load_data(begun)
    return resolve(begun, decided_values(begun, data)), data


def run_figures(cost: RunCost, bounds: dict[str, Bound] | None = None) -> dict[str, Any]:
    """All figures as JSON takes them; `bounds` are those of a device."""
    model = cost.model
    phases = {
        name: {part: dataclasses.asdict(work) | {"total": work.total} for part, work in works.items()}
        for name, works in model.phases.items()
    }
    figures = {
        "model": cost.name,
        "dtype": model.dtype,
        "batch_size": cost.batch_size,
        "length": cost.length,
        "accumulation_steps": cost.accumulation_steps,
        "parameters": dict(model.parameters),
        "active_parameters": model.active_parameters,
        "phases": phases,
        "tokens": dict(model.num_tokens),
        "activation_bytes": dict(model.activation_bytes),
        "parameter_bytes": sum(model.parameter_bytes.values()),
        "gradient_bytes": cost.gradient_bytes,
        "optimizer_bytes": cost.optimizer_bytes,
        "state_bytes": model.state_bytes,
        "training_bytes": cost.training_bytes,
        "cache_bytes": model.cache_bytes,
        "temporary_bytes": None if model.temporary_bytes is None else dict(model.temporary_bytes),
    }
    if bounds is not None:
        figures["roofline"] = {
            name: {
                "seconds": bound.seconds,
                "bound": bound.bound,
                "parts": {part: own.seconds for part, own in bound.parts.items()},
            }
            for name, bound in bounds.items()
        }
    return figures
