"""The catalogue of attentions: pure functions on arrays. Needs JAX alone."""

from jaxformer.attention.bucket_cache import BucketCache
from jaxformer.attention.cache import KeyValueCache, dense_step, init_cache
from jaxformer.attention.compressed import compressed_attention, compressed_attention_weights
from jaxformer.attention.compressed_cache import CompressedCache, compressed_step, init_compressed_cache
from jaxformer.attention.dense import dense_attention, dense_attention_weights
from jaxformer.attention.kinds import AttentionKind
from jaxformer.attention.linear import linear_attention, linear_attention_weights
from jaxformer.attention.linear_cache import LinearCache, init_linear_cache, linear_step
from jaxformer.attention.linformer import linformer_attention, linformer_attention_weights
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

from jaxformer.attention.catalogue import ATTENTION

__all__ = [
    "ATTENTION",
    "PATTERNS",
    "AttentionKind",
    "BucketCache",
    "CompressedCache",
    "KeyValueCache",
    "LinearCache",
    "PatternKind",
    "compressed_attention",
    "compressed_attention_weights",
    "compressed_step",
    "dense_attention",
    "dense_attention_weights",
    "dense_step",
    "draw_features",
    "draw_rotations",
    "init_cache",
    "init_compressed_cache",
    "init_linear_cache",
    "init_lsh_cache",
    "init_performer_cache",
    "linear_attention",
    "linear_attention_weights",
    "linear_step",
    "linformer_attention",
    "linformer_attention_weights",
    "lsh_attention",
    "lsh_attention_weights",
    "lsh_buckets",
    "lsh_step",
    "performer_attention",
    "performer_attention_weights",
    "performer_step",
]
