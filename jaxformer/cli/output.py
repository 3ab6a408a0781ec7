"""What commands write on stdout."""

import json
import math
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
    strict = {name: None if _not_finite(value) else value for name, value in figures.items()}
    print(json.dumps(strict), flush=True)


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
