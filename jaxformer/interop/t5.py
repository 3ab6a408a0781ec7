"""T5's checkpoints of both kinds: v1.0 (ReLU, tied scaled logits) and v1.1 or Flan (gated GELU, a head of its own)."""

from typing import Any

from jaxformer.interop.family import Family, Head
from jaxformer.interop.rules import Rule, linear, norm, table
from jaxformer.interop.settings import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS, Settings
from jaxformer.models import TransformerConfig

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_decoder_layers": None,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
    "scale_decoder_outputs": None,
    "n_positions": 512,
}

# A gated GELU without further name is the tanh approximation; an ungated one is exact.
FEED_FORWARD = {
    **PLAIN_ACTIVATIONS,
    "gated-gelu": "geglu_tanh",
    **{f"gated-{theirs}": ours for theirs, ours in GATED_ACTIVATIONS.items() if theirs != "gelu"},
}


def _attention(path: str, name: str) -> tuple[Rule, ...]:
    parts = {"query": "q", "key": "k", "value": "v", "out": "o"}
    return tuple(rule for ours, theirs in parts.items() for rule in linear(f"{path}/{ours}", f"{name}.{theirs}"))


def _side(side: str, mlp: int) -> tuple[Rule, ...]:
    """One of the two stacks; the feed-forward layer is the sub-layer of that number."""
    block = f"{side}.block.{{}}.layer"
    return (
        *table(f"{side}/relative_bias", f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"),
        *norm(f"{side}/layers/attention_norm", f"{block}.0.layer_norm"),
        *_attention(f"{side}/layers/attention", f"{block}.0.SelfAttention"),
        *norm(f"{side}/layers/mlp_norm", f"{block}.{mlp}.layer_norm"),
        *linear(f"{side}/layers/mlp/down", f"{block}.{mlp}.DenseReluDense.wo"),
        *norm(f"{side}/final_norm", f"{side}.final_layer_norm"),
    )


def _feed_forward(gated: bool) -> tuple[Rule, ...]:
    """The projections into the hidden layers of both stacks, which have other names where they are gated."""
    names = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
    return tuple(
        rule
        for side, mlp in (("encoder", 1), ("decoder", 2))
        for ours, theirs in names.items()
        for rule in linear(f"{side}/layers/mlp/{ours}", f"{side}.block.{{}}.layer.{mlp}.DenseReluDense.{theirs}")
    )


BODY = (
    *table("token_embedding", "shared"),
    *_side("encoder", 1),
    *_side("decoder", 2),
    *norm("decoder/layers/cross_attention_norm", "decoder.block.{}.layer.1.layer_norm"),
    *_attention("decoder/layers/cross_attention", "decoder.block.{}.layer.1.EncDecAttention"),
)


def read_fields(settings: Settings) -> dict[str, Any]:
    """Fields of ``TransformerConfig`` that a config.json says.

    Whether logits are scaled stands in ``scale_decoder_outputs``; older files say it by tying, since only tied
    embeddings were scaled.
    """
    scaled = settings["scale_decoder_outputs"]
    return {
        "architecture": "encoder_decoder",
        "vocab_size": settings["vocab_size"],
        "num_layers": settings["num_decoder_layers"] or settings["num_layers"],
        "num_encoder_layers": settings["num_layers"],
        "embed_dim": settings["d_model"],
        "num_heads": settings["num_heads"],
        "head_dim": settings["d_kv"],
        "mlp_dim": settings["d_ff"],
        "max_length": settings["n_positions"],
        "positions": "relative",
        "relative_buckets": settings["relative_attention_num_buckets"],
        "relative_max_distance": settings["relative_attention_max_distance"],
        "norm": "rms",
        "norm_placement": "pre",
        "norm_epsilon": settings["layer_norm_epsilon"],
        "activation": settings.choice("feed_forward_proj", FEED_FORWARD),
        "use_bias": False,
        "tie_embeddings": settings["tie_word_embeddings"],
        "share_embeddings": True,
        "scale_embedding": False,
        "scale_logits": settings["tie_word_embeddings"] if scaled is None else scaled,
        "attention_scale": 1.0,
        "kernel_init": "fan_in",
        "init_stddev": 1.0,
        "scale_residual_init": False,
        "dropout_rate": settings["dropout_rate"],
        "attention_dropout_rate": settings["dropout_rate"],
        "mlp_dropout_rate": settings["dropout_rate"],
        "final_dropout_rate": settings["dropout_rate"],
    }


def write_settings(config: TransformerConfig) -> dict[str, Any]:
    """Values of a config.json that say a config's fields; a head of its own is also told by its tensor."""
    activation = next((theirs for theirs, ours in FEED_FORWARD.items() if ours == config.activation), config.activation)
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.embed_dim,
        "d_kv": config.width_of_head,
        "d_ff": config.hidden_dim,
        "num_layers": config.num_encoder_layers or config.num_layers,
        "num_decoder_layers": config.num_layers,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_max_distance,
        "dropout_rate": config.dropout_rate,
        "layer_norm_epsilon": config.norm_epsilon,
        "feed_forward_proj": activation,
        "tie_word_embeddings": config.tie_embeddings,
        "scale_decoder_outputs": config.scale_logits,
        "n_positions": config.max_length,
        "is_encoder_decoder": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


T5 = Family(
    model_type="t5",
    preset="t5",
    prefix="",
    defaults=DEFAULTS,
    body=BODY,
    gated=_feed_forward(gated=True),
    ungated=_feed_forward(gated=False),
    heads=(
        Head("T5ForConditionalGeneration", rules=(Rule("output_head/kernel", "lm_head.weight", transposed=True),)),
        Head("T5Model", is_body=True),
    ),
    read_fields=read_fields,
    write_settings=write_settings,
    # Relative positions of cross-attention, which very old files have.
    buffers=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    duplicates={"lm_head.weight": "shared.weight"},
    copies={"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"},
    head_unties=True,
    aliases={"hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
)
