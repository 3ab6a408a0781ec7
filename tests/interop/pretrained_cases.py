"""Models of transformers with random weights and odd sizes, and batches for them."""

import dataclasses
from typing import Any

import numpy as np

VOCAB, LONGEST, PAD = 61, 37, 1

GPT2 = {
    "vocab_size": VOCAB,
    "n_layer": 3,
    "n_embd": 20,
    "n_head": 5,
    "n_positions": LONGEST,
    "n_inner": 44,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "layer_norm_epsilon": 3e-3,
}
BERT = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "hidden_size": 20,
    "num_attention_heads": 5,
    "intermediate_size": 44,
    "max_position_embeddings": LONGEST,
    "type_vocab_size": 3,
    "layer_norm_eps": 3e-3,
    "pad_token_id": PAD,
}
ROBERTA = {
    **BERT,
    "max_position_embeddings": LONGEST + PAD + 1,
    "type_vocab_size": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
DISTILBERT = {
    "vocab_size": VOCAB,
    "n_layers": 3,
    "dim": 20,
    "n_heads": 5,
    "hidden_dim": 44,
    "max_position_embeddings": LONGEST,
    "activation": "relu",
    "pad_token_id": PAD,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 20,
    "d_kv": 6,
    "d_ff": 44,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 5,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "layer_norm_epsilon": 3e-3,
    "pad_token_id": PAD,
    "eos_token_id": 2,
    "decoder_start_token_id": PAD,
}
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": LONGEST,
    "rms_norm_eps": 3e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A class of transformers with its settings.

    Attributes:
      name: of the class.
      kind: of its config's class.
      settings: of the config.
      label: for the test's name.
    """

    name: str
    kind: str
    settings: dict[str, Any]
    label: str = ""

    def __str__(self) -> str:
        return self.label or self.name


CASES = (
    Case("GPT2LMHeadModel", "GPT2Config", GPT2),
    Case(
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT2, "tie_word_embeddings": False, "activation_function": "gelu"},
        label="GPT2 untied",
    ),
    Case("GPT2ForSequenceClassification", "GPT2Config", {**GPT2, "num_labels": 4}),
    Case("GPT2ForTokenClassification", "GPT2Config", {**GPT2, "num_labels": 4}),
    Case("BertForPreTraining", "BertConfig", BERT),
    Case("BertForMaskedLM", "BertConfig", {**BERT, "hidden_act": "gelu_new"}),
    Case("BertForSequenceClassification", "BertConfig", {**BERT, "num_labels": 4}),
    Case("BertForTokenClassification", "BertConfig", {**BERT, "num_labels": 4}),
    Case("BertForQuestionAnswering", "BertConfig", BERT),
    Case("BertModel", "BertConfig", BERT),
    Case("RobertaForMaskedLM", "RobertaConfig", ROBERTA),
    Case("RobertaForSequenceClassification", "RobertaConfig", {**ROBERTA, "num_labels": 1}),
    Case("RobertaForTokenClassification", "RobertaConfig", {**ROBERTA, "num_labels": 4}),
    Case("RobertaForQuestionAnswering", "RobertaConfig", ROBERTA),
    Case("RobertaModel", "RobertaConfig", ROBERTA),
    Case("DistilBertForMaskedLM", "DistilBertConfig", DISTILBERT),
    Case("DistilBertForSequenceClassification", "DistilBertConfig", {**DISTILBERT, "num_labels": 4}),
    Case("DistilBertForTokenClassification", "DistilBertConfig", {**DISTILBERT, "num_labels": 4}),
    Case("DistilBertForQuestionAnswering", "DistilBertConfig", DISTILBERT),
    Case("DistilBertModel", "DistilBertConfig", DISTILBERT),
    Case("T5ForConditionalGeneration", "T5Config", T5, label="T5 1.0"),
    Case(
        "T5ForConditionalGeneration",
        "T5Config",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        label="T5 1.1",
    ),
    Case("LlamaForCausalLM", "LlamaConfig", LLAMA, label="Llama untied"),
    Case(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": None},
        label="Llama tied",
    ),
    Case("LlamaForSequenceClassification", "LlamaConfig", {**LLAMA, "num_labels": 4}),
)


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Tokens [5, LONGEST] and their mask: a whole row, two padded left and two padded right, by 14 and by 30."""
    rng = np.random.default_rng(3)
    tokens = rng.integers(5, VOCAB, size=(5, LONGEST))
    mask = np.ones_like(tokens, bool)
    mask[1, :14] = mask[2, :30] = mask[3, -14:] = mask[4, -30:] = False
    return np.where(mask, tokens, PAD), mask


def positions(mask: np.ndarray) -> np.ndarray:
    """Positions that count real tokens."""
    return np.maximum(np.cumsum(mask, 1) - 1, 0)


def make_reference(case: Case) -> Any:
    """All weights are drawn, biases and norms too: what starts at 0 or 1 would hide a mistake."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, case.name)(getattr(transformers, case.kind)(**case.settings)).eval()
    if case.label == "T5 1.1":  # which this version of transformers ties when it makes one
        model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB, 20))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_scale = weight.ndim == 1 and name.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.3 + float(is_scale))
    return model
