"""The one stack of blocks: scanned over stacked parameters or unrolled, with equal results and exact conversion."""

import functools
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


STATE = "state"
"""The collection of what is neither parameter nor cache."""

_PLACE = "period_"


class Stack(nn.Module):
    """``num_layers`` blocks, their parameters under ``layers`` (stacked on axis 0) or ``layers_0``, ``layers_1``, ….

    The blocks are modules without parent, applied to one layer's parameters at a time inside ``lax.scan``; layer i
    draws its randomness from ``fold_in(rng, i)``, so scanned and unrolled stacks drop the same elements. Where the
    layers go through several attentions in turn, the scan is over periods, and ``layers`` holds ``period_0``,
    ``period_1``, …, each stacked over the periods.

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
          cache: self-attention caches, one for each attention of the period, stacked over its layers; carried
            through the scan and updated in place.
          memory: cross-attention keys and values of every layer, leading layer axis, from ``project_memories``.
          deterministic: switches dropout off.
          return_weights: also return attention weights, stacked over depth.

        Returns:
          The residual stream and a ``BlockAux`` whose losses, weights and metrics have a leading layer axis; its
          state is what the blocks changed of their variables that are not parameters, laid out like them.
        """
        config = self.config
        blocks = make_blocks(config, self.num_layers, self.causal, self.cross)
        period = len(blocks)
        rng = self.make_rng("dropout") if config.is_random and not deterministic else None
        updating = not deterministic and self.is_mutable_collection(STATE) and not self.is_initializing()

        def init(block: TransformerBlock, key: Array) -> tuple[Any, Any]:
            # Parameters depend on widths alone: one token serves, and traces fast.
            token = jnp.zeros((1, 1, x.shape[-1]), x.dtype)
            made = block.init(key, token, BlockInputs(memory=token if self.cross else None))
            return made["params"], made.get(STATE, {})

        def apply(place: int, carry: tuple[Array, tuple], variables: Any, index: Any, memory: Any) -> tuple:
            """One block: layer ``index * period + place``."""
            x, caches = carry
            params, state = variables
            rngs = {} if rng is None else {"dropout": jax.random.fold_in(rng, index * period + place)}
            applied: Any = blocks[place].apply(
                {"params": params, STATE: state} if state else {"params": params},
                x,
                inputs,
                cache=caches[place],
                layer=index,
                memory=memory,
                deterministic=deterministic,
                return_weights=return_weights,
                rngs=rngs,
                mutable=[STATE] if updating else False,
            )
            (x, aux), changed = applied if updating else (applied, {})
            caches = (*caches[:place], aux.cache, *caches[place + 1 :])
            return (x, caches), aux._replace(cache=None, state=changed.get(STATE, {}))

        def remat(function: Any) -> Any:
            if config.remat == "none":
                return function
            return jax.checkpoint(function, policy=_POLICIES[config.remat], prevent_cse=not config.scan_layers)

        carry = (x, cache if isinstance(cache, tuple) else (cache,) * period)
        if config.scan_layers:
            stacked = self._stacked(blocks, init)
            memory = jax.tree.map(lambda leaf: leaf.reshape(-1, period, *leaf.shape[1:]), memory)

            def body(carry: Any, step: tuple[Any, Any, Any]) -> tuple[Any, list[BlockAux]]:
                variables, index, memory = step
                outputs = []
                for place in range(period):
                    part = jax.tree.map(lambda leaf, place=place: leaf[place], memory)
                    carry, aux = apply(place, carry, variables[place], index, part)
                    outputs.append(aux)
                return carry, outputs

            indices = jnp.arange(self.num_layers // period)
            carry, outputs = jax.lax.scan(remat(body), carry, (stacked, indices, memory))
            state = _name_places([aux.state for aux in outputs])
            if jax.tree.leaves(state):
                self.put_variable(STATE, "layers", state)
            aux = _join(outputs, state)
        else:
            outputs = []
            for i in range(self.num_layers):
                variables = self._variables(f"layers_{i}", functools.partial(init, blocks[i % period]))
                part = jax.tree.map(lambda leaf, i=i: leaf[i], memory)
                run = remat(functools.partial(apply, i % period))
                carry, aux = run(carry, variables, jnp.asarray(i // period), part)
                if aux.state:
                    self.put_variable(STATE, f"layers_{i}", aux.state)
                outputs.append(aux)
            state = {f"layers_{i}": aux.state for i, aux in enumerate(outputs) if aux.state}
            aux = _join([jax.tree.map(lambda leaf: leaf[None], aux._replace(state={})) for aux in outputs], state)
        x, caches = carry
        return x, aux._replace(cache=caches if isinstance(cache, tuple) else caches[0])

    def _stacked(self, blocks: list[TransformerBlock], init: Any) -> list[tuple[Any, Any]]:
        """(parameters, state) of each place of the period, stacked over the periods."""
        count = self.num_layers // len(blocks)

        def draw(key: Array) -> tuple[Any, Any]:
            keys = jax.random.split(key, self.num_layers).reshape(count, len(blocks))
            made = [jax.vmap(functools.partial(init, block))(keys[:, place]) for place, block in enumerate(blocks)]
            return _name_places([params for params, _ in made]), _name_places([state for _, state in made])

        params, state = self._variables("layers", draw)
        return list(zip(_places(params, len(blocks)), _places(state, len(blocks))))

    def _variables(self, name: str, draw: Any) -> tuple[Any, Any]:
        """Parameters and state of that name, drawn together at initialisation."""
        drawn = {}

        def keep_state(key: Array) -> Any:
            params, drawn["state"] = draw(key)
            return params

        params = self.param(name, keep_state)
        if not self.is_initializing():
            return params, self.get_variable(STATE, name, {})
        if jax.tree.leaves(drawn["state"]):
            self.put_variable(STATE, name, drawn["state"])
        return params, drawn["state"]


def make_blocks(config: TransformerConfig, num_layers: int, causal: bool, cross: bool) -> list[TransformerBlock]:
    """The blocks that the layers go through in turn, without parent, to be applied to one layer's parameters."""
    additions = num_layers * (3 if cross else 2)
    return [
        TransformerBlock(config, attention, causal=causal, cross=cross, residual_additions=additions, parent=None)
        for attention in config.attentions
    ]


def _name_places(trees: list[Any]) -> Any:
    """The trees of the places of a period as one: the tree itself where there is one place."""
    if len(trees) == 1:
        return trees[0]
    return {f"{_PLACE}{place}": tree for place, tree in enumerate(trees) if jax.tree.leaves(tree)}


def _places(tree: Any, period: int) -> list[Any]:
    """The way back from ``_name_places``."""
    return [tree] if period == 1 else [tree.get(f"{_PLACE}{place}", {}) for place in range(period)]


def _join(outputs: list[BlockAux], state: Any) -> BlockAux:
    """One ``BlockAux`` from those of the places, whose leaves have a leading axis: layers in order."""

    def join(parts: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {}
        for part in parts:
            for name, leaf in part.items():
                found.setdefault(name, []).append(leaf)
        return {name: jax.tree.map(_interleave, *leaves) for name, leaves in found.items()}

    return BlockAux(
        losses=join([aux.losses for aux in outputs]),
        state=state,
        cache=None,
        weights=join([aux.weights for aux in outputs]),
        metrics=join([aux.metrics for aux in outputs]),
    )


def project_memories(params: Any, memory: Float[Array, "B S M"], config: TransformerConfig) -> tuple[Array, Array]:
    """Cross-attention keys and values of every layer, computed once for all decoding steps.

    Args:
      params: the decoder stack's parameters, scanned or unrolled.
      memory: the encoder's output [B, S, embed_dim].
      config: the model's configuration.

    Returns:
      (key, value), each [num_layers, B, S, num_kv_heads, head_dim].
    """
    period = len(config.attentions)
    if "layers" not in params:
        layers = {name: layer["cross_attention"] for name, layer in params.items() if _is_layer(name)}
        params = stack_layers(layers, period)
    else:
        params = {"layers": _name_places([place["cross_attention"] for place in _places(params["layers"], period)])}

    def keys_and_values(layer: Any) -> tuple[Array, Array]:
        return project_memory(layer, memory, config.kv_heads, config.compute_dtype)

    projected = [jax.vmap(keys_and_values)(place) for place in _places(params["layers"], period)]
    return jax.tree.map(_interleave, *projected)


def stack_layers(params: Any, period: int = 1) -> Any:
    """Turn an unrolled stack's ``layers_0``, ``layers_1``, … into one ``layers`` tree with a leading layer axis.

    Args:
      params: parameters (or optimizer moments, or state) of any tree that holds unrolled stacks, nested dicts.
      period: how many attentions the layers go through in turn.

    Returns:
      The same tree with each run of ``layers_i`` stacked in numerical order (10 after 9), one tree a place of the
      period.
    """
    if not isinstance(params, dict):
        return params
    numbered = sorted((name for name in params if _is_layer(name)), key=lambda name: int(name.removeprefix("layers_")))
    rest = {name: stack_layers(value, period) for name, value in params.items() if name not in numbered}
    if not numbered:
        return rest
    places = [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[name] for name in numbered[place::period]))
        for place in range(period)
    ]
    return {**rest, "layers": _name_places(places)}


def unstack_layers(params: Any, period: int = 1) -> Any:
    """The inverse of ``stack_layers``: split each ``layers`` tree along its leading axis."""
    if not isinstance(params, dict):
        return params
    rest = {name: unstack_layers(value, period) for name, value in params.items() if name != "layers"}
    if "layers" not in params:
        return rest
    split = {}
    for place, tree in enumerate(_places(params["layers"], period)):
        for i in range(jax.tree.leaves(tree)[0].shape[0] if jax.tree.leaves(tree) else 0):
            split[f"layers_{i * period + place}"] = jax.tree.map(lambda leaf, i=i: leaf[i], tree)
    return {**rest, **split}


def _is_layer(name: str) -> bool:
    return name.startswith("layers_") and name.removeprefix("layers_").isdigit()


def _interleave(*leaves: Array) -> Array:
    """Leaves of the places of a period, each stacked over periods, as one over all layers in order."""
    return jnp.stack(leaves, 1).reshape(-1, *leaves[0].shape[1:])
