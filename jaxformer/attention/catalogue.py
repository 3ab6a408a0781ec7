"""Every kind of attention by name: the one table that configs, docs, tests and the viewer read."""

from jaxformer.attention.additive import additive_attention, additive_attention_weights, additive_step
from jaxformer.attention.bilinear import bilinear_attention, bilinear_attention_weights, bilinear_step
from jaxformer.attention.cache import dense_step, init_cache
from jaxformer.attention.clustered import clustered_attention, clustered_attention_weights
from jaxformer.attention.compressed import compressed_attention, compressed_attention_weights
from jaxformer.attention.compressed_cache import compressed_step, init_compressed_cache
from jaxformer.attention.concat import concat_attention, concat_attention_weights, concat_step
from jaxformer.attention.dense import dense_attention, dense_attention_weights
from jaxformer.attention.kernel import kernel_attention, kernel_attention_weights, kernel_step
from jaxformer.attention.kinds import AttentionKind
from jaxformer.attention.linear import linear_attention, linear_attention_weights
from jaxformer.attention.linear_cache import init_linear_cache, linear_step
from jaxformer.attention.linformer import linformer_attention, linformer_attention_weights
from jaxformer.attention.local import local_attention, local_attention_weights
from jaxformer.attention.longformer import longformer_attention, longformer_attention_weights
from jaxformer.attention.lsh import lsh_attention, lsh_attention_weights
from jaxformer.attention.lsh_cache import init_lsh_cache, lsh_step
from jaxformer.attention.performer import (
    init_performer_cache,
    performer_attention,
    performer_attention_weights,
    performer_step,
)
from jaxformer.attention.routing import routing_attention, routing_attention_weights
from jaxformer.attention.routing_cache import init_routing_cache, routing_step
from jaxformer.attention.shared_query_key import (
    shared_query_key_attention,
    shared_query_key_attention_weights,
    shared_query_key_step,
)
from jaxformer.attention.sinkhorn import sinkhorn_attention, sinkhorn_attention_weights
from jaxformer.attention.sparse import sparse_attention, sparse_attention_weights
from jaxformer.attention.sparse_cache import init_local_cache, init_sparse_cache, local_step, sparse_step

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
    "routing": AttentionKind(
        name="routing",
        function=routing_attention,
        weights=routing_attention_weights,
        init_cache=init_routing_cache,
        step=routing_step,
        cost="O(T C + C window²) time, O(T C + C window) memory, for C clusters",
        arguments=("centroids",),
        paper='Roy et al. 2021, "Efficient Content-Based Sparse Attention with Routing Transformers", arXiv:2003.05997',
        summary="each query sees the keys that are routed to its clusters",
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
    "sparse": AttentionKind(
        name="sparse",
        function=sparse_attention,
        weights=sparse_attention_weights,
        init_cache=init_sparse_cache,
        step=sparse_step,
        cost="O(pairs of the pattern) time, O(T) memory",
        grouped_heads=True,
        segments=True,
        scale=True,
        dropout=True,
        paper='Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509',
        summary="each query sees the keys that a pattern names",
    ),
    "local": AttentionKind(
        name="local",
        function=local_attention,
        weights=local_attention_weights,
        init_cache=init_local_cache,
        step=local_step,
        cost="O(T window) time, O(T) memory",
        grouped_heads=True,
        segments=True,
        scale=True,
        dropout=True,
        packing=True,
        paper='Beltagy et al. 2020, "Longformer: The Long-Document Transformer", arXiv:2004.05150',
        summary="each query sees a window of neighbours",
    ),
    "longformer": AttentionKind(
        name="longformer",
        function=longformer_attention,
        weights=longformer_attention_weights,
        cost="O(T (window + global tokens)) time, O(T) memory",
        grouped_heads=True,
        segments=True,
        scale=True,
        dropout=True,
        arguments=("global_query", "global_key", "global_value"),
        paper='Beltagy et al. 2020, "Longformer: The Long-Document Transformer", arXiv:2004.05150',
        summary="each query sees a window of neighbours and the global tokens, which see all",
    ),
    "sinkhorn": AttentionKind(
        name="sinkhorn",
        function=sinkhorn_attention,
        weights=sinkhorn_attention_weights,
        cost="O(T block_size + T² / block_size) time, O(T block_size + (T / block_size)²) memory",
        causal=True,
        grouped_heads=True,
        scale=True,
        arguments=("block_scores",),
        paper='Tay et al. 2020, "Sparse Sinkhorn Attention", arXiv:2002.11296',
        summary="each query sees its own block and one that a learned soft permutation brings to it",
    ),
    "shared_query_key": AttentionKind(
        name="shared_query_key",
        function=shared_query_key_attention,
        weights=shared_query_key_attention_weights,
        init_cache=init_cache,
        step=shared_query_key_step,
        cost="O(T²) time, O(T) memory",
        segments=True,
        packing=True,
        shared_query_key=True,
        paper='Kitaev et al. 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451',
        summary="each token sees all others that masks allow, and itself if there is none",
    ),
    "clustered": AttentionKind(
        name="clustered",
        function=clustered_attention,
        weights=clustered_attention_weights,
        cost="O(num_clusters (T + S) + T top_k) time, O(num_clusters (T + S)) memory",
        causal=False,
        cross=True,
        grouped_heads=True,
        scale=True,
        arguments=("hash_planes",),
        paper='Vyas et al. 2020, "Fast Transformers with Clustered Attention", arXiv:2007.04825',
        summary="each query uses the weights of the mean of the queries like it",
    ),
    "bilinear": AttentionKind(
        name="bilinear",
        function=bilinear_attention,
        weights=bilinear_attention_weights,
        init_cache=init_cache,
        step=bilinear_step,
        cost="O(T S) time, O(T + S) memory",
        cross=True,
        grouped_heads=True,
        positions=True,
        segments=True,
        packing=True,
        arguments=("kernel",),
        paper=(
            'Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine Translation", '
            "arXiv:1508.04025"
        ),
        summary="each query sees every key that masks allow, through a learned matrix",
    ),
    "additive": AttentionKind(
        name="additive",
        function=additive_attention,
        weights=additive_attention_weights,
        init_cache=init_cache,
        step=additive_step,
        cost="O(T S M) time, O(T + S) memory",
        cross=True,
        grouped_heads=True,
        segments=True,
        packing=True,
        arguments=("query_kernel", "key_kernel", "score_vector"),
        paper=(
            'Bahdanau et al. 2015, "Neural Machine Translation by Jointly Learning to Align and Translate", '
            "arXiv:1409.0473"
        ),
        summary="each query sees every key that masks allow, scored by a small network",
    ),
    "concat": AttentionKind(
        name="concat",
        function=concat_attention,
        weights=concat_attention_weights,
        init_cache=init_cache,
        step=concat_step,
        cost="O(T S M) time, O(T + S) memory",
        cross=True,
        grouped_heads=True,
        segments=True,
        packing=True,
        arguments=("kernel", "score_vector"),
        paper=(
            'Luong et al. 2015, "Effective Approaches to Attention-based Neural Machine Translation", '
            "arXiv:1508.04025"
        ),
        summary="each query sees every key that masks allow, scored by a small network over both side by side",
    ),
    "kernel": AttentionKind(
        name="kernel",
        function=kernel_attention,
        weights=kernel_attention_weights,
        init_cache=init_cache,
        step=kernel_step,
        cost="O(T S H) time, O(T + S) memory",
        cross=True,
        grouped_heads=True,
        segments=True,
        packing=True,
        paper='Nadaraya 1964, "On Estimating Regression", doi:10.1137/1109020',
        summary="each query sees the keys near it, weighted by a kernel of the distance",
    ),
}
