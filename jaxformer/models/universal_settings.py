"""The settings of a Universal Transformer's stack, refused where they do not fit each other."""

import math
from typing import Any

from jaxformer.functional.halting import MIXES

STACKS = ("plain", "universal")
HALTINGS = ("none", "act")
STEP_EMBEDDINGS = ("none", "sinusoidal")

UNIVERSAL_CHOICES = {
    "stack": STACKS,
    "step_embedding": STEP_EMBEDDINGS,
    "halting": HALTINGS,
    "halting_mix": MIXES,
}
"""Fields of a config that are one of several names."""


def check_universal(config: Any) -> None:
    """Refuse what does not fit together, with the reason, before anything is compiled.

    Raises:
      ValueError: a number out of range, or a setting that the chosen stack would not read.
    """
    for name, accepted, rule in (
        ("halting_threshold", lambda value: 0 < value <= 1, "in (0, 1]"),
        ("ponder_weight", lambda value: 0 <= value < math.inf, "of at least 0"),
        ("halting_bias_init", math.isfinite, ""),
    ):
        value = getattr(config, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not accepted(value):
            raise ValueError(f"{name}={value!r} must be a finite number {rule}".rstrip())
    start = config.random_position_start
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise ValueError(f"random_position_start={start!r} must be an integer of at least 0")
    if start and config.positions != "sinusoidal":
        raise ValueError(
            f"random_position_start={start} needs positions='sinusoidal', not {config.positions!r}: learned ones end "
            "at max_length, and the others depend on distances only"
        )
    if config.stack == "plain":
        for name, off in (("step_embedding", "none"), ("halting", "none")):
            if getattr(config, name) != off:
                raise ValueError(f"{name}={getattr(config, name)!r} needs stack='universal', not 'plain'")
    elif len(config.attentions) > 1:
        raise ValueError(f"attention={config.attention!r} must be one name: stack='universal' has one block")
    elif config.remat == "sqrt":
        raise ValueError("remat='sqrt' groups the blocks of stack='plain'; with stack='universal' it must be another")
    if config.early_exit and config.halting == "none":
        raise ValueError("early_exit=True needs halting='act': without it all positions make all steps")
