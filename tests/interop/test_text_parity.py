"""Text that imported models write, greedily and by beams, is that of transformers."""

import numpy as np
import pytest
from pretrained_cases import GPT2, LLAMA, PAD, T5, VOCAB, Case, make_reference

from jaxformer.inference import beam_search, generate
from jaxformer.interop import load_pretrained

torch = pytest.importorskip("torch", reason="needs the extra parity (torch)")
pytest.importorskip("transformers", reason="needs the extra parity (transformers)")

pytestmark = pytest.mark.parity

CASES = (
    Case("GPT2LMHeadModel", "GPT2Config", GPT2),
    Case("T5ForConditionalGeneration", "T5Config", T5, label="T5 1.0"),
    Case(
        "T5ForConditionalGeneration",
        "T5Config",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        label="T5 1.1",
    ),
    Case("LlamaForCausalLM", "LlamaConfig", LLAMA),
)
PROMPTS = [[5, 6, 7, 8, 9, 10], [50, 40, 30], [60]]
NEW = 12


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request, tmp_path_factory):
    reference = make_reference(request.param)
    if request.param.name == "GPT2LMHeadModel":  # strong positions keep the text from repeating one token
        with torch.no_grad():
            reference.transformer.wpe.weight.mul_(10)
    if request.param.label == "T5 1.1":  # and so do strong tokens under a head of its own
        with torch.no_grad():
            reference.shared.weight.mul_(20)
    folder = tmp_path_factory.mktemp("pretrained")
    reference.save_pretrained(folder)
    return reference, *load_pretrained(folder)[:2]


def their_text(reference, num_beams):
    length = max(map(len, PROMPTS))
    tokens = torch.tensor([[PAD] * (length - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    # Nothing ends a text, so that all have as many tokens here and there.
    reference.generation_config.eos_token_id = None
    with torch.inference_mode():
        out = reference.generate(
            tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, num_beams=num_beams, pad_token_id=PAD
        )
    return out.numpy()[:, -NEW:]


def our_text(model, params, num_beams):
    is_pair = model.config.architecture == "encoder_decoder"
    inputs = {"sources": PROMPTS} if is_pair else {}
    starts = [[PAD]] * len(PROMPTS) if is_pair else PROMPTS
    if num_beams == 1:
        return generate(model, params, starts, max_new_tokens=NEW, **inputs)
    found = beam_search(model, params, starts, max_new_tokens=NEW, eos_id=None, num_beams=num_beams, **inputs)
    return found.tokens[:, 0]


@pytest.mark.parametrize("num_beams", [1, 3])
def test_text_is_equal(pair, num_beams):
    reference, model, params = pair
    expected = their_text(reference, num_beams)
    assert expected.max() < VOCAB
    assert len(np.unique(expected)) > 3
    np.testing.assert_array_equal(our_text(model, params, num_beams), expected)
