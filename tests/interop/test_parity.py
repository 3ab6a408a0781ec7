"""Checkpoints that transformers writes are the same functions here, and those written here the same there."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrained_cases import CASES, PAD, VOCAB, batch, make_reference, positions

from jaxformer.interop import load_pretrained, save_pretrained
from jaxformer.models import TaskModel

torch = pytest.importorskip("torch", reason="needs the extra parity (torch)")
transformers = pytest.importorskip("transformers", reason="needs the extra parity (transformers)")

pytestmark = pytest.mark.parity

TOKENS, MASK = batch()
TYPES = np.random.default_rng(4).integers(3, size=TOKENS.shape)
TARGETS = np.random.default_rng(5).integers(5, VOCAB, size=(len(TOKENS), 9))
TARGET_MASK = MASK[:, [0, 1, 2, 15, 16, 17, 18, -2, -1]]
# Where the first token is padding there: here it is the first real one.
FROM_THE_FIRST = [0, 3, 4]


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request, tmp_path_factory):
    reference = make_reference(request.param)
    folder = tmp_path_factory.mktemp("pretrained")
    reference.save_pretrained(folder)
    if request.param.label == "T5 1.1":  # as published: untied, and nothing says that logits are not scaled
        values = json.loads((folder / "config.json").read_text())
        del values["scale_decoder_outputs"]
        (folder / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": False}))
    model, params, tokenizer = load_pretrained(folder)
    assert tokenizer is None
    return request.param, reference, folder, model, params


def is_body(case):
    return case.name.endswith("Model") and not case.name.endswith("HeadModel")


def their_outputs(case, reference):
    """What the reference says of the batch: arrays whose last axis is scored, by name."""
    inputs = {"input_ids": torch.tensor(TOKENS), "attention_mask": torch.tensor(MASK.astype(int))}
    if case.kind in ("GPT2Config", "LlamaConfig"):
        inputs["position_ids"] = torch.tensor(positions(MASK))
    if case.kind == "BertConfig":
        inputs["token_type_ids"] = torch.tensor(TYPES)
    if case.kind == "T5Config":
        inputs |= {
            "decoder_input_ids": torch.tensor(TARGETS),
            "decoder_attention_mask": torch.tensor(TARGET_MASK.astype(int)),
        }
    out = reference(**inputs)
    if case.name.endswith("QuestionAnswering"):
        return {"tokens": torch.stack([out.start_logits, out.end_logits], -1)}
    if case.name.endswith("SequenceClassification"):
        return {"texts": out.logits}
    if is_body(case):
        pooled = getattr(out, "pooler_output", None)
        return {"tokens": out.last_hidden_state} | ({} if pooled is None else {"texts": pooled})
    if case.name == "BertForPreTraining":
        return {"tokens": out.prediction_logits, "texts": out.seq_relationship_logits}
    return {"tokens": out.logits}


def our_outputs(case, model, params):
    """The same here."""
    tokens = TARGETS if case.kind == "T5Config" else TOKENS
    inputs = {"key_mask": jnp.asarray(TARGET_MASK if case.kind == "T5Config" else MASK)}
    if case.kind in ("GPT2Config", "LlamaConfig"):
        inputs["positions"] = jnp.asarray(positions(MASK), jnp.int32)
    if case.kind == "BertConfig":
        inputs["token_types"] = jnp.asarray(TYPES, jnp.int32)
    if case.kind == "T5Config":
        inputs |= {"source": jnp.asarray(TOKENS, jnp.int32), "source_mask": jnp.asarray(MASK)}

    def apply(method=None):
        return model.apply({"params": params}, jnp.asarray(tokens, jnp.int32), **inputs, method=method)

    if is_body(case):
        pooled = {"texts": apply("pooled")} if model.config.next_sentence else {}
        return {"tokens": apply("hidden")[0], **pooled}
    out = apply()
    if isinstance(model, TaskModel) and case.name.endswith("SequenceClassification"):
        return {"texts": out.logits.reshape(len(TOKENS), -1)}
    following = {"texts": out.next_sentence} if getattr(out, "next_sentence", None) is not None else {}
    return {"tokens": out.logits, **following}


def scored(case, name):
    """The entries of an output that are compared."""
    if name == "tokens":
        return TARGET_MASK if case.kind == "T5Config" else MASK
    return np.arange(len(TOKENS)) if case.kind in ("GPT2Config", "LlamaConfig") else np.array(FROM_THE_FIRST)


def loss_of(outputs, case, logsumexp, mean):
    """Cross-entropy of class 0 (of a single output: its square), averaged over what is compared."""
    total = 0.0
    for name, output in outputs.items():
        chosen = output[scored(case, name)]
        total += mean(chosen**2) if chosen.shape[-1] == 1 else mean(logsumexp(chosen) - chosen[..., 0])
    return total


def test_outputs_and_gradients_are_equal(pair):
    case, reference, _, model, params = pair
    expected = their_outputs(case, reference)
    reference.zero_grad()
    loss_of(expected, case, lambda x: torch.logsumexp(x, -1), torch.mean).backward()
    gradient = reference.get_input_embeddings().weight.grad.numpy()

    @jax.jit
    def run(table):
        def loss(table):
            outputs = our_outputs(case, model, {**params, "token_embedding": {"embedding": table}})
            return loss_of(outputs, case, lambda x: jax.nn.logsumexp(x, -1), jnp.mean), outputs

        return jax.grad(loss, has_aux=True)(table)

    our_gradient, outputs = run(params["token_embedding"]["embedding"])
    assert set(outputs) == set(expected)
    for name, output in outputs.items():
        theirs = expected[name].detach().numpy()
        assert np.abs(theirs).max() > 0.3
        where = scored(case, name)
        np.testing.assert_allclose(np.asarray(output)[where], theirs[where], atol=1e-4, rtol=0)
    assert np.abs(gradient).max() > 1e-3
    np.testing.assert_allclose(our_gradient, gradient, atol=1e-3, rtol=0)


def read_tensors(folder):
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("like", [False, True], ids=["anew", "like"])
def test_an_exported_folder_is_the_same_model_and_the_same_bytes(pair, tmp_path, like):
    case, reference, folder, model, params = pair
    save_pretrained(tmp_path / "out", model, params, like=folder if like else None)
    ours, theirs = read_tensors(tmp_path / "out"), read_tensors(folder)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].tobytes() == tensor.tobytes(), name
    again, report = type(reference).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    again.config.pad_token_id = PAD  # a tokenizer tells it, of which there is none here
    with torch.inference_mode():
        outputs, expected = their_outputs(case, again.eval()), their_outputs(case, reference)
    for name, output in expected.items():
        np.testing.assert_allclose(outputs[name].numpy(), output.numpy(), atol=1e-6, rtol=0)
