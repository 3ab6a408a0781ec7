"""The training of runs together, from their last checkpoint to the end: steps, evaluation and saving of all at once."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.training.assembly import Parts, make_parts, make_updates
from jaxformer.training.evaluate import batches_of, figures_of
from jaxformer.training.loop import due
from jaxformer.training.overrides import flatten
from jaxformer.training.progress import Progress
from jaxformer.training.sharding import make_mesh
from jaxformer.training.signals import Interruption, TrainingInterrupted
from jaxformer.training.starting import has_start, take_parameters
from jaxformer.training.startup import introduce, training_batches
from jaxformer.training.state import TrainState
from jaxformer.training.sweep_groups import traced_paths
from jaxformer.training.sweep_log import SweepLog
from jaxformer.training.sweep_members import Member
from jaxformer.training.sweep_parts import TogetherParts, make_together

_NAMED = 4  # runs that are listed by name at most


@dataclasses.dataclass(frozen=True)
class _Group:
    """What stays the same from step to step; `batches` by seed."""

    members: Sequence[Member]
    together: TogetherParts
    data: Any
    mesh: Any
    batches: Mapping[int, Any]
    progress: Progress
    interruption: Interruption


def train_together(members: Sequence[Member], data: Any, progress: Progress, interruption: Interruption) -> None:
    """Trains runs that differ in traced numbers alone, all of which stand at the same step, to their end.

    Args:
      members: with their values decided.
      data: of all of them.
      progress: who is told.
      interruption: of the signals that end the training early.

    Raises:
      ValueError: a number is out of range, or a checkpoint cannot be used; the message says why.
      TrainingInterrupted: (a KeyboardInterrupt) a signal came; everything is saved.
    """
    config, start = members[0].config, members[0].step
    mesh = make_mesh(**config.mesh)
    parts = make_parts(config, mesh)
    for member in members:  # what is traced cannot be checked
        make_updates(member.config, parts.model, parts.objective, parts.state.params)
    numbers = {path: [_at(member, path) for member in members] for path in _numbers(members)}
    seeds = [member.config.seed for member in members]
    introduce(progress, config, mesh, data, parts)
    progress.say(listed([member.run.name for member in members]))
    with contextlib.ExitStack() as stack:
        together = make_together(config, parts, seeds, numbers, mesh)
        batches = {
            seed: training_batches(members[seeds.index(seed)].config, data, mesh) for seed in dict.fromkeys(seeds)
        }
        for member in members:
            member.open(data, start, stack)
        group = _Group(members, together, data, mesh, batches, progress, interruption)
        states = _restore(group, parts, start) if start else _begin(group, progress)
        _train(group, states, start)


def listed(names: Sequence[str]) -> str:
    """How many runs are trained together, and the names of the first."""
    count = "1 run" if len(names) == 1 else f"{len(names)} runs together"
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{count}: {', '.join(names[:_NAMED])}{more}"


def _numbers(members: Sequence[Member]) -> tuple[str, ...]:
    run = members[0].run
    return traced_paths(run.given.config, run.settings)


def _at(member: Member, path: str) -> float:
    value: Any = next(field.value for field in flatten(member.config) if field.path == path)
    return float(value)


def _begin(group: _Group, progress: Progress) -> TrainState:
    """The states of step 0, with the parameters of another run where they start from one."""
    states, config = group.together.init(), group.members[0].config
    if not has_start(config):
        return states
    taken = []
    for index, member in enumerate(group.members):
        say = progress.say if index == 0 else lambda text: None
        taken.append(take_parameters(member.config, group.together.take(states, index), say))
    return group.together.stack(taken)


def _restore(group: _Group, parts: Parts, step: int) -> TrainState:
    restored = [
        member.restore(parts.state, step, group.batches[member.config.seed], group.data) for member in group.members
    ]
    group.progress.say(f"restored step {step} of {len(restored)} runs")
    return group.together.stack(restored)


def _train(group: _Group, states: TrainState, start: int) -> None:
    """The steps from `start` to the last, with what is due between them."""
    config = group.members[0].config
    last = config.train.steps
    log = SweepLog(group.members, group.progress, stop=config.train.non_finite == "stop")
    group.progress.start(start, last)
    for step in range(start + 1, last + 1):
        _stop_if_asked(group, log, states, step - 1, start)
        batches = group.together.place_train([next(batches) for batches in group.batches.values()])
        states, figures = group.together.train_step(states, batches)
        log.add(step, figures)
        evaluating, saving = due(step, config.eval.every_steps, last), due(step, config.checkpoint.every_steps, last)
        if evaluating or saving or due(step, config.log.every_steps, last):
            log.write()
            if all(member.stopped is not None for member in group.members):
                break
        if evaluating:
            _evaluate(group, states, step)
        _save(group, states, step, [member for member in _going_on(group) if saving or _is_best(member, evaluating)])
        if evaluating or saving:
            log.restart_clock()
    group.progress.stop()


def _going_on(group: _Group) -> list[Member]:
    return [member for member in group.members if member.stopped is None]


def _is_best(member: Member, evaluating: bool) -> bool:
    return evaluating and member.is_best(member.figures["loss"])


def _evaluate(group: _Group, states: TrainState, step: int) -> None:
    """Evaluates all runs together on the validation data, and on those that are kept apart."""
    figures = _figures(group, states, group.data.validation_rows, group.data.bits_per)
    buckets = {name: _figures(group, states, rows, {}) for name, rows in group.data.buckets.items()}
    for index, member in enumerate(group.members):
        if member.stopped is None:
            member.write_evaluation(step, figures[index], {name: values[index] for name, values in buckets.items()})
    losses = {member.run.name: member.figures["loss"] for member in _going_on(group)}
    losses = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
    if losses:
        best = min(losses, key=losses.__getitem__)
        group.progress.say(f"step {step}  lowest validation loss {losses[best]:.4f} ({best})")


def _figures(group: _Group, states: TrainState, rows: Any, bits_per: Mapping[str, int]) -> list[dict[str, float]]:
    """The figures of each run over some rows."""
    batches = batches_of(rows, group.members[0].config, group.mesh)
    return evaluate_together(group.together, states, batches, bits_per, len(group.members))


def evaluate_together(
    together: TogetherParts,
    states: TrainState,
    batches: Iterable[Mapping[str, np.ndarray]],
    bits_per: Mapping[str, int],
    count: int,
) -> list[dict[str, float]]:
    """What `evaluate` returns, of each of `count` runs: a mean over all supervised tokens, each once."""
    sums: dict[str, np.ndarray] = {}
    params = states.evaluation_params
    for batch in batches:
        placed = together.place_eval(batch)
        for name, values in jax.device_get(together.eval_step(params, states.model_state, placed)).items():
            sums[name] = sums.get(name, 0.0) + np.asarray(values, np.float64)
    own = [{name: float(values[index]) for name, values in sums.items()} for index in range(count)]
    return [figures_of(values, bits_per) for values in own]


def _save(group: _Group, states: TrainState, step: int, members: Sequence[Member]) -> None:
    """Starts to save a step of some runs, each into its own directory."""
    for index, member in enumerate(group.members):
        if any(member is saved for saved in members):
            facts = {"loss": member.figures.get("loss") if member.evaluated == step else None}
            state = group.together.take(states, index)
            member.save(step, state, group.batches[member.config.seed], {**facts, "data_hash": group.data.hash})


def _stop_if_asked(group: _Group, log: SweepLog, states: TrainState, step: int, start: int) -> None:
    """Saves and raises if a signal has come.

    Raises:
      TrainingInterrupted: a signal came.
    """
    name = group.interruption.signal_name
    if name is None:
        return
    group.progress.stop()
    log.fetch()
    if step > start:
        _save(group, states, step, _going_on(group))
    raise TrainingInterrupted(step, name)
