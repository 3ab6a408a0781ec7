"""The catalogue of attentions: pure functions on arrays. Needs JAX alone."""

from jaxformer.attention import patterns
from jaxformer.attention.additive import additive_attention, additive_attention_weights, additive_step
from jaxformer.attention.bilinear import bilinear_attention, bilinear_attention_weights, bilinear_step
from jaxformer.attention.bucket_cache import BucketCache
from jaxformer.attention.cache import KeyValueCache, dense_step, init_cache
from jaxformer.attention.catalogue import ATTENTION
from jaxformer.attention.clustered import clustered_attention, clustered_attention_weights
from jaxformer.attention.clusters import draw_hash_planes
from jaxformer.attention.compressed import compressed_attention, compressed_attention_weights
from jaxformer.attention.compressed_cache import compressed_step, init_compressed_cache
from jaxformer.attention.compressed_state import CompressedCache
from jaxformer.attention.concat import concat_attention, concat_attention_weights, concat_step
from jaxformer.attention.dense import dense_attention, dense_attention_weights
from jaxformer.attention.kernel import kernel_attention, kernel_attention_weights, kernel_step
from jaxformer.attention.kinds import AttentionKind
from jaxformer.attention.linear import linear_attention, linear_attention_weights
from jaxformer.attention.linear_cache import LinearCache, init_linear_cache, linear_step
from jaxformer.attention.linformer import linformer_attention, linformer_attention_weights
from jaxformer.attention.local import local_attention, local_attention_weights
from jaxformer.attention.longformer import longformer_attention, longformer_attention_weights
from jaxformer.attention.lsh import lsh_attention, lsh_attention_weights
from jaxformer.attention.lsh_buckets import draw_rotations, lsh_buckets
from jaxformer.attention.lsh_cache import init_lsh_cache, lsh_step
from jaxformer.attention.pattern_kinds import PATTERNS, PatternKind
from jaxformer.attention.performer import (
    init_performer_cache,
    performer_attention,
    performer_attention_weights,
    performer_step,
)
from jaxformer.attention.random_features import draw_features
from jaxformer.attention.routing import routing_attention, routing_attention_weights
from jaxformer.attention.routing_cache import init_routing_cache, routing_step
from jaxformer.attention.routing_clusters import routing_update
from jaxformer.attention.scaling import LogitStatistics, logit_statistics
from jaxformer.attention.shared_query_key import (
    shared_query_key_attention,
    shared_query_key_attention_weights,
    shared_query_key_step,
)
from jaxformer.attention.sinkhorn import sinkhorn_attention, sinkhorn_attention_weights
from jaxformer.attention.sinkhorn_scores import block_summaries, sinkhorn
from jaxformer.attention.sparse import sparse_attention, sparse_attention_weights
from jaxformer.attention.sparse_cache import SparseCache, init_local_cache, init_sparse_cache, local_step, sparse_step
from jaxformer.attention.spectrum import attention_spectrum, effective_rank, rank_for_share

__all__ = [
    "ATTENTION",
    "PATTERNS",
    "AttentionKind",
    "BucketCache",
    "CompressedCache",
    "KeyValueCache",
    "LinearCache",
    "LogitStatistics",
    "PatternKind",
    "SparseCache",
    "additive_attention",
    "additive_attention_weights",
    "additive_step",
    "attention_spectrum",
    "bilinear_attention",
    "bilinear_attention_weights",
    "bilinear_step",
    "block_summaries",
    "clustered_attention",
    "clustered_attention_weights",
    "compressed_attention",
    "compressed_attention_weights",
    "compressed_step",
    "concat_attention",
    "concat_attention_weights",
    "concat_step",
    "dense_attention",
    "dense_attention_weights",
    "dense_step",
    "draw_features",
    "draw_hash_planes",
    "draw_rotations",
    "effective_rank",
    "init_cache",
    "init_compressed_cache",
    "init_linear_cache",
    "init_local_cache",
    "init_lsh_cache",
    "init_performer_cache",
    "init_routing_cache",
    "init_sparse_cache",
    "kernel_attention",
    "kernel_attention_weights",
    "kernel_step",
    "linear_attention",
    "linear_attention_weights",
    "linear_step",
    "linformer_attention",
    "linformer_attention_weights",
    "local_attention",
    "local_attention_weights",
    "local_step",
    "logit_statistics",
    "longformer_attention",
    "longformer_attention_weights",
    "lsh_attention",
    "lsh_attention_weights",
    "lsh_buckets",
    "lsh_step",
    "patterns",
    "performer_attention",
    "performer_attention_weights",
    "performer_step",
    "rank_for_share",
    "routing_attention",
    "routing_attention_weights",
    "routing_step",
    "routing_update",
    "shared_query_key_attention",
    "shared_query_key_attention_weights",
    "shared_query_key_step",
    "sinkhorn",
    "sinkhorn_attention",
    "sinkhorn_attention_weights",
    "sparse_attention",
    "sparse_attention_weights",
    "sparse_step",
]
