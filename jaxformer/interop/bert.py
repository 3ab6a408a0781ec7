"""BERT's checkpoints: the body, the pooler, and the heads of masked tokens, of sentence pairs and of tasks."""

from typing import Any

from jaxformer.interop.family import Family, Head
from jaxformer.interop.rules import Rule, linear, norm, table
from jaxformer.interop.settings import PLAIN_ACTIVATIONS, Settings, inverse
from jaxformer.models import TransformerConfig

DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "max_position_embeddings": 512,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}

TRANSFORM = (
    *linear("head_transform", "cls.predictions.transform.dense"),
    *norm("head_norm", "cls.predictions.transform.LayerNorm"),
    Rule("head_bias/bias", "cls.predictions.bias"),
    Rule("output_head/kernel", "cls.predictions.decoder.weight", transposed=True),
)
POOLER = linear("pooler", "bert.pooler.dense")
SENTENCES = (*POOLER, *linear("next_sentence_head", "cls.seq_relationship"))
MASKED_HEAD = {"head_transform": True, "head_bias": True}
TASK_DROPOUT = ("classifier_dropout", "hidden_dropout_prob")


def encoder_rules(prefix: str) -> tuple[Rule, ...]:
    """The body of BERT and of those that keep its names, under their own prefix."""
    layer = f"{prefix}encoder.layer.{{}}."
    return (
        *table("token_embedding", f"{prefix}embeddings.word_embeddings"),
        *table("token_type_embedding", f"{prefix}embeddings.token_type_embeddings"),
        *table("encoder/position_embedding", f"{prefix}embeddings.position_embeddings"),
        *norm("encoder/embedding_norm", f"{prefix}embeddings.LayerNorm"),
        *linear("encoder/layers/attention/query", f"{layer}attention.self.query"),
        *linear("encoder/layers/attention/key", f"{layer}attention.self.key"),
        *linear("encoder/layers/attention/value", f"{layer}attention.self.value"),
        *linear("encoder/layers/attention/out", f"{layer}attention.output.dense"),
        *norm("encoder/layers/attention_norm", f"{layer}attention.output.LayerNorm"),
        *linear("encoder/layers/mlp/up", f"{layer}intermediate.dense"),
        *linear("encoder/layers/mlp/down", f"{layer}output.dense"),
        *norm("encoder/layers/mlp_norm", f"{layer}output.LayerNorm"),
    )


def read_fields(settings: Settings) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` that a config.json says, without those of a head."""
    settings.only("is_decoder", False, reason="this family has encoders here")
    settings.only("add_cross_attention", False, reason="this family has encoders here")
    settings.only("position_embedding_type", "absolute", reason="its positions are a table here")
    return {
        "architecture": "encoder",
        "vocab_size": settings["vocab_size"],
        "num_layers": settings["num_hidden_layers"],
        "embed_dim": settings["hidden_size"],
        "num_heads": settings["num_attention_heads"],
        "mlp_dim": settings["intermediate_size"],
        "max_length": settings["max_position_embeddings"],
        "positions": "learned",
        "position_offset": 0,
        "positions_skip_padding": False,
        "num_token_types": settings["type_vocab_size"],
        "embedding_norm": True,
        "norm": "layer",
        "norm_placement": "post",
        "norm_epsilon": settings["layer_norm_eps"],
        "activation": settings.choice("hidden_act", PLAIN_ACTIVATIONS),
        "use_bias": True,
        "tie_embeddings": settings["tie_word_embeddings"],
        "attention_scale": None,
        "dropout_rate": settings["hidden_dropout_prob"],
        "attention_dropout_rate": settings["attention_probs_dropout_prob"],
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
        "hidden_size": config.embed_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.hidden_dim,
        "hidden_act": inverse(PLAIN_ACTIVATIONS, config.activation),
        "hidden_dropout_prob": config.dropout_rate,
        "attention_probs_dropout_prob": config.attention_dropout_rate,
        "max_position_embeddings": config.max_length + config.position_offset,
        "position_embedding_type": "absolute",
        "type_vocab_size": config.num_token_types,
        "initializer_range": config.init_stddev,
        "layer_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
    }


BERT = Family(
    model_type="bert",
    preset="bert",
    prefix="bert.",
    defaults=DEFAULTS,
    body=encoder_rules("bert."),
    heads=(
        Head("BertForMaskedLM", rules=TRANSFORM, fields=MASKED_HEAD),
        Head(
            "BertForPreTraining",
            rules=(*TRANSFORM, *SENTENCES),
            fields={**MASKED_HEAD, "next_sentence": True},
            extends="BertForMaskedLM",
        ),
        Head(
            "BertForSequenceClassification",
            rules=(*POOLER, *linear("classifier", "classifier")),
            task={"task": "classification", "pooler": "tanh"},
            dropout=TASK_DROPOUT,
        ),
        Head(
            "BertForTokenClassification",
            rules=linear("classifier", "classifier"),
            task={"task": "tagging"},
            dropout=TASK_DROPOUT,
        ),
        Head("BertForQuestionAnswering", rules=linear("classifier", "qa_outputs"), task={"task": "answers"}),
        Head("BertModel", rules=POOLER, fields={"next_sentence": True}, is_body=True),
    ),
    read_fields=read_fields,
    write_settings=write_settings,
    buffers=(r"bert\.embeddings\.(position_ids|token_type_ids)",),
    duplicates={"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"},
    copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    renamed=((r"\bLayerNorm\.gamma$", "LayerNorm.weight"), (r"\bLayerNorm\.beta$", "LayerNorm.bias")),
)
