"""RoBERTa's checkpoints: BERT's names for the body, positions that begin behind the padding id, heads of its own."""

from typing import Any

from jaxformer.interop import bert
from jaxformer.interop.errors import PretrainedError
from jaxformer.interop.family import Family, Head
from jaxformer.interop.rules import Rule, linear, norm
from jaxformer.interop.settings import Settings
from jaxformer.models import TransformerConfig

DEFAULTS: dict[str, Any] = {**bert.DEFAULTS, "vocab_size": 50265, "pad_token_id": 1}

TRANSFORM = (
    *linear("head_transform", "lm_head.dense"),
    *norm("head_norm", "lm_head.layer_norm"),
    Rule("head_bias/bias", "lm_head.bias"),
    Rule("output_head/kernel", "lm_head.decoder.weight", transposed=True),
)


def read_fields(settings: Settings) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` that a config.json says, without those of a head.

    The table has a row for each position behind the padding id, which real tokens never read below.
    """
    settings.only("hidden_act", "gelu", reason="the head over the vocabulary has an exact GELU, whatever the body has")
    pad = settings["pad_token_id"]
    if not isinstance(pad, int) or pad < 0:
        raise PretrainedError(f"config.json has pad_token_id={pad!r}, must be an id: positions begin behind it")
    return {
        **bert.read_fields(settings),
        "max_length": settings["max_position_embeddings"] - pad - 1,
        "position_offset": pad + 1,
        "positions_skip_padding": True,
    }


def write_settings(config: TransformerConfig) -> dict[str, Any]:
    """Values of a config.json that say a config's fields."""
    return {**bert.write_settings(config), "pad_token_id": config.position_offset - 1}


ROBERTA = Family(
    model_type="roberta",
    preset="roberta",
    prefix="roberta.",
    defaults=DEFAULTS,
    body=bert.encoder_rules("roberta."),
    heads=(
        Head("RobertaForMaskedLM", rules=TRANSFORM, fields=bert.MASKED_HEAD),
        Head(
            "RobertaForSequenceClassification",
            rules=(*linear("pooler", "classifier.dense"), *linear("classifier", "classifier.out_proj")),
            task={"task": "classification", "pooler": "tanh"},
            dropout=bert.TASK_DROPOUT,
        ),
        Head(
            "RobertaForTokenClassification",
            rules=linear("classifier", "classifier"),
            task={"task": "tagging"},
            dropout=bert.TASK_DROPOUT,
        ),
        Head("RobertaForQuestionAnswering", rules=linear("classifier", "qa_outputs"), task={"task": "answers"}),
        Head(
            "RobertaModel",
            rules=linear("pooler", "roberta.pooler.dense"),
            fields={"next_sentence": True},
            is_body=True,
        ),
    ),
    read_fields=read_fields,
    write_settings=write_settings,
    buffers=(r"roberta\.embeddings\.(position_ids|token_type_ids)",),
    duplicates={"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight"},
    copies={"lm_head.decoder.bias": "lm_head.bias"},
    renamed=bert.BERT.renamed,
)
