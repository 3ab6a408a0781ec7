"""Tables of attention made from the package's own records and formulas: no figure on these pages is typed."""

import re
from typing import Any

LENGTHS = (1024, 4096, 16384)
NUM_HEADS, HEAD_DIM = 8, 64

# Settings whose cost the tables show; what is not named has its default.
COST_ARGUMENTS: dict[str, dict[str, Any]] = {
    "local": {"window": 255},
    "longformer": {"window": 255, "global_indices": (0,)},
    "dilated": {"window": 127, "dilation": 4},
    "strided": {"stride": 128},
    "fixed": {"stride": 128, "num_summary": 8},
    "bigbird": {"block_size": 64, "num_random": 3, "seed": 0},
    "random_blocks": {"num": 3, "seed": 0},
    "global_tokens": {"indices": (0, 1, 2, 3)},
    "lsh": {"num_hashes": 4, "num_buckets": 64, "chunk_size": 64},
    "routing": {"num_clusters": 32, "window": 128},
    "sinkhorn": {"block_size": 64},
    "clustered": {"num_clusters": 100, "top_k": 32},
    "linformer": {"rank": 256},
    "compressed": {"stride": 4},
    "performer": {"num_features": 256},
}
NO_ENTRY = ("sparse",)  # has the cost of the pattern it is given


def facts(name: str) -> str:
    """What the record of a kind or of a pattern says, as a table."""
    from jaxformer.attention import ATTENTION, PATTERNS

    rows = pattern_facts(PATTERNS[name]) if name in PATTERNS else kind_facts(ATTENTION[name])
    return "\n".join([f"| `{name}` | |", "|---|---|", *(f"| {title} | {text} |" for title, text in rows)])


def kind_facts(kind: Any) -> list[tuple[str, str]]:
    """Title and Markdown of each row."""
    decoding = "none: it can't decode"
    if kind.decodes:
        decoding = f"{entry(kind.init_cache.__name__)}, {entry(kind.step.__name__)}"
    return [
        ("what it is", f"{kind.summary}"),
        ("functions", f"{entry(kind.function.__name__)}; its matrix: {entry(kind.weights.__name__)}"),
        ("cost", kind.cost),
        ("causal", "yes" if kind.causal else "no, refused"),
        ("keys of other tokens (cross-attention)", "yes" if kind.cross else "no, self-attention only"),
        ("fewer key heads than query heads", "yes" if kind.grouped_heads else "no"),
        ("packed documents are as alone", "yes" if kind.packing else "no: one document a row"),
        ("arrays beside query, key, value", ", ".join(f"`{name}`" for name in kind.arguments) or "none"),
        ("decoding", decoding),
        ("paper", paper(kind.paper)),
    ]


def pattern_facts(pattern: Any) -> list[tuple[str, str]]:
    """Title and Markdown of each row."""
    name = pattern.constructor.__name__
    return [
        ("what it is", pattern.summary),
        ("constructor", f"[`patterns.{name}`][jaxformer.attention.patterns.{name}]"),
        ("cost", pattern.cost),
        ("packed documents are as alone", "yes" if pattern.packing else "no: one document a row"),
        ("paper", paper(pattern.paper)),
    ]


def entry(name: str) -> str:
    """A link to a function's reference."""
    return f"[`{name}`][jaxformer.attention.{name}]"


def paper(text: str) -> str:
    """The number of a paper as a link to it."""
    text = re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return re.sub(r"doi:(\S+)", r"[doi:\1](https://doi.org/\1)", text)


def costs(*names: str) -> str:
    """Operations, memory and decoding of kinds or patterns beside dense attention, by the package's formulas."""
    head = [
        *(f"{length:,}" for length in LENGTHS),
        "temporaries",
        "fewer operations than dense from",
        "decoding reads",
        "cache",
    ]
    lines = ["| attention | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    lines += [cost_row(name) for name in dict.fromkeys(["dense", *names])]
    caption = (
        f"Forward pass of one layer, {NUM_HEADS} heads of {HEAD_DIM}, one row, causal where the kind can be, bfloat16: "
        f"operations at {', '.join(f'{length:,}' for length in LENGTHS)} tokens; then, at {LENGTHS[-1]:,} tokens, "
        "memory beside inputs and output, the length from which on the forward pass needs fewer operations than dense "
        "attention, the bytes that one decoding step moves, its cache. By `attention_cost`; operations are not time."
    )
    return "\n".join([*lines, "", caption])


def cost_row(name: str) -> str:
    """One line of the table of costs."""
    from jaxformer.analysis import attention_cost, overtaking_length
    from jaxformer.attention import ATTENTION, PATTERNS

    causal = (PATTERNS[name] if name in PATTERNS else ATTENTION[name]).causal
    arguments = COST_ARGUMENTS.get(name, {})
    sizes = {"causal": causal, "dtype": "bfloat16", **arguments}
    all_costs = [attention_cost(name, 1, length, NUM_HEADS, HEAD_DIM, **sizes) for length in LENGTHS]
    last = all_costs[-1]
    overtakes = "" if name == "dense" else overtaking_length(name, NUM_HEADS, HEAD_DIM, causal=causal, **arguments)
    cells = [
        setting(name, arguments),
        *(number(cost.forward.total) for cost in all_costs),
        number(last.forward.temporary_bytes, "B"),
        "never" if overtakes is None else f"{overtakes:,}" if overtakes else "",
        number(last.decode.moved_bytes, "B") if last.decode else "can't",
        number(last.cache_bytes, "B") if last.cache_bytes is not None else "",
    ]
    return "| " + " | ".join(cells) + " |"


def setting(name: str, arguments: dict[str, Any]) -> str:
    """A kind with its arguments."""
    return f"`{name}`" + (f" {', '.join(f'{key} {value}' for key, value in arguments.items())}" if arguments else "")


def scales(*head_dims: str) -> str:
    """What `logit_statistics` measures with and without the factor, for some sizes of a head."""
    import jax

    from jaxformer.attention import logit_statistics

    lines = ["| head_dim | variance of logits | largest weight | gradient |", "|---|---|---|---|"]
    for head_dim in map(int, head_dims):
        bare, divided = (logit_statistics(jax.random.key(0), head_dim, scale=scale) for scale in (1.0, None))
        pairs = [f"{float(left):.3g}, {float(right):.3g}" for left, right in zip(bare, divided)]
        lines.append(f"| {head_dim} | " + " | ".join(pairs) + " |")
    return "\n".join(lines)


def number(value: float, unit: str = "") -> str:
    """Three digits and a prefix: of 1,024 for bytes, of 1,000 otherwise."""
    base, infix = (1024, "i") if unit else (1000, "")
    for prefix in ("", "k", "M", "G"):
        if value < base or prefix == "G":
            break
        value /= base
    prefix = prefix.upper() + infix if prefix and unit else prefix
    return f"{value:.3g} {prefix}{unit}".rstrip() if value < 1000 else f"{value:,.0f} {prefix}{unit}".rstrip()


def catalogue(_: str) -> str:
    """All kinds and patterns, a line each, with the page that tells of them."""
    from jaxformer.attention import ATTENTION, PATTERNS

    lines = ["| attention | each query | causal | decodes | cost |", "|---|---|---|---|---|"]
    for name, record in {**ATTENTION, **PATTERNS}.items():
        causal = "yes" if record.causal else "no"
        decodes = "yes" if name in PATTERNS or record.decodes else "no"
        sees = record.summary.removeprefix("each query ")
        lines.append(f"| [`{name}`]({PAGES[name]}.md#{name}) | {sees} | {causal} | {decodes} | {record.cost} |")
    return "\n".join(lines)


# The page, in docs/attention, with a section on each kind and pattern.
PAGES: dict[str, str] = {
    **dict.fromkeys(("kernel", "additive", "concat", "bilinear"), "origins"),
    **dict.fromkeys(("dense",), "dense"),
    **dict.fromkeys(("local", "longformer", "sparse", "dilated", "strided", "fixed", "global_tokens"), "sparse"),
    **dict.fromkeys(("random_blocks", "bigbird"), "sparse"),
    **dict.fromkeys(("lsh", "shared_query_key", "routing"), "hashed"),
    **dict.fromkeys(("sinkhorn", "clustered"), "sorted"),
    **dict.fromkeys(("linformer", "compressed"), "low_rank"),
    **dict.fromkeys(("linear", "performer"), "linear"),
}
