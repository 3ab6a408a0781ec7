"""Every kind of attention by name: the one table that configs, docs, tests and the viewer read."""

from jaxformer.attention.cache import dense_step, init_cache
from jaxformer.attention.dense import dense_attention, dense_attention_weights
from jaxformer.attention.kinds import AttentionKind
from jaxformer.attention.linformer import linformer_attention, linformer_attention_weights

ATTENTION: dict[str, AttentionKind] = {
    "dense": AttentionKind(
        name="dense",
        function=dense_attention,
        weights=dense_attention_weights,
        init_cache=init_cache,
        step=dense_step,
        cost="O(T S) time, O(T + S) memory",
        causal=True,
        cross=True,
        grouped_heads=True,
        positions=True,
        segments=True,
        mask=True,
        bias=True,
        scale=True,
        dropout=True,
        packing=True,
        paper='Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762',
        summary="each query sees every key that masks allow",
    ),
    "linformer": AttentionKind(
        name="linformer",
        function=linformer_attention,
        weights=linformer_attention_weights,
        cost="O((T + S) rank) time, O((T + S) rank) memory",
        causal=False,
        cross=True,
        grouped_heads=True,
        scale=True,
        arguments=("key_projection",),
        paper='Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768',
        summary="each query sees a few learned mixtures of all keys",
    ),
}
