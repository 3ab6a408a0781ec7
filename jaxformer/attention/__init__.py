"""The catalogue of attentions: pure functions on arrays. Needs JAX alone."""

from jaxformer.attention.cache import KeyValueCache, dense_step, init_cache
from jaxformer.attention.catalogue import ATTENTION
from jaxformer.attention.dense import dense_attention, dense_attention_weights
from jaxformer.attention.kinds import AttentionKind
from jaxformer.attention.linformer import linformer_attention, linformer_attention_weights

__all__ = [
    "ATTENTION",
    "AttentionKind",
    "KeyValueCache",
    "dense_attention",
    "dense_attention_weights",
    "dense_step",
    "init_cache",
    "linformer_attention",
    "linformer_attention_weights",
]
