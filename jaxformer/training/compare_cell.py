"""One cell of a comparison: a config trained for some steps, with its time, memory and loss."""

import dataclasses
import math
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxformer.training.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a cell was found to take.

    Attributes:
      parameters: numbers that are learned.
      seconds: of an update, the median.
      tokens_per_second: of the batch's rows.
      compile_seconds: to trace and compile the train step, or to read it from the cache.
      temporary_bytes: memory of the compiled train step beside its arguments and results.
      state_bytes: of the train state: parameters, optimizer and the rest.
      loss: per token, the mean of the last quarter of the steps; None where it is not finite.
      steps: updates.
    """

    parameters: int
    seconds: float
    tokens_per_second: float
    compile_seconds: float
    temporary_bytes: int
    state_bytes: int
    loss: float | None
    steps: int

    @property
    def memory_bytes(self) -> int:
        """Of a training step: the state and what it needs besides."""
        return self.temporary_bytes + self.state_bytes


def child(connection: Connection, run: RunConfig) -> None:
    """Measures in a process of its own, and sends (figures, None) or (None, why not)."""
    import logging

    from jaxformer.training.memory import keep_freed_memory

    logging.getLogger("absl").setLevel(logging.ERROR)
    keep_freed_memory()
    try:
        connection.send((measure(run), None))
    except (ValueError, OSError, ImportError, MemoryError, RuntimeError) as error:  # XLA's are RuntimeErrors
        connection.send((None, reason_of(error)))


def reason_of(error: Exception) -> str:
    """An error in a line."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
        return f"memory does not suffice: {text}"
    return text


def measure(run: RunConfig) -> Measured:
    """Trains a config from step 0 for its `train.steps`, without evaluation and without writing anything.

    Raises:
      ValueError: the config, its model or its data cannot be used.
    """
    import jax

    from jaxformer.analysis.model_costs.traffic import array_bytes
    from jaxformer.training.assembly import count_parameters, example_batch, extras, make_parts
    from jaxformer.training.compilation_cache import enable_compilation_cache
    from jaxformer.training.run_cost import decide
    from jaxformer.training.sharding import make_mesh, shard_batch
    from jaxformer.training.startup import check_batches, check_config, training_batches
    from jaxformer.training.state import init_state

    enable_compilation_cache()
    mesh = make_mesh(**run.config.mesh)
    check_config(run.config, None, Path())
    check_batches(run.config, mesh)
    config, data = decide(run)
    parts = make_parts(config, mesh)
    batches = training_batches(config, data, mesh)
    state = init_state(
        parts.model,
        parts.optimizer,
        config.seed,
        example_batch(config.data.length, parts.model),
        parts.shardings,
        **extras(config),
    )
    sizes = {"parameters": count_parameters(state.params), "state_bytes": array_bytes(state)}
    batch = shard_batch(next(batches), mesh)
    began = time.perf_counter()
    jitted: Any = parts.train_step
    step = jitted.lower(state, batch).compile()
    compile_seconds = time.perf_counter() - began
    seconds, losses = [], []
    for number in range(config.train.steps):
        batch = batch if number == 0 else shard_batch(next(batches), mesh)
        jax.block_until_ready(batch)
        began = time.perf_counter()
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - began)
    typical = statistics.median(seconds[1:] or seconds)
    loss = statistics.fmean(losses[-max(1, len(losses) // 4) :])
    return Measured(
        seconds=typical,
        tokens_per_second=batch["tokens"].size / typical,
        compile_seconds=compile_seconds,
        temporary_bytes=_temporary_bytes(step),
        loss=loss if math.isfinite(loss) else None,
        steps=config.train.steps,
        **sizes,
    )


def _temporary_bytes(compiled: Any) -> int:
    memory = compiled.memory_analysis()
    return 0 if memory is None else int(memory.temp_size_in_bytes)
