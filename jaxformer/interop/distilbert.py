"""DistilBERT's checkpoints: BERT without token types and pooler, under names of its own."""

from typing import Any

from jaxformer.interop import bert
from jaxformer.interop.family import Family, Head
from jaxformer.interop.rules import Rule, linear, norm, table
from jaxformer.interop.settings import PLAIN_ACTIVATIONS, Settings, inverse
from jaxformer.models import TransformerConfig

# The norms' epsilon is no setting of the family: it is this one.
EPSILON = 1e-12

DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "n_layers": 6,
    "n_heads": 12,
    "dim": 768,
    "hidden_dim": 3072,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation": "gelu",
    "initializer_range": 0.02,
    "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2,
    "tie_word_embeddings": True,
}

_LAYER = "distilbert.transformer.layer.{}."

BODY = (
    *table("token_embedding", "distilbert.embeddings.word_embeddings"),
    *table("encoder/position_embedding", "distilbert.embeddings.position_embeddings"),
    *norm("encoder/embedding_norm", "distilbert.embeddings.LayerNorm"),
    *linear("encoder/layers/attention/query", f"{_LAYER}attention.q_lin"),
    *linear("encoder/layers/attention/key", f"{_LAYER}attention.k_lin"),
    *linear("encoder/layers/attention/value", f"{_LAYER}attention.v_lin"),
    *linear("encoder/layers/attention/out", f"{_LAYER}attention.out_lin"),
    *norm("encoder/layers/attention_norm", f"{_LAYER}sa_layer_norm"),
    *linear("encoder/layers/mlp/up", f"{_LAYER}ffn.lin1"),
    *linear("encoder/layers/mlp/down", f"{_LAYER}ffn.lin2"),
    *norm("encoder/layers/mlp_norm", f"{_LAYER}output_layer_norm"),
)

TRANSFORM = (
    *linear("head_transform", "vocab_transform"),
    *norm("head_norm", "vocab_layer_norm"),
    Rule("head_bias/bias", "vocab_projector.bias"),
    Rule("output_head/kernel", "vocab_projector.weight", transposed=True),
)


def read_fields(settings: Settings) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` that a config.json says, without those of a head.

    Positions that were sinusoidal stand in the files as a table, and are read as one. In training the original drops
    nothing of what attention adds to the stream; here ``dropout_rate`` does.
    """
    return {
        "architecture": "encoder",
        "vocab_size": settings["vocab_size"],
        "num_layers": settings["n_layers"],
        "embed_dim": settings["dim"],
        "num_heads": settings["n_heads"],
        "mlp_dim": settings["hidden_dim"],
        "max_length": settings["max_position_embeddings"],
        "positions": "learned",
        "position_offset": 0,
        "positions_skip_padding": False,
        "num_token_types": 0,
        "embedding_norm": True,
        "norm": "layer",
        "norm_placement": "post",
        "norm_epsilon": EPSILON,
        "activation": settings.choice("activation", PLAIN_ACTIVATIONS),
        "use_bias": True,
        "tie_embeddings": settings["tie_word_embeddings"],
        "attention_scale": None,
        "dropout_rate": settings["dropout"],
        "attention_dropout_rate": settings["attention_dropout"],
        "kernel_init": "normal",
        "init_stddev": settings["initializer_range"],
        "scale_residual_init": False,
        "head_transform": False,
        "head_bias": False,
        "next_sentence": False,
    }


def write_settings(config: TransformerConfig) -> dict[str, Any]:
    """Values of a config.json that say a config's fields."""
    return {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_length,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "dim": config.embed_dim,
        "hidden_dim": config.hidden_dim,
        "dropout": config.dropout_rate,
        "attention_dropout": config.attention_dropout_rate,
        "activation": inverse(PLAIN_ACTIVATIONS, config.activation),
        "initializer_range": config.init_stddev,
        "tie_word_embeddings": config.tie_embeddings,
    }


DISTILBERT = Family(
    model_type="distilbert",
    preset="distilbert",
    prefix="distilbert.",
    defaults=DEFAULTS,
    body=BODY,
    heads=(
        Head("DistilBertForMaskedLM", rules=TRANSFORM, fields=bert.MASKED_HEAD),
        Head(
            "DistilBertForSequenceClassification",
            rules=(*linear("pooler", "pre_classifier"), *linear("classifier", "classifier")),
            task={"task": "classification", "pooler": "relu"},
            dropout=("seq_classif_dropout",),
        ),
        Head(
            "DistilBertForTokenClassification",
            rules=linear("classifier", "classifier"),
            task={"task": "tagging"},
            dropout=("dropout",),
        ),
        Head(
            "DistilBertForQuestionAnswering",
            rules=linear("classifier", "qa_outputs"),
            task={"task": "answers"},
            dropout=("qa_dropout",),
        ),
        Head("DistilBertModel", is_body=True),
    ),
    read_fields=read_fields,
    write_settings=write_settings,
    buffers=(r"distilbert\.embeddings\.position_ids",),
    duplicates={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
)
