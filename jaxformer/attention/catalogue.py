"""Every kind of attention by name: the one table that configs, docs, tests and the viewer read."""

from jaxformer.attention.cache import dense_step, init_cache
from jaxformer.attention.compressed import compressed_attention, compressed_attention_weights
from jaxformer.attention.compressed_cache import compressed_step, init_compressed_cache
from jaxformer.attention.dense import dense_attention, dense_attention_weights
from jaxformer.attention.kinds import AttentionKind
from jaxformer.attention.linear import linear_attention, linear_attention_weights
from jaxformer.attention.linear_cache import init_linear_cache, linear_step
from jaxformer.attention.linformer import linformer_attention, linformer_attention_weights
from jaxformer.attention.lsh import lsh_attention, lsh_attention_weights
from jaxformer.attention.lsh_cache import init_lsh_cache, lsh_step
from jaxformer.attention.performer import (
    init_performer_cache,
    performer_attention,
    performer_attention_weights,
    performer_step,
)

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
    "lsh": AttentionKind(
        name="lsh",
        function=lsh_attention,
        weights=lsh_attention_weights,
        init_cache=init_lsh_cache,
        step=lsh_step,
        cost="O(T num_hashes (chunk_size + num_buckets)) time, O(T num_hashes) memory",
        shared_query_key=True,
        arguments=("rotations",),
        paper='Kitaev et al. 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451',
        summary="each token sees tokens that hash into its bucket",
    ),
    "linear": AttentionKind(
        name="linear",
        function=linear_attention,
        weights=linear_attention_weights,
        init_cache=init_linear_cache,
        step=linear_step,
        cost="O(T + S) time, O(T + S) memory, O(1) a decoded token",
        cross=True,
        grouped_heads=True,
        segments=True,
        packing=True,
        paper='Katharopoulos et al. 2020, "Transformers are RNNs", arXiv:2006.16236',
        summary="each query sees every key, weighted by a product of features whose sum over keys is taken once",
    ),
    "performer": AttentionKind(
        name="performer",
        function=performer_attention,
        weights=performer_attention_weights,
        init_cache=init_performer_cache,
        step=performer_step,
        cost="O((T + S) num_features) time, O((T + S) num_features) memory, O(num_features) a decoded token",
        cross=True,
        grouped_heads=True,
        segments=True,
        packing=True,
        arguments=("projection",),
        paper='Choromanski et al. 2021, "Rethinking Attention with Performers", arXiv:2009.14794',
        summary="each query sees every key, with softmax weights estimated by random features",
    ),
    "compressed": AttentionKind(
        name="compressed",
        function=compressed_attention,
        weights=compressed_attention_weights,
        init_cache=init_compressed_cache,
        step=compressed_step,
        cost="O(T S / stride) time, O(T S / stride) memory",
        causal=True,
        cross=True,
        grouped_heads=True,
        scale=True,
        paper='Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", arXiv:1801.10198',
        summary="each query sees pooled windows of the keys, and its newest tokens as they are",
    ),
}
