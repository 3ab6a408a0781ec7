"""The Switch Transformer's idea in a decoder: GPT whose every other feed-forward layer is a mixture of experts."""

from typing import Any

from jaxformer.models.config import TransformerConfig
from jaxformer.models.gpt import GPT_SIZES
from jaxformer.models.transformer import Transformer

# GPT's sizes with as many experts as the name says: a token costs about what it costs in that GPT.
SWITCH_SIZES: dict[str, dict[str, int]] = {
    "tiny": {**GPT_SIZES["tiny"], "num_experts": 4},
    "small_8": {**GPT_SIZES["small"], "num_experts": 8},
    "small_64": {**GPT_SIZES["small"], "num_experts": 64},
    "small_128": {**GPT_SIZES["small"], "num_experts": 128},
}

# Fedus et al. 2021, sections 2.2 and 2.3 (one expert, capacity factor 1.25, alpha = 0.01, jitter = 0.01) and table 9
# (experts in every other block), and Zoph et al. 2022, section 3 (z-loss of 0.001).
SWITCH_FIELDS: dict[str, Any] = {
    "expert_period": 2,
    "experts_per_token": 1,
    "expert_capacity_factor": 1.25,
    "balance_loss_weight": 0.01,
    "router_z_loss_weight": 0.001,
    "router_jitter": 0.01,
}


def switch(size: str | None = None, **fields: Any) -> Transformer:
    """Decoder-only language model with experts: in every other block a token goes through one feed-forward of many.

    Fedus et al. 2021, "Switch Transformers", arXiv:2101.03961. Deviation: a decoder with GPT-2's block instead of T5's
    encoder and decoder. Two experts a token as in GShard (Lepikhin et al. 2020, arXiv:2006.16668), which has them in
    every other block too: ``experts_per_token=2, expert_capacity_factor=2.0``. In every block: ``expert_period=1``.

    In training a full expert drops tokens, and which are dropped depends on the other tokens of the row (see
    ``jaxformer.functional.sort_dispatch``); evaluation and generation drop nothing.

    Args:
      size: a key of ``SWITCH_SIZES`` (None: ``fields`` give every size, ``num_experts`` among them).
      **fields: fields of ``TransformerConfig``, over those of the size and of ``SWITCH_FIELDS``.

    Returns:
      A ``Transformer``.

    Raises:
      ValueError: an unknown size, no ``num_experts``, or fields that ``TransformerConfig`` refuses.
    """
    if size is not None and size not in SWITCH_SIZES:
        raise ValueError(f"size={size!r} must be one of {', '.join(SWITCH_SIZES)}")
    preset = {**SWITCH_FIELDS, **(SWITCH_SIZES[size] if size else {}), **fields}
    if preset.get("num_experts") is None:
        raise ValueError("num_experts is None; a switch model needs a number of experts")
    return Transformer(TransformerConfig(**{**preset, "architecture": "decoder"}))
