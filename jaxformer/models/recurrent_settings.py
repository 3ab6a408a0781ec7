"""The configuration of the recurrent sequence-to-sequence model."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxformer.models.source_settings import check_source_vocabulary

CELLS = ("gru", "lstm")
SCORES = ("additive", "dot", "scaled_dot", "general", "none")
CONVENTIONS = ("bahdanau", "luong")


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """Sizes and wiring of ``RecurrentSeq2Seq``.

    Attributes:
      vocab_size: tokens that exist.
      embed_dim: features of a token.
      hidden_dim: features of the decoder's states; the encoder's two directions have half of them each.
      num_layers: recurrent layers of each side.
      cell: gru or lstm.
      bidirectional: the encoder reads both ways.
      attention: how the decoder scores the source: additive (Bahdanau et al. 2015, arXiv:1409.0473, appendix A.1.2),
        dot, scaled_dot, general (Luong et al. 2015, arXiv:1508.04025, section 3.1), or none (Sutskever et al. 2014,
        arXiv:1409.3215: the source reaches the decoder through its first state alone).
      convention: bahdanau: the previous state asks, and the context joins the next input; luong: the current state
        asks, and the context joins the output.
      attention_dim: features in which additive attention compares; None = hidden_dim.
      share_embeddings: both sides have one table of tokens.
      source_vocab_size: source tokens that exist, where they have a table of their own (None = vocab_size).
      dropout_rate: of embedded tokens and of outputs, fraction in [0, 1).
      init_stddev: of embeddings.
      dtype: of the computation.
      param_dtype: of the parameters.

    Raises:
      ValueError: a value out of its range.
    """

    vocab_size: int
    embed_dim: int = 256
    hidden_dim: int = 256
    num_layers: int = 1
    cell: str = "gru"
    bidirectional: bool = True
    attention: str = "additive"
    convention: str = "bahdanau"
    attention_dim: int | None = None
    share_embeddings: bool = True
    source_vocab_size: int | None = None
    dropout_rate: float = 0.0
    init_stddev: float = 0.1
    dtype: Any = "float32"
    param_dtype: Any = "float32"

    def __post_init__(self) -> None:
        for name, allowed in (("cell", CELLS), ("attention", SCORES), ("convention", CONVENTIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}")
        for name in ("vocab_size", "embed_dim", "hidden_dim", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.bidirectional and self.hidden_dim % 2:
            raise ValueError(f"hidden_dim={self.hidden_dim} must be even, as each direction of the encoder has half")
        if self.attention_dim is not None and self.attention_dim < 1:
            raise ValueError(f"attention_dim={self.attention_dim} must be at least 1, or None for hidden_dim")
        check_source_vocabulary(self)
        if not 0 <= self.dropout_rate < 1:
            raise ValueError(f"dropout_rate={self.dropout_rate} must be in [0, 1)")

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Of activations."""
        return jnp.dtype(self.dtype)

    @property
    def parameter_dtype(self) -> jnp.dtype:
        """Of parameters."""
        return jnp.dtype(self.param_dtype)
