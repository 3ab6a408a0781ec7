"""GPT-2's checkpoints: Conv1D kernels as they are, queries, keys and values in one tensor."""

from typing import Any

from jaxformer.interop.family import Family, Head
from jaxformer.interop.rules import Rule, fused, linear, norm, table
from jaxformer.interop.settings import PLAIN_ACTIVATIONS, Settings, inverse
from jaxformer.models import TransformerConfig

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "classifier_dropout": None,
    "hidden_dropout": None,
    "default_dropout": 0.1,
}

BODY = (
    *table("token_embedding", "transformer.wte"),
    *table("decoder/position_embedding", "transformer.wpe"),
    *norm("decoder/layers/attention_norm", "transformer.h.{}.ln_1"),
    *fused([f"decoder/layers/attention/{part}" for part in ("query", "key", "value")], "transformer.h.{}.attn.c_attn"),
    *fused(["decoder/layers/attention/out"], "transformer.h.{}.attn.c_proj"),
    *norm("decoder/layers/mlp_norm", "transformer.h.{}.ln_2"),
    *fused(["decoder/layers/mlp/up"], "transformer.h.{}.mlp.c_fc"),
    *fused(["decoder/layers/mlp/down"], "transformer.h.{}.mlp.c_proj"),
    *norm("decoder/final_norm", "transformer.ln_f"),
)


def read_fields(settings: Settings) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` that a config.json says."""
    settings.only("add_cross_attention", False, reason="a decoder here attends to an encoder of the same model only")
    settings.only("scale_attn_by_inverse_layer_idx", False, reason="all layers scale their attention alike here")
    return {
        "architecture": "decoder",
        "vocab_size": settings["vocab_size"],
        "num_layers": settings["n_layer"],
        "embed_dim": settings["n_embd"],
        "num_heads": settings["n_head"],
        "mlp_dim": settings["n_inner"],
        "max_length": settings["n_positions"],
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "norm_epsilon": settings["layer_norm_epsilon"],
        "activation": settings.choice("activation_function", PLAIN_ACTIVATIONS),
        "use_bias": True,
        "tie_embeddings": settings["tie_word_embeddings"],
        "attention_scale": None if settings["scale_attn_weights"] else 1.0,
        "dropout_rate": settings.first("resid_pdrop", "embd_pdrop", field="dropout_rate"),
        "attention_dropout_rate": settings["attn_pdrop"],
        "init_stddev": settings["initializer_range"],
    }


def write_settings(config: TransformerConfig) -> dict[str, Any]:
    """Values of a config.json that say a config's fields."""
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.max_length,
        "n_embd": config.embed_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_dim,
        "activation_function": inverse(PLAIN_ACTIVATIONS, config.activation),
        "resid_pdrop": config.dropout_rate,
        "embd_pdrop": config.dropout_rate,
        "attn_pdrop": config.attention_dropout_rate,
        "layer_norm_epsilon": config.norm_epsilon,
        "initializer_range": config.init_stddev,
        "scale_attn_weights": config.attention_scale != 1.0,
        "tie_word_embeddings": config.tie_embeddings,
    }


GPT2 = Family(
    model_type="gpt2",
    preset="gpt",
    prefix="transformer.",
    defaults=DEFAULTS,
    body=BODY,
    heads=(
        Head("GPT2LMHeadModel", rules=(Rule("output_head/kernel", "lm_head.weight", transposed=True),)),
        Head(
            "GPT2ForSequenceClassification",
            rules=(Rule("classifier/kernel", "score.weight", transposed=True),),
            task={"task": "classification", "pooling": "last", "pooler": None, "use_bias": False},
        ),
        Head(
            "GPT2ForTokenClassification",
            rules=linear("classifier", "classifier"),
            task={"task": "tagging"},
            dropout=("classifier_dropout", "hidden_dropout", "default_dropout"),
        ),
        Head("GPT2Model", is_body=True),
    ),
    read_fields=read_fields,
    write_settings=write_settings,
    buffers=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    duplicates={"lm_head.weight": "transformer.wte.weight"},
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)
