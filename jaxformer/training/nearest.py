"""What to say about a name that does not exist."""

import difflib
from collections.abc import Iterable


def nearest(name: str, choices: Iterable[str]) -> str:
    """What to say after an unknown `name`: the choices most like it, or all of them where none is like it."""
    choices = sorted(choices)
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    if not close:  # `lr` for `optimizer.learning_rate`: compare the last parts too
        last = {choice.rsplit(".", 1)[-1]: choice for choice in choices}
        close = [last[part] for part in difflib.get_close_matches(name.rsplit(".", 1)[-1], last, n=3, cutoff=0.6)]
    if close:
        return f"did you mean {', '.join(close)}?"
    return f"choices: {', '.join(choices)}"
