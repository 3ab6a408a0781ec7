"""Task heads: labels and numbers of texts, labels of tokens and answers in a context, from a Transformer's body."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.functional import POOLINGS, compute_dtype, pool_tokens
from jaxformer.layers import Projection, project
from jaxformer.models.block import BlockAux, BlockInputs, real_tokens
from jaxformer.models.config import TransformerConfig
from jaxformer.models.initializers import make_kernel_init
from jaxformer.models.transformer import Transformer

TASKS_OF_TEXTS = ("classification", "regression")
TASKS_OF_TOKENS = ("tagging", "answers", "answer_tokens")
POOLERS: dict[str, Any] = {"tanh": jnp.tanh, "relu": jax.nn.relu}

_OUTPUTS = {"regression": 1, "answers": 2, "answer_tokens": 3}
"""Width of the heads whose task decides it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What a head reads and what it says.

    Attributes:
      task: of texts: ``classification`` (logits of classes) or ``regression`` (a number); of tokens: ``tagging``
        (logits of classes), ``answers`` (logits that the answer starts and that it ends there) or ``answer_tokens``
        (logits of start, end and neither).
      num_classes: of classification and tagging (None = what the data has); None for the others.
      pooling: the tokens that a text's head reads: ``first`` (BERT's [CLS]), ``last`` (a causal model's) or ``mean`` of
        the real ones. Heads of tokens don't read it.
      pooler: the activation of a projection before a text's classifier: ``tanh`` (BERT, RoBERTa), ``relu``
        (DistilBERT) or None = no projection. Heads of tokens don't read it.
      use_bias: whether pooler and classifier have biases.
      dropout_rate: dropout before the classifier, fraction in [0, 1).

    Raises:
      ValueError: an unknown name or a number out of range.
    """

    task: str
    num_classes: int | None = None
    pooling: str = "first"
    pooler: str | None = "tanh"
    use_bias: bool = True
    dropout_rate: float = 0.0

    def __post_init__(self) -> None:
        """Check every field."""
        tasks = (*TASKS_OF_TEXTS, *TASKS_OF_TOKENS)
        if self.task not in tasks:
            raise ValueError(f"task={self.task!r} must be one of {', '.join(tasks)}")
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling={self.pooling!r} must be one of {', '.join(POOLINGS)}")
        if self.pooler is not None and self.pooler not in POOLERS:
            raise ValueError(f"pooler={self.pooler!r} must be one of {', '.join(POOLERS)}, or None")
        count = self.num_classes
        if count is not None:
            if self.task in _OUTPUTS:
                raise ValueError(f"num_classes={count!r} must be None for task={self.task!r}")
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"num_classes={count!r} must be an integer of at least 1")
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ValueError(f"dropout_rate={self.dropout_rate} must be in [0, 1)")

    @property
    def num_outputs(self) -> int | None:
        """Width of the classifier; None = not decided yet."""
        return _OUTPUTS.get(self.task, self.num_classes)


class TaskOutput(NamedTuple):
    """What a task's model returns.

    Attributes:
      logits: float32; of classification [B, classes], of regression [B] (the number itself), of tagging
        [B, L, classes], of answers [B, L, 2] (start, end), of answer_tokens [B, L, 3] (start, end, neither).
      aux: the stack's ``BlockAux``.
    """

    logits: Array
    aux: BlockAux


class TaskModel(nn.Module):
    """A Transformer's body with the head of a task; the body's parameters have the names of the ``Transformer``'s.

    Texts: classifier(dropout(pooler(pooled hidden state))); tokens: classifier(dropout(hidden state)). Devlin et al.
    2019, arXiv:1810.04805, section 4 and figure 4; the last token of a causal model: Radford et al. 2018, section 3.2.
    Deviation: RoBERTa drops before its pooler too.

    Args:
      config: of the body; what it says of output heads is not read.
      head: the task.

    Raises:
      ValueError: a body with two sides, a head whose classes are not decided, or a task that a causal body can't do.
    """

    config: TransformerConfig
    head: HeadConfig

    def __post_init__(self) -> None:
        """Refuse what does not fit."""
        _check_fit(self.config, self.head)
        super().__post_init__()

    def setup(self) -> None:
        """Declare the body and the head."""
        config, head = self.config, self.head
        self.body = Transformer(dataclasses.replace(config, num_future_tokens=1, next_sentence=False))
        nn.share_scope(self, self.body)
        if head.pooler is not None and head.task in TASKS_OF_TEXTS:
            self.pooler = self._projection(config.output_dim)
        assert head.num_outputs is not None
        self.classifier = self._projection(head.num_outputs)
        self.head_dropout = nn.Dropout(head.dropout_rate)

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        *,
        token_types: Int[Array, "B L"] | None = None,
        positions: Int[Array, "B L"] | None = None,
        segments: Int[Array, "B L"] | None = None,
        key_mask: Bool[Array, "B L"] | None = None,
        deterministic: bool = True,
        return_weights: bool = False,
    ) -> TaskOutput:
        """The task's output for every row or token; arguments as for a call of a ``Transformer``."""
        hidden, aux = self.body.hidden(
            tokens,
            token_types=token_types,
            positions=positions,
            segments=segments,
            key_mask=key_mask,
            deterministic=deterministic,
            return_weights=return_weights,
        )
        if self.head.task in TASKS_OF_TEXTS:
            real = real_tokens(BlockInputs(segments=segments, key_mask=key_mask))
            hidden = pool_tokens(hidden, real, pooling=self.head.pooling)
            if self.head.pooler is not None:
                hidden = POOLERS[self.head.pooler](self.pooler(hidden))
        hidden = self.head_dropout(hidden, deterministic=deterministic)
        logits = project(hidden, *self.classifier.arrays(), dtype=compute_dtype(hidden.dtype))
        return TaskOutput(logits[..., 0] if self.head.task == "regression" else logits, aux)

    def hidden(
        self,
        tokens: Int[Array, "B L"],
        *,
        token_types: Int[Array, "B L"] | None = None,
        positions: Int[Array, "B L"] | None = None,
        segments: Int[Array, "B L"] | None = None,
        key_mask: Bool[Array, "B L"] | None = None,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "B L D"], BlockAux]:
        """The body's final hidden states [B, L, embed_dim] and its ``BlockAux``; arguments as for a call."""
        return self.body.hidden(
            tokens,
            token_types=token_types,
            positions=positions,
            segments=segments,
            key_mask=key_mask,
            deterministic=deterministic,
        )

    def _projection(self, outputs: int) -> Projection:
        config = self.config
        return Projection(
            config.output_dim,
            outputs,
            use_bias=self.head.use_bias,
            dtype=config.compute_dtype,
            param_dtype=config.parameter_dtype,
            kernel_init=make_kernel_init(config),
        )


def _check_fit(config: TransformerConfig, head: HeadConfig) -> None:
    """Refuse a head that the body can't have, with the reason."""
    if config.architecture == "encoder_decoder":
        raise ValueError(
            "architecture='encoder_decoder' has no task heads: it writes its answers as text (give the task as source "
            "and target texts)"
        )
    if head.num_outputs is None:
        raise ValueError(f"num_classes=None must be a number for task={head.task!r}")
    if config.architecture == "decoder":
        if head.task in ("answers", "answer_tokens"):
            raise ValueError(
                f"task={head.task!r} needs architecture='encoder': a decoder's tokens don't see what follows"
            )
        if head.task in TASKS_OF_TEXTS and head.pooling == "first":
            raise ValueError(
                "pooling='first' needs architecture='encoder': a decoder's first token sees nothing else; use 'last' "
                "or 'mean'"
            )
