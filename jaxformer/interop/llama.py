"""Llama's checkpoints, and those shaped like it: rotary positions, RMS norms, SwiGLU, grouped heads, tied or not."""

from typing import Any

from jaxformer.interop.errors import PretrainedError
from jaxformer.interop.family import Family, Head
from jaxformer.interop.rules import Rule, linear, norm, table
from jaxformer.interop.settings import GATED_ACTIVATIONS, Settings, inverse
from jaxformer.models import TransformerConfig

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "rope_parameters": None,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
}

BODY = (
    *table("token_embedding", "model.embed_tokens"),
    *norm("decoder/layers/attention_norm", "model.layers.{}.input_layernorm"),
    *linear("decoder/layers/attention/query", "model.layers.{}.self_attn.q_proj"),
    *linear("decoder/layers/attention/key", "model.layers.{}.self_attn.k_proj"),
    *linear("decoder/layers/attention/value", "model.layers.{}.self_attn.v_proj"),
    *linear("decoder/layers/attention/out", "model.layers.{}.self_attn.o_proj"),
    *norm("decoder/layers/mlp_norm", "model.layers.{}.post_attention_layernorm"),
    *linear("decoder/layers/mlp/gate", "model.layers.{}.mlp.gate_proj"),
    *linear("decoder/layers/mlp/up", "model.layers.{}.mlp.up_proj"),
    *linear("decoder/layers/mlp/down", "model.layers.{}.mlp.down_proj"),
    *norm("decoder/final_norm", "model.norm"),
)


def read_fields(settings: Settings) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` that a config.json says."""
    if settings["attention_bias"] != settings["mlp_bias"]:
        raise PretrainedError(
            f"config.json has attention_bias={settings['attention_bias']!r} and mlp_bias={settings['mlp_bias']!r}, "
            "which can't be read: all projections have a bias here, or none"
        )
    return {
        "architecture": "decoder",
        "vocab_size": settings["vocab_size"],
        "num_layers": settings["num_hidden_layers"],
        "embed_dim": settings["hidden_size"],
        "num_heads": settings["num_attention_heads"],
        "num_kv_heads": settings["num_key_value_heads"],
        "head_dim": settings["head_dim"],
        "mlp_dim": settings["intermediate_size"],
        "max_length": settings["max_position_embeddings"],
        "positions": "rotary",
        "rotary_base": _rotary_base(settings),
        "norm": "rms",
        "norm_placement": "pre",
        "norm_epsilon": settings["rms_norm_eps"],
        "activation": settings.choice("hidden_act", GATED_ACTIVATIONS),
        "use_bias": settings["attention_bias"],
        "tie_embeddings": settings["tie_word_embeddings"],
        "attention_scale": None,
        "dropout_rate": 0.0,
        "attention_dropout_rate": settings["attention_dropout"],
        "init_stddev": settings["initializer_range"],
    }


def _rotary_base(settings: Settings) -> float:
    """The wavelength base, which stands in one of two places; refuses frequencies that are scaled."""
    rope = settings["rope_parameters"] or {}
    scaling = settings["rope_scaling"] or {}
    for kind in (rope.get("rope_type"), scaling.get("rope_type"), scaling.get("type")):
        if kind not in (None, "default"):
            raise PretrainedError(
                f"config.json has rope_scaling of type {kind!r}, which can't be read: rotary frequencies are not "
                "scaled here"
            )
    fraction = rope.get("partial_rotary_factor", settings["partial_rotary_factor"])
    if fraction != 1.0:
        raise PretrainedError(
            f"config.json has partial_rotary_factor={fraction}, which can't be read: all features are rotated here"
        )
    return float(rope.get("rope_theta") or settings["rope_theta"])


def write_settings(config: TransformerConfig) -> dict[str, Any]:
    """Values of a config.json that say a config's fields; the base in both places, for old and new readers."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.width_of_head,
        "hidden_act": inverse(GATED_ACTIVATIONS, config.activation),
        "max_position_embeddings": config.max_length,
        "initializer_range": config.init_stddev,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.use_bias,
        "mlp_bias": config.use_bias,
        "attention_dropout": config.attention_dropout_rate,
        "rope_theta": config.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base},
    }


LLAMA = Family(
    model_type="llama",
    preset="llama",
    prefix="model.",
    defaults=DEFAULTS,
    body=BODY,
    heads=(
        Head("LlamaForCausalLM", rules=(Rule("output_head/kernel", "lm_head.weight", transposed=True),)),
        Head(
            "LlamaForSequenceClassification",
            rules=(Rule("classifier/kernel", "score.weight", transposed=True),),
            task={"task": "classification", "pooling": "last", "pooler": None, "use_bias": False},
        ),
        Head("LlamaModel", is_body=True),
    ),
    read_fields=read_fields,
    write_settings=write_settings,
    buffers=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),
    duplicates={"lm_head.weight": "model.embed_tokens.weight"},
)
