"""The one stack of blocks: scanned over stacked parameters or unrolled, with equal results and exact conversion."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.layers import project_memory
from jaxformer.models.block import BlockAux, BlockInputs, TransformerBlock
from jaxformer.models.config import TransformerConfig

_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Stack(nn.Module):
    """``num_layers`` blocks, their parameters under ``layers`` (stacked on axis 0) or ``layers_0``, ``layers_1``, ….

    The block is a module without parent, applied to one layer's parameters at a time inside ``lax.scan``; layer i
    draws its randomness from ``fold_in(rng, i)``, so scanned and unrolled stacks drop the same elements.

    Args:
      config: the model's configuration.
      num_layers: blocks.
      causal: self-attention sees the past only.
      cross: blocks have cross-attention.
    """

    config: TransformerConfig
    num_layers: int
    causal: bool
    cross: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        inputs: BlockInputs,
        *,
        cache: Any = None,
        memory: tuple[Array, Array] | None = None,
        deterministic: bool = True,
        return_weights: bool = False,
    ) -> tuple[Array, BlockAux]:
        """Apply all blocks.

        Args:
          x: residual stream [B, T, embed_dim].
          inputs: what every block reads.
          cache: self-attention caches stacked over depth; carried through the scan and updated in place.
          memory: cross-attention keys and values of every layer, leading layer axis, from ``project_memories``.
          deterministic: switches dropout off.
          return_weights: also return attention weights, stacked over depth.

        Returns:
          The residual stream and a ``BlockAux`` whose losses, state and weights have a leading layer axis.
        """
        config = self.config
        block = make_block(config, self.num_layers, self.causal, self.cross)
        stochastic = not deterministic and (
            config.dropout_rate or config.attention_dropout_rate or config.mlp_dropout_rate
        )
        rng = self.make_rng("dropout") if stochastic else None

        def init(key: Array) -> Any:
            # Parameters depend on widths alone: one token serves, and traces fast.
            token = jnp.zeros((1, 1, x.shape[-1]), x.dtype)
            return block.init(key, token, BlockInputs(memory=token if self.cross else None))["params"]

        def body(carry: tuple[Array, Any], per_layer: tuple[Any, Any, Any]) -> tuple[tuple[Array, Any], BlockAux]:
            x, cache = carry
            params, layer, memory = per_layer
            rngs = {} if rng is None else {"dropout": jax.random.fold_in(rng, layer)}
            applied: Any = block.apply(
                {"params": params},
                x,
                inputs,
                cache=cache,
                layer=layer,
                memory=memory,
                deterministic=deterministic,
                return_weights=return_weights,
                rngs=rngs,
            )
            x, aux = applied
            return (x, aux.cache), aux._replace(cache=None)

        if config.remat != "none":
            body = jax.checkpoint(body, policy=_POLICIES[config.remat], prevent_cse=not config.scan_layers)
        layers = jnp.arange(self.num_layers)
        if config.scan_layers:
            params = self.param("layers", lambda key: jax.vmap(init)(jax.random.split(key, self.num_layers)))
            (x, cache), aux = jax.lax.scan(body, (x, cache), (params, layers, memory))
            return x, aux._replace(cache=cache)
        carry, outputs = (x, cache), []
        for i in range(self.num_layers):
            params = self.param(f"layers_{i}", init)
            carry, aux = body(carry, (params, layers[i], jax.tree.map(lambda leaf, i=i: leaf[i], memory)))
            outputs.append(aux)
        aux = jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)
        return carry[0], aux._replace(cache=carry[1])


def make_block(config: TransformerConfig, num_layers: int, causal: bool, cross: bool) -> TransformerBlock:
    """A block without parent, to be applied to one layer's parameters."""
    additions = num_layers * (3 if cross else 2)
    return TransformerBlock(config, causal=causal, cross=cross, residual_additions=additions, parent=None)


def project_memories(params: Any, memory: Float[Array, "B S M"], config: TransformerConfig) -> tuple[Array, Array]:
    """Cross-attention keys and values of every layer, computed once for all decoding steps.

    Args:
      params: the decoder stack's parameters, scanned or unrolled.
      memory: the encoder's output [B, S, embed_dim].
      config: the model's configuration.

    Returns:
      (key, value), each [num_layers, B, S, num_kv_heads, head_dim].
    """
    layers = params["layers"] if "layers" in params else stack_layers(params)["layers"]
    return jax.vmap(lambda layer: project_memory(layer, memory, config.kv_heads, config.compute_dtype))(
        layers["cross_attention"]
    )


def stack_layers(params: Any) -> Any:
    """Turn an unrolled stack's ``layers_0``, ``layers_1``, … into one ``layers`` tree with a leading layer axis.

    Args:
      params: parameters (or optimizer moments) of any tree that holds unrolled stacks, nested dicts.

    Returns:
      The same tree with each run of ``layers_i`` stacked in numerical order (10 after 9).
    """
    if not isinstance(params, dict):
        return params
    numbered = sorted((name for name in params if _is_layer(name)), key=lambda name: int(name.removeprefix("layers_")))
    rest = {name: stack_layers(value) for name, value in params.items() if name not in numbered}
    if not numbered:
        return rest
    return {**rest, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[name] for name in numbered))}


def unstack_layers(params: Any) -> Any:
    """The inverse of ``stack_layers``: split each ``layers`` tree along its leading axis."""
    if not isinstance(params, dict):
        return params
    rest = {name: unstack_layers(value) for name, value in params.items() if name != "layers"}
    if "layers" not in params:
        return rest
    depth = jax.tree.leaves(params["layers"])[0].shape[0]
    split = {f"layers_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]) for i in range(depth)}
    return {**rest, **split}


def _is_layer(name: str) -> bool:
    return name.startswith("layers_") and name.removeprefix("layers_").isdigit()
