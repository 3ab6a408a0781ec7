"""Matrix products of a Transformer's forward pass by formula, without a trace: at once, for any size."""

from collections import Counter

from jaxformer.analysis.cost import attention_cost, formula_arguments
from jaxformer.analysis.experts import feed_forward_cost
from jaxformer.analysis.model_costs.parts import ATTENTION, FEED_FORWARD, HEAD, PROJECTIONS
from jaxformer.models import TransformerConfig
from jaxformer.models.attention_choice import AttentionChoice

# Kinds whose layer multiplies matrices besides: projections of global tokens, clusters that learn, scores of blocks.
_FURTHER_PRODUCTS = ("longformer", "routing", "sinkhorn")


def forward_products(
    config: TransformerConfig, batch_size: int, length: int, source_length: int | None = None
) -> dict[str, int]:
    """Operations of matrix products of one forward pass in training by part, a product and a sum being two.

    A kernel of I inputs and O outputs costs 2 I O operations for each token: in every layer those of queries, keys,
    values and output, and those of the feed-forward layer or of the experts' places; once those of the head. Attention
    costs what `jaxformer.analysis.attention_cost` says. Relative positions, norms and embeddings multiply no matrices.

    Args:
      config: the model's; not one with halting (its unit's product is left out).
      batch_size: rows.
      length: tokens of a row.
      source_length: of an encoder's rows (None = length).

    Returns:
      Operations by part.

    Raises:
      ValueError: an attention that has no formula of its cost, or whose own arrays are made by further products
        (`model_cost` counts these).
    """
    source = length if source_length is None else source_length
    total: Counter[str] = Counter()
    if config.architecture == "encoder_decoder":
        total.update(_side(config.encoder_side, batch_size, source, None, causal=False))
        total.update(_side(config, batch_size, length, source, causal=True))
    else:
        total.update(_side(config, batch_size, length, None, causal=config.architecture == "decoder"))
    width, tokens = config.output_dim, batch_size * length
    total[HEAD] += 2 * tokens * width * ((width if config.head_transform else 0) + config.vocab_rows)
    if config.next_sentence:
        total[HEAD] += 2 * batch_size * width * (width + 2)
    return dict(total)


def _side(config: TransformerConfig, batch: int, length: int, source: int | None, *, causal: bool) -> Counter[str]:
    """The stack of blocks; `source` = keys of the cross-attention, None = there is none."""
    total: Counter[str] = Counter()
    periods = config.num_layers // len(config.attentions)
    for choice, mixture in zip(config.attentions, config.mixtures):
        layer = _attention(config, choice, batch, length, length, causal=causal)
        if source is not None:
            layer.update(_attention(config, config.cross, batch, length, source, causal=False))
        if mixture:
            each = feed_forward_cost(config, length).computed_operations
        else:
            kernels = 3 if config.activation.startswith(("swiglu", "geglu")) else 2
            each = 2 * kernels * config.embed_dim * config.hidden_dim
        layer[FEED_FORWARD] += round(each * batch * length)
        total.update({part: periods * operations for part, operations in layer.items()})
    return total


def _attention(
    config: TransformerConfig, choice: AttentionChoice, batch: int, queries: int, keys: int, *, causal: bool
) -> Counter[str]:
    """One attention sub-layer."""
    if choice.kind.name in _FURTHER_PRODUCTS:
        raise ValueError(
            f"attention={choice.name!r} makes arrays of its own by products that no formula holds; use model_cost."
        )
    query_width = config.num_heads * config.width_of_head
    key_width = config.kv_heads * config.width_of_head
    keys_and_values = 1 if choice.kind.shared_query_key else 2
    cost = attention_cost(
        choice.kind,
        batch,
        queries,
        config.num_heads,
        config.width_of_head,
        num_kv_heads=config.kv_heads,
        key_length=keys,
        causal=causal,
        dtype=config.compute_dtype,
        embed_dim=config.embed_dim,
        param_dtype=config.parameter_dtype,
        **{name: value for name, value in choice.args if name in formula_arguments(choice.kind.name)},
    )
    projected = queries * 2 * query_width + keys * keys_and_values * key_width
    return Counter({PROJECTIONS: 2 * batch * projected * config.embed_dim, ATTENTION: cost.forward.matmul})
