"""The one configuration of every Transformer: frozen, hashable, checked when made."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxformer.functional import DISPATCHES
from jaxformer.layers import ACTIVATIONS, check_heads
from jaxformer.models.attention_choice import (
    AttentionChoice,
    check_attentions,
    choose_attentions,
    choose_cross_attention,
    freeze,
)
from jaxformer.models.encoder_settings import check_encoder_parts, check_output_head
from jaxformer.models.expert_settings import check_mixture
from jaxformer.models.norm_settings import NORM_CHOICES, check_norms
from jaxformer.models.position_settings import POSITIONS, check_positions
from jaxformer.models.residual_settings import RESIDUAL_CHOICES, check_residual
from jaxformer.models.source_settings import check_source_vocabulary
from jaxformer.models.universal_settings import UNIVERSAL_CHOICES, check_universal

ARCHITECTURES = ("decoder", "encoder", "encoder_decoder")
KERNEL_INITS = ("normal", "xavier_uniform", "fan_in")
REMAT_POLICIES = ("none", "full", "sqrt", "dots", "dots_no_batch")
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shape and wiring of a Transformer; paper letters in brackets.

    Attributes:
      vocab_size: tokens that exist.
      num_layers: blocks of the decoder (or of the encoder, where that is all there is) [N].
      embed_dim: width of the residual stream [d_model].
      num_heads: query heads [h].
      architecture: ``decoder`` (causal), ``encoder`` (bidirectional) or ``encoder_decoder``.
      num_encoder_layers: blocks of the encoder of an encoder-decoder (None = num_layers).
      num_kv_heads: key and value heads (None = num_heads; 1 = multi-query).
      head_dim: width of a head [d_k] (None = embed_dim / num_heads).
      mlp_dim: hidden width of the feed-forward layer [d_ff] (None = 4 * embed_dim).
      max_length: longest sequence in tokens; positions are below it (learned ones have that many rows).
      positions: ``learned``, ``axial`` or ``sinusoidal`` vectors added to the embedding, ``rotary``, ``alibi``,
        ``relative`` (T5 buckets, one table per stack) or ``none``.
      axial_shape: of axial positions: rows and columns (a tuple), with at least max_length positions; None = nearest to
        a square.
      axial_dims: widths of the rows' and the columns' part, side by side; None = the sum of both.
      position_offset: of learned positions: rows of the table before that of position 0, so that it has max_length +
        position_offset rows (RoBERTa's has 2).
      positions_skip_padding: positions that are vectors and that are not given count the real tokens of ``key_mask``,
        so that a padded row has those of the row alone; encoders only.
      rotary_base: wavelength base of rotary positions.
      relative_buckets: buckets of relative positions.
      relative_max_distance: distance in tokens from which all share the last bucket.
      norm: ``layer``, ``rms``, ``batch`` (statistics of the batch's real tokens in training, running averages of them
        in evaluation and decoding; see ``jaxformer.layers.BatchNorm``: in training a causal model's tokens depend on
        later ones through the statistics) or ``none`` (nowhere).
      norm_placement: ``pre`` (and one final norm), ``post`` (as published in 2017) or ``none`` (no norm of sub-layers
        and no final one).
      norm_epsilon: added to the variance or mean square.
      norm_momentum: of batch norm: share of the running averages that a training step keeps (None = 0.9).
      activation: of the feed-forward layer: relu, gelu (exact), gelu_tanh, swiglu, geglu or geglu_tanh.
      mlp_norm: a further norm, of the feed-forward layer's hidden width: ``layer``, ``rms``, ``batch`` or None (none).
      mlp_norm_placement: it stands ``before`` or ``after`` the activation (None = before).
      use_bias: whether projections, LayerNorm and BatchNorm have biases.
      tie_embeddings: the output head is the transposed token embedding.
      share_embeddings: source and target tokens of an encoder-decoder have one table.
      source_vocab_size: source tokens that exist, where they have a table of their own (None = vocab_size).
      num_token_types: rows of a table that is added to the tokens' by their types, such as BERT's two for the sentences
        of a pair; 0 = no table.
      embedding_norm: the configured norm after the sum of embeddings, before dropout.
      head_transform: before the output head the hidden states go through a projection of their own width, the
        (ungated) activation and a norm, as in BERT.
      head_bias: the output head has a bias for each token.
      scale_logits: hidden states are divided by sqrt(embed_dim) before the tied output head, as in T5.
      next_sentence: of an encoder: the first token's hidden state goes through a projection and tanh (the pooler) to a
        head that says whether the second text follows the first.
      num_future_tokens: tokens that every position predicts in training; 1 = the next. Each further one has an output
        head of its own, which only training uses (``jaxformer.training.auxiliary``).
      scale_embedding: multiply token embeddings by sqrt(embed_dim), as in the 2017 paper.
      vocab_multiple: rows of the vocabulary are padded to a multiple of it, for speed; results don't change.
      dropout_rate: dropout after embeddings and each sub-layer, fraction in [0, 1).
      attention_dropout_rate: dropout of attention weights, fraction in [0, 1).
      mlp_dropout_rate: dropout of the feed-forward hidden layer, fraction in [0, 1).
      final_dropout_rate: dropout after the last layer and its norm, fraction in [0, 1).
      attention: a name of ``jaxformer.attention.ATTENTION`` or ``PATTERNS``, or a tuple of names that the layers go
        through in turn: ("local", "local", "dense") repeats every three layers, and divides num_layers.
      attention_args: its further keyword arguments (a mapping, kept as sorted pairs), those of its arrays among them;
        of a tuple of names, a mapping from name to such a mapping, or one such mapping for each name.
      encoder_attention: the same for the encoder of an encoder-decoder, whose need not be causal (None = attention).
      encoder_attention_args: its further keyword arguments.
      cross_attention: the attention from decoder to encoder; one name.
      cross_attention_args: its further keyword arguments.
      attention_scale: factor on attention logits (None = 1/sqrt(head_dim)).
      mlp_chunk_size: positions of the feed-forward layer computed at a time (None = all).
      convolution_width: positions mixed by a depthwise convolution in front of the feed-forward layer, which makes it a
        separable convolution (causal in decoders, where it sees that many positions up to its own); None = none.
      stack: ``plain`` (blocks with parameters of their own) or ``universal`` (Universal Transformer: one block's
        parameters in num_layers steps; vectors of positions are added at every step).
      step_embedding: of a universal stack: ``sinusoidal`` (the number of the step as a vector, added at every step)
        or ``none``.
      random_position_start: in training every row's positions begin at a number of tokens drawn from 0 to this one,
        so that sinusoidal positions longer than the training rows are known.
      halting: of a universal stack: ``none`` (all positions make num_layers steps) or ``act`` (adaptive computation
        time: each halts by itself, after num_layers steps at most).
      halting_threshold: sum of halting probabilities at which a position halts [1 - epsilon].
      halting_mix: how a position's steps make its output: ``weighted`` (Graves 2016) or ``exponential``
        (tensor2tensor).
      halting_bias_init: the halting unit's bias at the start; the larger, the fewer steps.
      ponder_weight: factor of the ponder cost, in loss per step.
      early_exit: calls that are deterministic and return no weights end when all positions have halted: equal output
        for less work, but without gradient.
      num_experts: feed-forward layers of a block among which a router chooses for each token [E]; None = one layer
        and no router.
      expert_period: of every so many blocks the last has experts, the others one plain layer; divides num_layers.
      experts_per_token: experts that a token uses [K].
      expert_capacity_factor: in training an expert takes of each row ceil(factor * K * tokens / E) tokens and drops
        the rest; None = nothing is dropped. Evaluation and generation never drop.
      expert_dispatch: how tokens come to experts: ``sort`` or ``einsum``, equal in what they compute.
      shared_expert: one more expert of the same width, which every token uses.
      balance_loss_weight: factor of the loss that balances experts, summed over layers [alpha]; 0 = none.
      router_z_loss_weight: factor of the loss that keeps router logits small, summed over layers; 0 = none.
      router_jitter: in training the router's input is multiplied by noise in [1 - jitter, 1 + jitter].
      residual: ``plain``, or ``reversible`` (two residual streams, so that the memory for gradients does not grow with
        num_layers; for one more evaluation of every layer; not post-norm).
      residual_merge: how the output is made of a reversible stack's two streams: ``mean``, or ``concatenate`` (twice
        as wide; without tied embeddings).
      scan_layers: one compiled block scanned over stacked parameters, or an unrolled stack.
      remat: what the backward pass recomputes: ``none`` (nothing), ``full`` (each block), ``sqrt`` (each block,
        and between groups of about sqrt(num_layers) blocks their inputs too; unrolled as ``full``), ``dots`` (all but
        matrix products), ``dots_no_batch`` (all but matrix products without batch dimensions).
      kernel_init: ``normal`` (of ``init_stddev``), ``xavier_uniform``, or ``fan_in`` (normal with variance 1 / number
        of inputs; for queries and relative positions see ``jaxformer.models.initializers``).
      init_stddev: standard deviation of normal kernels and of embeddings.
      scale_residual_init: divide the initial scale of projections into the residual stream by sqrt(number of
        residual additions), as in GPT-2.
      dtype: dtype of the computation, by name.
      param_dtype: dtype of the parameters, by name.

    Raises:
      ValueError: a value out of range, an unknown name, or sizes that don't divide.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    architecture: str = "decoder"
    num_encoder_layers: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_dim: int | None = None
    max_length: int = 1024
    positions: str = "learned"
    axial_shape: Any = None
    axial_dims: Any = None
    position_offset: int = 0
    positions_skip_padding: bool = False
    rotary_base: float = 10_000.0
    relative_buckets: int = 32
    relative_max_distance: int = 128
    norm: str = "layer"
    norm_placement: str = "pre"
    norm_epsilon: float = 1e-5
    norm_momentum: float | None = None
    activation: str = "gelu_tanh"
    mlp_norm: str | None = None
    mlp_norm_placement: str | None = None
    use_bias: bool = True
    tie_embeddings: bool = True
    share_embeddings: bool = True
    source_vocab_size: int | None = None
    num_token_types: int = 0
    embedding_norm: bool = False
    head_transform: bool = False
    head_bias: bool = False
    scale_logits: bool = False
    next_sentence: bool = False
    num_future_tokens: int = 1
    scale_embedding: bool = False
    vocab_multiple: int = 1
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    mlp_dropout_rate: float = 0.0
    final_dropout_rate: float = 0.0
    attention: Any = "dense"
    attention_args: Any = ()
    encoder_attention: Any = None
    encoder_attention_args: Any = ()
    cross_attention: Any = "dense"
    cross_attention_args: Any = ()
    attention_scale: float | None = None
    mlp_chunk_size: int | None = None
    convolution_width: int | None = None
    stack: str = "plain"
    step_embedding: str = "none"
    random_position_start: int = 0
    halting: str = "none"
    halting_threshold: float = 0.99
    halting_mix: str = "weighted"
    halting_bias_init: float = 1.0
    ponder_weight: float = 0.01
    early_exit: bool = False
    num_experts: int | None = None
    expert_period: int = 1
    experts_per_token: int = 1
    expert_capacity_factor: float | None = None
    expert_dispatch: str = "sort"
    shared_expert: bool = False
    balance_loss_weight: float = 0.01
    router_z_loss_weight: float = 0.001
    router_jitter: float = 0.0
    residual: str = "plain"
    residual_merge: str = "mean"
    scan_layers: bool = True
    remat: str = "none"
    kernel_init: str = "normal"
    init_stddev: float = 0.02
    scale_residual_init: bool = True
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        """Check every field and freeze what says which attention."""
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(str, choices))}")
        for name in ("attention", "encoder_attention", "axial_shape", "axial_dims"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("attention_args", "encoder_attention_args", "cross_attention_args"):
            object.__setattr__(self, name, freeze(getattr(self, name)))
        check_attentions(self)
        check_source_vocabulary(self)
        check_encoder_parts(self)
        check_output_head(self)
        check_mixture(self)
        check_norms(self)
        check_universal(self)
        check_residual(self)
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        if self.num_future_tokens > 1 and self.architecture == "encoder":
            raise ValueError(
                f"num_future_tokens={self.num_future_tokens} needs a decoder; an encoder sees the tokens after its own"
            )
        for name in ("num_encoder_layers", "mlp_dim", "mlp_chunk_size", "convolution_width"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        check_positions(self)
        check_heads(self.embed_dim, self.num_heads, self.kv_heads, self.head_dim)
        for name in ("rotary_base", "norm_epsilon", "init_stddev", "attention_scale"):
            _check_positive(name, getattr(self, name))
        for name in ("dropout_rate", "attention_dropout_rate", "mlp_dropout_rate", "final_dropout_rate"):
            if not isinstance(getattr(self, name), int | float) or not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number in [0, 1)")
        if self.positions == "rotary" and self.width_of_head % 2:
            raise ValueError(f"head_dim={self.width_of_head} must be even for rotary positions")
        if "float64" in (self.dtype, self.param_dtype) and not jax.config.read("jax_enable_x64"):
            raise ValueError("dtype and param_dtype can be float64 only with jax_enable_x64")

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width_of_head(self) -> int:
        """Width of one head."""
        return self.head_dim or self.embed_dim // self.num_heads

    @property
    def output_dim(self) -> int:
        """Width of the final hidden states."""
        return 2 * self.embed_dim if self.residual_merge == "concatenate" else self.embed_dim

    @property
    def vocab_rows(self) -> int:
        """Tokens that exist, padded to a multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def is_random(self) -> bool:
        """Whether training draws random numbers: dropout of any kind, or a router's jitter."""
        dropout = (self.dropout_rate, self.attention_dropout_rate, self.mlp_dropout_rate, self.final_dropout_rate)
        return any(dropout) or bool(self.router_jitter)

    @property
    def hidden_dim(self) -> int:
        """Hidden width of the feed-forward layer."""
        return self.mlp_dim or 4 * self.embed_dim

    @property
    def kept_average(self) -> float:
        """``norm_momentum``, or what it is by itself."""
        return 0.9 if self.norm_momentum is None else self.norm_momentum

    @property
    def attentions(self) -> tuple[AttentionChoice, ...]:
        """The attention of each layer of the period, after which attentions and experts repeat."""
        choices = choose_attentions(self.attention, self.attention_args)
        return choices * (math.lcm(len(choices), self.expert_period) // len(choices))

    @property
    def cross(self) -> AttentionChoice:
        """The attention from decoder to encoder."""
        return choose_cross_attention(self.cross_attention, self.cross_attention_args)

    @property
    def encoder_side(self) -> "TransformerConfig":
        """That of the encoder of an encoder-decoder alone."""
        own = self.encoder_attention is not None
        return dataclasses.replace(
            self,
            architecture="encoder",
            num_layers=self.num_encoder_layers or self.num_layers,
            num_encoder_layers=None,
            num_future_tokens=1,
            share_embeddings=True,
            source_vocab_size=None,
            attention=self.encoder_attention if own else self.attention,
            attention_args=self.encoder_attention_args if own else self.attention_args,
            encoder_attention=None,
            encoder_attention_args=(),
            cross_attention="dense",
            cross_attention_args=(),
        )

    @property
    def mixtures(self) -> tuple[bool, ...]:
        """Whether each layer of the period has experts."""
        last = self.expert_period - 1
        places = range(len(self.attentions))
        return tuple(self.num_experts is not None and place % self.expert_period == last for place in places)

    @property
    def compute_dtype(self) -> Any:
        """``dtype`` as a dtype."""
        return jnp.dtype(self.dtype)

    @property
    def parameter_dtype(self) -> Any:
        """``param_dtype`` as a dtype."""
        return jnp.dtype(self.param_dtype)


_COUNTS = (
    "vocab_size",
    "num_layers",
    "embed_dim",
    "max_length",
    "vocab_multiple",
    "relative_buckets",
    "num_future_tokens",
)

_CHOICES = {
    "architecture": ARCHITECTURES,
    "positions": POSITIONS,
    "activation": tuple(sorted(ACTIVATIONS)),
    "expert_dispatch": tuple(DISPATCHES),
    "remat": REMAT_POLICIES,
    "kernel_init": KERNEL_INITS,
    "dtype": DTYPES,
    "param_dtype": DTYPES,
    **NORM_CHOICES,
    **RESIDUAL_CHOICES,
    **UNIVERSAL_CHOICES,
}


def _check_positive(name: str, value: Any) -> None:
    if name == "attention_scale" and value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r} must be a positive number")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1")
