"""Reading a checkpoint's config.json: what stands there, else the family's documented default, never one of ours."""

from collections.abc import Mapping
from typing import Any

from jaxformer.interop.errors import PretrainedError

# Their names of activations that are ours, of a plain and of a gated feed-forward layer.
PLAIN_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
}


class Settings:
    """The values of a config.json.

    Args:
      values: what stands in the file.
      defaults: what a value that does not stand there is, by the documentation of the family.
      aliases: further names of a value, by name.

    Attributes:
      notes: a sentence for each thing that is not quite as config.json says.
    """

    def __init__(
        self, values: Mapping[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, str] | None = None
    ):
        self.values = dict(values)
        self.notes: list[str] = []
        self._defaults = defaults
        for alias, name in (aliases or {}).items():
            if name not in self.values and alias in self.values:
                self.values[name] = self.values[alias]

    def __getitem__(self, name: str) -> Any:
        """A value. Raises KeyError for a name that has no default: a fault of the family's table."""
        return self.values[name] if name in self.values else self._defaults[name]

    def choice(self, name: str, choices: Mapping[str, Any]) -> Any:
        """What ``choices`` makes of a value.

        Raises:
          PretrainedError: the value is not among them.
        """
        if not isinstance(self[name], str) or self[name] not in choices:
            raise PretrainedError(
                f"config.json has {name}={self[name]!r}, must be one of {', '.join(map(str, choices))}"
            )
        return choices[self[name]]

    def only(self, name: str, *allowed: Any, reason: str) -> None:
        """Refuses a value other than those allowed.

        Raises:
          PretrainedError: the name, the value, and the reason.
        """
        if self[name] not in allowed:
            raise PretrainedError(f"config.json has {name}={self[name]!r}, which can't be read: {reason}")

    def first(self, name: str, *others: str, field: str) -> Any:
        """The value of a name that stands for one field here, with others that should say the same.

        Only for what training alone uses: where the others differ, a note says so.
        """
        for other in others:
            if self[other] != self[name]:
                self.notes.append(f"{field} is {name}={self[name]!r}, also where {other}={self[other]!r} would be used")
        return self[name]


def inverse(choices: Mapping[str, str], value: str) -> str:
    """The first of their names for a value of ours; ours, which nothing of theirs is, where there is none."""
    return next((theirs for theirs, ours in choices.items() if ours == value), value)
