"""Hugging Face's GPT-2 with random weights, read by a key map of our own, is the same function."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.inference import generate
from jaxformer.models import gpt

torch = pytest.importorskip("torch", reason="needs the extra parity (torch)")
transformers = pytest.importorskip("transformers", reason="needs the extra parity (transformers)")

pytestmark = pytest.mark.parity

SIZES = {"vocab_size": 61, "num_layers": 3, "embed_dim": 20, "num_heads": 5, "max_length": 37, "mlp_dim": 44}


@pytest.fixture(scope="module")
def reference():
    """All weights are drawn, biases and norms too: what starts at 0 or 1 would hide a mistake."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=SIZES["vocab_size"],
        n_layer=SIZES["num_layers"],
        n_embd=SIZES["embed_dim"],
        n_head=SIZES["num_heads"],
        n_positions=SIZES["max_length"],
        n_inner=SIZES["mlp_dim"],
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_scale = weight.ndim == 1 and name.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.3 + float(is_scale))
        # Strong positions keep the text from repeating one token.
        model.transformer.wpe.weight.mul_(10)
    return model


@pytest.fixture(scope="module")
def ours(reference):
    return gpt(**SIZES), params_of(reference.state_dict())


def params_of(state):
    state = {name.removeprefix("transformer."): weight.numpy() for name, weight in state.items()}

    def stacked(name):
        return np.stack([state[f"h.{i}.{name}"] for i in range(SIZES["num_layers"])])

    def projection(name):
        return {"kernel": stacked(f"{name}.weight"), "bias": stacked(f"{name}.bias")}

    def norm(name):
        return {"scale": stacked(f"{name}.weight"), "bias": stacked(f"{name}.bias")}

    width = SIZES["embed_dim"]
    joint = projection("attn.c_attn")
    attention = {
        name: {part: array[..., i * width : (i + 1) * width] for part, array in joint.items()}
        for i, name in enumerate(("query", "key", "value"))
    }
    layers = {
        "attention_norm": norm("ln_1"),
        "attention": {**attention, "out": projection("attn.c_proj")},
        "mlp_norm": norm("ln_2"),
        "mlp": {"up": projection("mlp.c_fc"), "down": projection("mlp.c_proj")},
    }
    decoder = {
        "layers": layers,
        "position_embedding": {"embedding": state["wpe.weight"]},
        "final_norm": {"scale": state["ln_f.weight"], "bias": state["ln_f.bias"]},
    }
    return {"token_embedding": {"embedding": state["wte.weight"]}, "decoder": decoder}


def generated_by(reference, tokens, mask, num_tokens):
    with torch.inference_mode():
        out = reference.generate(
            torch.tensor(tokens),
            attention_mask=torch.tensor(mask),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return out[:, len(tokens[0]) :].numpy()


def test_logits_are_equal(reference, ours):
    model, params = ours
    tokens = np.random.default_rng(1).integers(SIZES["vocab_size"], size=(3, SIZES["max_length"]))
    with torch.inference_mode():
        expected = reference(torch.tensor(tokens)).logits.numpy()
    logits = model.apply({"params": params}, jnp.asarray(tokens, jnp.int32)).logits
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


def test_greedy_text_is_equal(reference, ours):
    model, params = ours
    tokens = np.random.default_rng(2).integers(SIZES["vocab_size"], size=(4, 7))
    expected = generated_by(reference, tokens.tolist(), np.ones_like(tokens).tolist(), 23)
    np.testing.assert_array_equal(generate(model, params, tokens, max_new_tokens=23), expected)
    assert len(np.unique(expected)) > 3


def test_greedy_text_of_a_left_padded_batch_is_equal(reference, ours):
    model, params = ours
    prompts = [[5, 6, 7, 8, 9], [5, 6, 7], [60]]
    padded = [[0] * (5 - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (5 - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    expected = generated_by(reference, padded, mask, 23)
    np.testing.assert_array_equal(generate(model, params, prompts, max_new_tokens=23), expected)
