"""The families of checkpoints that can be read and written, and which of them a model's config belongs to."""

import dataclasses
from typing import Any

from jaxformer.interop.bert import BERT
from jaxformer.interop.distilbert import DISTILBERT
from jaxformer.interop.errors import PretrainedError
from jaxformer.interop.family import Family
from jaxformer.interop.gpt2 import GPT2
from jaxformer.interop.llama import LLAMA
from jaxformer.interop.roberta import ROBERTA
from jaxformer.interop.t5 import T5
from jaxformer.models import TransformerConfig

FAMILIES: dict[str, Family] = {family.model_type: family for family in (GPT2, LLAMA, DISTILBERT, BERT, ROBERTA, T5)}
"""By ``model_type``. A model that several can say is written as the first of them."""

# Fields that change how a model is computed, initialised or trained, but not what it computes; the heads' are chosen
# by the head.
_FREE = (
    "vocab_multiple",
    "dropout_rate",
    "attention_dropout_rate",
    "mlp_dropout_rate",
    "final_dropout_rate",
    "attention_args",
    "encoder_attention_args",
    "cross_attention_args",
    "mlp_chunk_size",
    "random_position_start",
    "scan_layers",
    "remat",
    "kernel_init",
    "init_stddev",
    "scale_residual_init",
    "dtype",
    "param_dtype",
    "head_transform",
    "head_bias",
    "next_sentence",
)

# Fields that only count where another is set.
_DEPENDENT = {
    "rotary_base": lambda config: config.positions == "rotary",
    "relative_buckets": lambda config: config.positions == "relative",
    "relative_max_distance": lambda config: config.positions == "relative",
    "share_embeddings": lambda config: config.architecture == "encoder_decoder",
    "cross_attention": lambda config: config.architecture == "encoder_decoder",
    "residual_merge": lambda config: config.residual != "plain",
    **dict.fromkeys(
        (
            "experts_per_token",
            "expert_period",
            "expert_capacity_factor",
            "expert_dispatch",
            "shared_expert",
            "balance_loss_weight",
            "router_z_loss_weight",
            "router_jitter",
        ),
        lambda config: config.num_experts is not None,
    ),
    **dict.fromkeys(
        (
            "step_embedding",
            "halting",
            "halting_threshold",
            "halting_mix",
            "halting_bias_init",
            "ponder_weight",
            "early_exit",
        ),
        lambda config: config.stack == "universal",
    ),
}


def essence(config: TransformerConfig) -> dict[str, Any]:
    """What a model computes: its fields with defaults filled in, without those that change nothing of it."""
    fields = dataclasses.asdict(config)
    fields |= {
        "num_kv_heads": config.kv_heads,
        "head_dim": config.width_of_head,
        "mlp_dim": config.hidden_dim,
        "attention": tuple(choice.name for choice in config.attentions),
        "attention_scale": config.attention_scale or config.width_of_head**-0.5,
        "rotary_base": float(config.rotary_base),
    }
    if config.architecture == "encoder_decoder":
        fields["num_encoder_layers"] = config.num_encoder_layers or config.num_layers
        fields["encoder_attention"] = tuple(choice.name for choice in config.encoder_side.attentions)
    return {
        name: value
        for name, value in fields.items()
        if name not in _FREE and (name not in _DEPENDENT or _DEPENDENT[name](config))
    }


def differences(family: Family, config: TransformerConfig) -> list[str]:
    """What a family's config.json can't say of a model's config: a field with its value, and what would be read."""
    try:
        fields = family.read_fields(family.settings(family.write_settings(config)))
        read = essence(TransformerConfig(**fields))
    except ValueError as error:
        return [str(error)]
    own = essence(config)
    return [
        f"{name}={own.get(name)!r} (would be read as {read.get(name)!r})"
        for name in sorted({**own, **read})
        if own.get(name) != read.get(name)
    ]


def find_family(config: TransformerConfig, wanted: str | None = None) -> Family:
    """The family that a model is written as.

    Args:
      config: the model's.
      wanted: a key of ``FAMILIES``; None = the first that can say all that the model computes.

    Raises:
      PretrainedError: none can; the message lists what stands in the way of the nearest one.
    """
    if wanted is not None and wanted not in FAMILIES:
        raise PretrainedError(f"family={wanted!r} must be one of {', '.join(FAMILIES)}")
    candidates = list(FAMILIES.values()) if wanted is None else [FAMILIES[wanted]]
    lines = {family.model_type: differences(family, config) for family in candidates}
    for family in candidates:
        if not lines[family.model_type]:
            return family
    nearest = min(lines, key=lambda name: _distance(FAMILIES[name], config, lines[name]))
    raise PretrainedError(f"the model can't be written as {nearest}: {'; '.join(lines[nearest])}")


def _distance(family: Family, config: TransformerConfig, lines: list[str]) -> tuple[bool, int]:
    """How far a family is from a model, by its ``differences``; one of another architecture is behind all others."""
    sides = family.read_fields(family.settings({}))["architecture"]
    # What can't be read at all hides what else differs.
    hidden = "would be read as" not in lines[0]
    return sides != config.architecture, len(lines) + hidden
