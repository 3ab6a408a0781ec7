"""Which head a checkpoint holds, and which one is asked for."""

import dataclasses
from typing import Any

from jaxformer.interop.checkpoint import Checkpoint
from jaxformer.interop.errors import PretrainedError
from jaxformer.interop.family import Head
from jaxformer.interop.rules import Rule
from jaxformer.interop.settings import Settings
from jaxformer.models import HeadConfig

STORED, VOCABULARY = "stored", "vocabulary"
TASK = "jaxformer_task"
"""In config.json: the task, where no architecture of theirs is that task."""
ANSWER_LABELS = ("start", "end", "neither")


@dataclasses.dataclass(frozen=True)
class ChosenHead:
    """What stands on the body of the model that is loaded.

    Attributes:
      rules: of its tensors.
      fields: of ``TransformerConfig``.
      task: of a task's head; None of a head over the vocabulary, or of none.
      is_body: there is none.
      architecture: the family's name for it; None for a task that the family has no name for.
    """

    rules: tuple[Rule, ...]
    fields: dict[str, Any]
    task: HeadConfig | None = None
    is_body: bool = False
    architecture: str | None = None


def choose_head(
    checkpoint: Checkpoint, settings: Settings, wanted: str | HeadConfig | None, tied: bool, drawn: bool
) -> ChosenHead:
    """The head to load.

    Args:
      checkpoint: whose tensors tell what is there.
      settings: its config.json.
      wanted: ``stored`` (what the files hold), ``vocabulary`` (a head over the vocabulary), a task's head, or None (the
        body alone).
      tied: the output head is the embeddings.
      drawn: what is missing will be drawn.

    Raises:
      PretrainedError: an architecture that is not known here.
      ValueError: another word.
    """
    family = checkpoint.family
    if wanted is None:
        body = next(head for head in family.heads if head.is_body)
        return _chosen(body, checkpoint, settings)
    if isinstance(wanted, HeadConfig):
        return _task_head(checkpoint, wanted)
    if wanted == VOCABULARY:
        plain = [head for head in family.heads if head.task is None and not head.is_body]
        held = [head for head in plain if not _missing(head, checkpoint, tied)]
        # Drawn anew, it is the whole of it.
        return _chosen((held or plain)[-1], checkpoint, settings)
    if wanted != STORED:
        raise ValueError(
            f"head={wanted!r} must be {STORED!r}, {VOCABULARY!r}, a HeadConfig, or None for the body alone"
        )
    return _chosen(_stored_head(checkpoint, tied, drawn), checkpoint, settings)


def _stored_head(checkpoint: Checkpoint, tied: bool, drawn: bool) -> Head:
    """The head that config.json names, or the one that holds more tensors of the files."""
    family, named = checkpoint.family, checkpoint.architecture
    held = [head for head in family.heads if not head.is_body and not _missing(head, checkpoint, tied)]
    if named is None:
        body = next(head for head in family.heads if head.is_body)
        return max(held, key=lambda head: len(head.rules), default=family.heads[0] if drawn else body)
    head = family.head(named)
    if head is None:
        known = ", ".join(head.architecture for head in family.heads)
        raise PretrainedError(
            f"{checkpoint.directory} is a {named}, whose head is not known (known are {known}); head=None loads the "
            "body alone"
        )
    return next((larger for larger in held if larger.extends == named), head)


def _missing(head: Head, checkpoint: Checkpoint, tied: bool) -> list[str]:
    """The tensors of a head that the files don't hold."""
    needed = [rule.name for rule in head.rules if not (tied and rule.path == "output_head/kernel")]
    return [name for name in needed if name not in checkpoint.stored]


def _chosen(head: Head, checkpoint: Checkpoint, settings: Settings) -> ChosenHead:
    fields = dict(head.fields)
    if head.is_body and _missing(head, checkpoint, True):
        return ChosenHead((), {}, is_body=True, architecture=head.architecture)
    task = None if head.task is None else _stored_task(head, settings)
    return ChosenHead(head.rules, fields, task, head.is_body, head.architecture)


def _stored_task(head: Head, settings: Settings) -> HeadConfig:
    """The head's config, with what config.json says of it."""
    assert head.task is not None
    fields = dict(head.task)
    if fields["task"] in ("classification", "tagging"):
        fields["num_classes"] = num_labels(settings.values)
    if fields["task"] == "classification" and fields["num_classes"] == 1:
        fields |= {"task": "regression", "num_classes": None}
    if fields["task"] == "tagging" and settings.values.get(TASK) == "answer_tokens":
        fields |= {"task": "answer_tokens", "num_classes": None}
    rates = [settings[name] for name in head.dropout]
    return HeadConfig(**fields, dropout_rate=next((rate for rate in rates if rate is not None), 0.0))


def num_labels(values: dict[str, Any]) -> int:
    """How many classes a config.json has: 2 unless it says otherwise."""
    labels = values.get("id2label")
    return len(labels) if labels else values.get("num_labels", 2)


def class_names(values: dict[str, Any]) -> tuple[str, ...]:
    """The names that a config.json gives its classes, in order of their ids; none where it gives none."""
    labels = values.get("id2label") or {}
    return tuple(str(labels[number]) for number in sorted(labels, key=int))


def _task_head(checkpoint: Checkpoint, wanted: HeadConfig) -> ChosenHead:
    """A task's head under the names that the family has for it."""
    head = head_of_task(checkpoint.family.heads, wanted.task)
    rules = () if head is None else head.rules
    return ChosenHead(rules, {}, wanted, architecture=None if head is None else head.architecture)


def head_of_task(heads: tuple[Head, ...], task: str) -> Head | None:
    """The head of a task; that of classification serves regression, and that of tagging three labels of answers."""
    same = {"regression": "classification", "answer_tokens": "tagging"}
    names = (task, same.get(task))
    return next((head for head in heads if head.task is not None and head.task["task"] in names), None)
