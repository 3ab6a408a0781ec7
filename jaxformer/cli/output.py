"""What commands write on stdout."""

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any


def print_result(figures: Mapping[str, Any], *, once: bool = False) -> None:
    """Prints a command's figures as one JSON object on a line; a figure that is not finite is null.

    Args:
      figures: numbers and text by name.
      once: of several processes of one run, only the first prints.
    """
    if once:
        import jax

        if jax.process_index() > 0:
            return
    print(json.dumps(_strict(figures)), flush=True)


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _strict(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keep_stdout_for_results() -> None:
    """Sends to stderr what libraries below Python print on stdout, as the collectives of several processes do."""
    sys.stdout.flush()
    results = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(results, "w", encoding="utf-8")
