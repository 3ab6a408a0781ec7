"""Attentions side by side: each at each length trained for some steps, in a process of its own.

    rows = compare("language_model:size=tiny", ["dense", "local", "lsh"], [256, 1024], steps=20)

A cell of the table that cannot be computed (the attention refuses, memory ends, time runs out) says why, and the others
go on. Every cell reads the same text cut to its length, with about as many tokens an update as the config has.
"""

import dataclasses
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from jaxformer.training.compare_cell import Measured, child
from jaxformer.training.config import RunConfig, load_config, split_spec
from jaxformer.training.other_attention import parse_attention
from jaxformer.training.overrides import ConfigError

# Waiting counts milliseconds in 31 bits.
MOST_SECONDS = 2_000_000


@dataclasses.dataclass(frozen=True)
class Row:
    """One cell: an attention at a length.

    Attributes:
      attention: as it was given.
      length: tokens of a row.
      batch_size: rows of an update; None where the config was refused.
      measured: the figures; None where there are none.
      refusal: why there are none, in a sentence; None where there are.
    """

    attention: str
    length: int
    batch_size: int | None
    measured: Measured | None
    refusal: str | None


def compare(
    spec: str,
    attentions: Sequence[str],
    lengths: Sequence[int],
    *,
    overrides: Sequence[str] = (),
    steps: int = 10,
    batch_size: int | None = None,
    timeout: float | None = None,
) -> Iterator[Row]:
    """Trains every attention at every length for some steps, one after another.

    Args:
      spec: config file or bundled name, with its argument; not one that decides the attention.
      attentions: each `name`, with the arguments that the config file has for it, or `name:argument=value,…`.
      lengths: tokens of a row.
      overrides: changes of the config, each `a.b=value`.
      steps: updates of each; the first, which may wait for more, is not timed where there are others.
      batch_size: rows of an update (None = as many as make the tokens of the config's own batch, at least one).
      timeout: seconds that a cell may take, at most 2,000,000, compilation included (None = any).

    Yields:
      A row for each attention and length, lengths of an attention together.

    Raises:
      ValueError: nothing to compare, or a number out of range.
      ConfigError: the config itself cannot be used.
    """
    _check(attentions, lengths, steps, batch_size, timeout)
    load_config(spec, overrides)
    return (
        _cell(spec, attention, length, tuple(overrides), steps, batch_size, timeout)
        for attention in attentions
        for length in lengths
    )


def _check(
    attentions: Sequence[str], lengths: Sequence[int], steps: int, batch_size: int | None, timeout: float | None
) -> None:
    if not attentions or not lengths:
        raise ValueError(
            f"attention has {len(attentions)} names and length {len(lengths)}; both must have at least one"
        )
    numbers = {"steps": steps, "batch_size": batch_size, "timeout": timeout}
    for name, value in [*numbers.items(), *(("length", length) for length in lengths)]:
        if value is not None and not value >= 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    if timeout is not None and timeout > MOST_SECONDS:
        raise ValueError(f"timeout is {timeout}, must be at most {MOST_SECONDS} seconds")


def _cell(
    spec: str,
    attention: str,
    length: int,
    overrides: tuple[str, ...],
    steps: int,
    batch_size: int | None,
    timeout: float | None,
) -> Row:
    """One cell, measured or refused."""
    try:
        run = cell_config(spec, attention, length, overrides, steps, batch_size)
    except ValueError as error:
        return Row(attention, length, None, None, str(error))
    measured, refusal = in_a_process(child, run, timeout=timeout)
    return Row(attention, length, run.config.train.batch_size, measured, refusal)


def cell_config(
    spec: str, attention: str, length: int, overrides: Sequence[str], steps: int, batch_size: int | None
) -> RunConfig:
    """The config of a cell: the file's own for the attention where it knows it, and the sizes asked for.

    Raises:
      ConfigError: the config has no such attention, or cannot have this length.
    """
    name, arguments = parse_attention(attention)
    run = _with_attention(spec, name, arguments, overrides)
    config = run.config
    tokens = config.train.batch_size * (config.data.length or length)
    rows = batch_size or max(1, round(tokens / length))
    return run.with_overrides(
        [
            f"data.length={length}",
            f"train.batch_size={rows}",
            f"train.steps={steps}",
            "train.accumulation_steps=1",
        ]
    )


def _with_attention(spec: str, name: str, arguments: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    source, argument = split_spec(spec)
    try:
        chosen = ",".join(filter(None, (argument, f"attention={name}")))
        run = load_config(f"{source}:{chosen}", overrides)
    except ConfigError:
        run = load_config(spec, overrides)
        if "attention" not in run.config.model:
            raise
        arguments = arguments or {}
        with run.config.unlocked(), run.config.ignore_type():
            run.config.model.attention = name
            run.config.model.attention_args = ConfigDict(arguments)
        return run
    if arguments:
        with run.config.unlocked(), run.config.ignore_type():
            run.config.model.attention_args = ConfigDict(arguments)
    return run


def in_a_process(function: Callable[..., None], *arguments: Any, timeout: float | None) -> tuple[Any, str | None]:
    """What a function sends from a new process, or why it sent nothing.

    Args:
      function: called with a connection, to which it sends (value, None) or (None, reason), and the arguments.
      arguments: picklable.
      timeout: seconds; None = any.

    Returns:
      (value, None) or (None, reason).
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(sender, *arguments), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            return None, f"it took longer than {timeout:g} seconds"
        return receiver.recv()
    except EOFError:
        process.join()
        return None, _how_it_ended(process.exitcode)
    finally:
        process.kill()
        process.join()
        receiver.close()


def _how_it_ended(status: int | None) -> str:
    if status is not None and status < 0:
        hint = ", most likely for want of memory" if -status == signal.SIGKILL else ""
        return f"its process was killed by {signal.Signals(-status).name}{hint}"
    return f"its process ended with status {status}"


def split_attentions(flags: Sequence[str]) -> list[str]:
    """Names of several flags: each a list `a,b`, or one name with its arguments, `a:argument=value,argument=value`."""
    return [name for flag in flags for name in ([flag] if ":" in flag else flag.split(",")) if name]


def split_lengths(text: str) -> list[int]:
    """Numbers of tokens, `1024,4096`.

    Raises:
      ConfigError: it cannot be read.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"length must be whole numbers such as 1024,4096, got {text!r}") from None
