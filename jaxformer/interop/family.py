"""What a family of checkpoints is: its names, its config.json, and its heads, all as data."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxformer.interop.rules import Rule
from jaxformer.interop.settings import Settings
from jaxformer.layers import ACTIVATIONS
from jaxformer.models import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Head:
    """What stands on a body under one name of an architecture.

    Attributes:
      architecture: as config.json names it.
      rules: of the head's tensors, which have no prefix.
      fields: of ``TransformerConfig``, that this head sets.
      task: the fields of ``HeadConfig`` of a task's head, None of a head over the vocabulary. ``num_classes`` and
        ``dropout_rate`` are read from config.json.
      dropout: of a task's head: names in config.json of its dropout; the first that is not None counts; empty = none.
      extends: the architecture that this one has all tensors of, so that files which declare that one may hold this.
      is_body: nothing stands on the body, whose tensors then have no prefix.
    """

    architecture: str
    rules: tuple[Rule, ...] = ()
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    task: Mapping[str, Any] | None = None
    dropout: tuple[str, ...] = ()
    extends: str | None = None
    is_body: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    Attributes:
      model_type: as config.json names it.
      preset: the name in ``jaxformer.models.MODELS`` of the model that its fields are given to.
      prefix: of the body's tensors beside a head, such as ``bert.``; files of a body alone leave it out.
      defaults: of what config.json may leave out, as documented.
      body: rules of the body, their names with the prefix.
      gated: rules of feed-forward layers that are gated, where these have other names than ungated ones.
      ungated: those of feed-forward layers that are not.
      heads: what can stand on it; the first is what stands there where neither config.json nor tensors tell.
      read_fields: config.json to fields of ``TransformerConfig`` that say all that the model computes; refuses by name
        what can't be represented.
      write_settings: the way back. What it leaves out (as it has no name for it) is found by reading its output again.
      buffers: regular expressions of tensors that are no parameters, or parameters that nothing reads.
      duplicates: tensor to the tensor that it is a copy of, where the embeddings are tied.
      copies: the same, whether or not they are tied.
      head_unties: a head over the vocabulary that differs from the embeddings unties them where config.json says that
        they are tied, unless logits are scaled.
      renamed: (regular expression, replacement) of names in old files.
      aliases: further names of values in config.json.
    """

    model_type: str
    preset: str
    prefix: str
    defaults: Mapping[str, Any]
    body: tuple[Rule, ...]
    heads: tuple[Head, ...]
    read_fields: Callable[[Settings], dict[str, Any]]
    write_settings: Callable[[TransformerConfig], dict[str, Any]]
    gated: tuple[Rule, ...] = ()
    ungated: tuple[Rule, ...] = ()
    buffers: tuple[str, ...] = ()
    duplicates: Mapping[str, str] = dataclasses.field(default_factory=dict)
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    head_unties: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def settings(self, values: Mapping[str, Any]) -> Settings:
        """The values of a config.json of this family."""
        return Settings(values, self.defaults, self.aliases)

    def body_rules(self, config: TransformerConfig) -> tuple[Rule, ...]:
        """Rules of the body of a model of that config."""
        return (*self.body, *(self.gated if ACTIVATIONS[config.activation][1] else self.ungated))

    def head(self, architecture: str) -> Head | None:
        """The head of that name."""
        return next((head for head in self.heads if head.architecture == architecture), None)
