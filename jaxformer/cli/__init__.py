"""`jaxformer <command>`: parses flags and calls one function; nothing else.

Results go to stdout, everything else to stderr. Exit status: 0 done; 1 a failure; 2 wrong usage or config; 75 a run
that was interrupted, is saved and can go on; 130 ended at once by Ctrl-C.
"""

import os
import sys
from collections.abc import Sequence

from jaxformer.cli import (
    compare,
    convert,
    cost,
    embed,
    evaluate,
    generate,
    plot,
    predict,
    show,
    sweep,
    tokenizer,
    train,
    view,
)
from jaxformer.cli.parsing import UsageError, make_parser, parse
from jaxformer.training.memory import keep_freed_memory

COMMANDS = {
    "train": train,
    "sweep": sweep,
    "eval": evaluate,
    "generate": generate,
    "predict": predict,
    "embed": embed,
    "view": view,
    "convert": convert,
    "cost": cost,
    "plot": plot,
    "compare": compare,
    "tokenizer": tokenizer,
    "list": show,
}
TRACEBACK = "JAXFORMER_TRACEBACK"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      arguments: those after the program's name; None = the command line's.

    Returns:
      The exit status.
    """
    try:
        command = parse(make_parser(COMMANDS), sys.argv[1:] if arguments is None else arguments)
        _quiet_libraries()
        keep_freed_memory()
        return command.run(command) or 0
    except UsageError as error:
        return _tell(error, 2)
    except KeyboardInterrupt as error:
        return _interrupted(error)
    except BrokenPipeError:  # the reader of our output has gone, as in `… | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, ImportError) as error:
        return _tell(error, 2 if _is_config_error(error) else 1)


def _tell(error: Exception, status: int) -> int:
    """Says what is wrong in a sentence; `JAXFORMER_TRACEBACK=1` shows where it was raised."""
    if os.environ.get(TRACEBACK, "0") not in ("", "0"):
        raise error
    print(f"jaxformer: error: {error or type(error).__name__}", file=sys.stderr)
    return status


def _is_config_error(error: Exception) -> bool:
    from jaxformer.training.overrides import ConfigError

    return isinstance(error, ConfigError)


def _interrupted(error: KeyboardInterrupt) -> int:
    from jaxformer.cli.output import print_result
    from jaxformer.training.signals import TrainingInterrupted

    if isinstance(error, TrainingInterrupted):
        print_result({"status": "interrupted", "step": error.step, "signal": error.signal_name}, once=True)
        return 75
    print("jaxformer: aborted", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(130)  # threads of a save under way would keep the process alive


def _quiet_libraries() -> None:
    """Checkpointing's log lines are not for users; its errors are raised and told."""
    import logging

    logging.getLogger("absl").setLevel(logging.ERROR)
