"""Sparse Transformer: deep pre-norm decoders whose attention is factored into two sparse patterns."""

from typing import Any

from jaxformer.attention import patterns
from jaxformer.models.config import TransformerConfig
from jaxformer.models.transformer import Transformer

# Child et al. 2019, section 7 and table 1: enwik8 (95 million parameters), CIFAR-10 as bytes, ImageNet 64 x 64 (152
# million). GPT-3 small: Brown et al. 2020, table 2.1; its band is not published, 256 tokens are ours, as is tiny.
SPARSE_TRANSFORMER_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "num_layers": 2,
        "embed_dim": 64,
        "num_heads": 4,
        "max_length": 256,
        "vocab_size": 259,
        "pattern": "fixed",
        "stride": 16,
        "num_summary": 4,
    },
    "enwik8": {
        "num_layers": 30,
        "embed_dim": 512,
        "num_heads": 8,
        "max_length": 12288,
        "vocab_size": 256,
        "pattern": "fixed",
        "stride": 128,
        "num_summary": 32,
        "axial_shape": (96, 128),
    },
    "cifar10": {
        "num_layers": 128,
        "embed_dim": 256,
        "num_heads": 2,
        "mlp_dim": 512,
        "max_length": 3072,
        "vocab_size": 256,
        "pattern": "strided",
        "stride": 96,
        "axial_shape": (32, 32, 3),
    },
    "imagenet64": {
        "num_layers": 48,
        "embed_dim": 512,
        "num_heads": 16,
        "max_length": 12288,
        "vocab_size": 256,
        "pattern": "strided",
        "stride": 128,
        "axial_shape": (64, 64, 3),
    },
    "gpt3_small": {
        "num_layers": 12,
        "embed_dim": 768,
        "num_heads": 12,
        "max_length": 2048,
        "vocab_size": 50257,
        "pattern": "banded",
        "stride": 256,
        "alternate_dense": True,
        "positions": "learned",
    },
}

SPARSE_TRANSFORMER_FIELDS: dict[str, Any] = {"positions": "axial", "scale_residual_init": True, "remat": "full"}

SPARSE_PATTERNS = ("strided", "fixed", "banded")
PATTERN_USES = ("merged", "interleaved", "heads")


def sparse_transformer(
    size: str | None = None,
    *,
    pattern: str | None = None,
    use: str | None = None,
    stride: int | None = None,
    num_summary: int | None = None,
    alternate_dense: bool | None = None,
    **fields: Any,
) -> Transformer:
    """Sparse Transformer: pre-norm decoder with factored attention, scaled initialisation and recomputed blocks.

    Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509. Projections into the
    residual stream begin 1/sqrt(2 num_layers) times smaller (section 5.2); positions are sums of vectors of row and
    column (section 5.3); blocks are computed again in the backward pass (section 5.4). ``alternate_dense`` with
    ``banded`` is GPT-3's (Brown et al. 2020, arXiv:2005.14165, section 2.1).

    Deviations: a strided query sees ``stride`` tokens, itself included (the paper's formula has one more); values are
    as wide as queries, so ``cifar10``, whose queries have half the width in the paper, has 68 million parameters
    instead of 59; kernels begin at ``init_stddev`` and the output head is tied.

    Args:
      size: a key of ``SPARSE_TRANSFORMER_SIZES`` (None: the other arguments give every size).
      pattern: ``strided`` (for data with a period, as images), ``fixed`` (for text) or ``banded`` (the last ``stride``
        tokens alone, no second factor).
      use: of the two factors (section 4.2 and 5.1): ``merged`` (every head sees the union), ``interleaved`` (one
        factor a layer, in turn) or ``heads`` (the first half of the heads has one, the others the other). Default
        merged, the only one of ``banded``.
      stride: tokens of a row; default 128.
      num_summary: of ``fixed``: positions at the end of each row that later rows see; default 8. Heads have different
        ones, as many as a row has room for.
      alternate_dense: whether every other layer is dense, beginning with the first; ``interleaved`` factors then take
        turns in the others.
      **fields: fields of ``TransformerConfig``, over those of the size and of ``SPARSE_TRANSFORMER_FIELDS``;
        ``architecture`` is ``decoder``, and ``attention`` in place of ``pattern`` makes every layer's.

    Returns:
      A ``Transformer``.

    Raises:
      ValueError: an unknown size, pattern or use, or numbers that do not fit each other or that ``TransformerConfig``
        refuses.
    """
    if size is not None and size not in SPARSE_TRANSFORMER_SIZES:
        raise ValueError(f"size={size!r} must be one of {', '.join(SPARSE_TRANSFORMER_SIZES)}")
    settings: dict[str, Any] = {
        "pattern": "strided",
        "use": "merged",
        "stride": 128,
        "num_summary": 8,
        "alternate_dense": False,
    }
    preset = {**settings, **SPARSE_TRANSFORMER_FIELDS, **(SPARSE_TRANSFORMER_SIZES[size] if size else {}), **fields}
    given: dict[str, Any] = {
        "pattern": pattern,
        "use": use,
        "stride": stride,
        "num_summary": num_summary,
        "alternate_dense": alternate_dense,
    }
    chosen = {name: preset.pop(name) if given[name] is None else given[name] for name in settings}
    preset = {name: value for name, value in preset.items() if name not in settings}
    if "attention" not in preset:
        preset |= factored_attention(num_heads=preset.get("num_heads", 1), **chosen)
    elif any(value is not None for value in given.values()):
        raise ValueError(f"attention={preset['attention']!r} was given beside {_names(given)}, which make it")
    return Transformer(TransformerConfig(**{**preset, "architecture": "decoder"}))


def factored_attention(
    *, pattern: str, use: str, stride: int, num_summary: int, alternate_dense: bool, num_heads: int
) -> dict[str, Any]:
    """The fields ``attention`` and ``attention_args`` that are these layers; arguments as of ``sparse_transformer``.

    Raises:
      ValueError: an unknown name, or numbers that do not fit.
    """
    for name, value, choices in (("pattern", pattern, SPARSE_PATTERNS), ("use", use, PATTERN_USES)):
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(choices)}")
    if pattern == "banded" and use != "merged":
        raise ValueError(f"use={use!r} needs a pattern of two factors, strided or fixed, not 'banded'")
    if use == "heads" and num_heads % 2:
        raise ValueError(f"num_heads={num_heads} must be even for use='heads', which gives each half a factor")
    layers = _layers(pattern, use, stride, num_summary, num_heads)
    args: list[dict[str, Any]] = [{"pattern": layer} for layer in layers]
    names = ["sparse"] * len(layers)
    if alternate_dense:
        names = [name for own in names for name in ("dense", own)]
        args = [arg for own in args for arg in ({}, own)]
    return {"attention": tuple(names), "attention_args": args}


def _layers(pattern: str, use: str, stride: int, num_summary: int, num_heads: int) -> list[Any]:
    """The patterns of the layers that take turns: each one pattern, or one for each group of heads."""
    if pattern == "banded":
        return [patterns.local(stride - 1)]
    if pattern == "strided":
        row, column = patterns.strided_parts(stride)
        uses: dict[str, list[Any]] = {"merged": [row | column], "interleaved": [row, column], "heads": [(row, column)]}
        return uses[use]
    # Different heads have different summaries, as many as there are places for (section 4.3, the last paragraph).
    first, _ = patterns.fixed_parts(stride, num_summary)
    room = stride // num_summary

    def summaries(count: int) -> tuple[Any, ...]:
        groups = max(size for size in range(1, min(room, count) + 1) if count % size == 0)
        offsets = [head % groups * num_summary for head in range(count if groups > 1 else 1)]
        return tuple(patterns.summaries(stride, num_summary, offset=offset) for offset in offsets)

    if use == "merged":
        return [tuple(first | summary for summary in summaries(num_heads))]
    if use == "interleaved":
        return [first, summaries(num_heads)]
    half = num_heads // 2
    second = summaries(half)
    return [(first,) * len(second) + second]


def _names(given: dict[str, Any]) -> str:
    return ", ".join(name for name, value in given.items() if value is not None)
