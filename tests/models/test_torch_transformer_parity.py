"""PyTorch's nn.Transformer with random weights, read by a key map of our own, is the same function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.models import encoder_decoder

torch = pytest.importorskip("torch", reason="needs the extra parity (torch)")

pytestmark = pytest.mark.parity

VOCAB_SIZE, WIDTH, HEADS, HIDDEN, ENCODER_LAYERS, DECODER_LAYERS = 31, 20, 5, 44, 3, 2
LENGTHS = (9, 4, 6)


@pytest.fixture(scope="module")
def reference():
    """As published: without the norms that nn.Transformer adds behind its stacks. All weights are drawn."""
    torch.manual_seed(0)
    sizes = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": HIDDEN, "dropout": 0.1, "batch_first": True}
    encoder_layer = torch.nn.TransformerEncoderLayer(**sizes, activation="relu", norm_first=False)
    decoder_layer = torch.nn.TransformerDecoderLayer(**sizes, activation="relu", norm_first=False)
    model = torch.nn.Transformer(
        d_model=WIDTH,
        nhead=HEADS,
        batch_first=True,
        custom_encoder=torch.nn.TransformerEncoder(encoder_layer, ENCODER_LAYERS, enable_nested_tensor=False),
        custom_decoder=torch.nn.TransformerDecoder(decoder_layer, DECODER_LAYERS),
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_scale = "norm" in name and name.endswith("weight")
            weight.copy_(torch.randn_like(weight) * 0.3 + float(is_scale))
    return model.eval()


@pytest.fixture(scope="module")
def ours(reference):
    model = encoder_decoder(
        vocab_size=VOCAB_SIZE,
        num_layers=DECODER_LAYERS,
        num_encoder_layers=ENCODER_LAYERS,
        embed_dim=WIDTH,
        num_heads=HEADS,
        mlp_dim=HIDDEN,
        norm_epsilon=1e-5,
        dropout_rate=0.1,
    )
    table = np.random.default_rng(0).normal(size=(VOCAB_SIZE, WIDTH)).astype(np.float32) * 0.3
    params = params_of(reference.state_dict())
    return model, {"token_embedding": {"embedding": table}, **params}


def params_of(state):
    state = {name: weight.numpy() for name, weight in state.items()}

    def side(name, depth, attentions):
        """``attentions``: ours by theirs; norms are numbered in the order of the sub-layers."""

        def stacked(key):
            return np.stack([state[f"{name}.layers.{i}.{key}"] for i in range(depth)])

        def dense(key):
            return {"kernel": stacked(f"{key}.weight").swapaxes(1, 2), "bias": stacked(f"{key}.bias")}

        def attention(key):
            kernels = np.split(stacked(f"{key}.in_proj_weight").swapaxes(1, 2), 3, axis=2)
            biases = np.split(stacked(f"{key}.in_proj_bias"), 3, axis=1)
            parts = zip(("query", "key", "value"), kernels, biases)
            joint = {part: {"kernel": kernel, "bias": bias} for part, kernel, bias in parts}
            return {**joint, "out": dense(f"{key}.out_proj")}

        norms = [f"{own}_norm" for own in (*attentions, "mlp")]
        return {
            "layers": {
                **{own: attention(key) for own, key in attentions.items()},
                "mlp": {"up": dense("linear1"), "down": dense("linear2")},
                **{
                    own: {"scale": stacked(f"norm{i}.weight"), "bias": stacked(f"norm{i}.bias")}
                    for i, own in enumerate(norms, start=1)
                },
            }
        }

    return {
        "encoder": side("encoder", ENCODER_LAYERS, {"attention": "self_attn"}),
        "decoder": side("decoder", DECODER_LAYERS, {"attention": "self_attn", "cross_attention": "multihead_attn"}),
    }


def embedded(table, tokens):
    """Vaswani et al. 2017, sections 3.4 and 3.5."""
    angles = np.arange(tokens.shape[1])[:, None] / 10_000 ** (np.arange(0, WIDTH, 2) / WIDTH)
    positions = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(-1, WIDTH)
    return torch.tensor(table[tokens] * np.sqrt(WIDTH) + positions, dtype=torch.float32)


def test_outputs_are_equal(reference, ours):
    model, params = ours
    draw = np.random.default_rng(1)
    source, target = draw.integers(VOCAB_SIZE, size=(3, 9)), draw.integers(VOCAB_SIZE, size=(3, 7))
    real = np.arange(9) < np.array(LENGTHS)[:, None]
    table = params["token_embedding"]["embedding"]
    with torch.inference_mode():
        expected = reference(
            embedded(table, source),
            embedded(table, target),
            tgt_mask=torch.nn.Transformer.generate_square_subsequent_mask(7),
            tgt_is_causal=True,
            src_key_padding_mask=torch.tensor(~real),
            memory_key_padding_mask=torch.tensor(~real),
        ).numpy()
    tree = jax.tree.map(jnp.asarray, params)
    drawn = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.asarray(target), source=jnp.asarray(source)))
    assert jax.tree.map(jnp.shape, tree) == jax.tree.map(lambda leaf: leaf.shape, drawn["params"])
    given = {"source": jnp.asarray(source), "source_mask": jnp.asarray(real)}
    hidden, _ = model.apply({"params": tree}, jnp.asarray(target), **given, method="hidden")
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(hidden, expected, atol=1e-5, rtol=0)
    logits = model.apply({"params": tree}, jnp.asarray(target), **given).logits
    np.testing.assert_allclose(logits, expected @ table.T, atol=1e-4, rtol=0)
