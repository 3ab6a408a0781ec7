"""The one stack of blocks: scanned over stacked parameters or unrolled, plain or reversible, with equal results."""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional import merge_streams, split_streams
from jaxformer.layers import STATE, project_memory
from jaxformer.models.block import BlockAux, BlockInputs, TransformerBlock
from jaxformer.models.config import TransformerConfig
from jaxformer.models.stack_call import StackCall
from jaxformer.models.stack_layout import interleave, is_layer, join_places, split_places, stack_layers

_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "sqrt": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Stack(nn.Module):
    """``num_layers`` blocks, their parameters under ``layers`` (stacked on axis 0) or ``layers_0``, ``layers_1``, ….

    The blocks are modules without parent, applied to one layer's parameters at a time inside ``lax.scan``; layer i
    draws its randomness from ``fold_in(rng, i)``, so scanned and unrolled stacks drop the same elements. Where the
    layers go through several attentions in turn, or not all have experts, the scan is over periods, and ``layers``
    holds ``period_0``, ``period_1``, …, each stacked over the periods.

    A reversible stack (``config.residual``) has the same parameters and two streams, both beginning as ``x``: the
    attentions read the second and are added to the first, the feed-forward reads the first and is added to the second.
    Its backward pass recomputes every layer's inputs from its outputs (``jaxformer.functional.reversible_stack``). With
    a cache, projected memories or ``return_weights`` the same function is computed as a plain loop; with ``readout``
    too, each block recomputed in the backward pass, so that both streams are kept at every layer.

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
        readout: Callable[[Array, Array], dict[str, Array]] | None = None,
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
          readout: called with the number of each layer and the residual stream after it [B, T, config.output_dim],
            inside the scan; what it returns by name comes out in ``readouts``. No layer's output is kept for it
            beyond the backward pass's needs.

        Returns:
          The residual stream [B, T, config.output_dim] and a ``BlockAux`` whose losses, weights, metrics and readouts
          have a leading axis of the layers that have them; its state is what the blocks changed of their variables
          that are not parameters, laid out like them.
        """
        config = self.config
        reversible = config.residual == "reversible"
        call = StackCall(
            blocks=make_blocks(config, self.num_layers, self.causal, self.cross),
            inputs=inputs,
            rng=self.make_rng("dropout") if config.is_random and not deterministic else None,
            deterministic=deterministic,
            return_weights=return_weights,
            updating=not deterministic and self.is_mutable_collection(STATE) and not self.is_initializing(),
            readout=self._merged(readout),
        )
        variables = self._variables(call.blocks, x)
        streams: Any = split_streams(x) if reversible else x
        if reversible and cache is None and memory is None and not return_weights and readout is None:
            if not config.scan_layers:
                variables = jax.tree.map(lambda leaf: leaf[None], variables)
            streams, outputs = call.reverse(streams, variables)
        else:
            carry = (streams, cache if isinstance(cache, tuple) else (cache,) * len(call.blocks))
            run = self._scan if config.scan_layers else self._unroll
            (streams, caches), outputs = run(call, carry, variables, memory)
            cache = caches if isinstance(cache, tuple) else caches[0]
        if reversible:
            x = merge_streams(streams, config.residual_merge, x.dtype)
        else:
            x = streams
        return x, _join(outputs)._replace(cache=cache, state=self._keep_state(outputs))

    def _merged(self, readout: Callable | None) -> Callable | None:
        """The readout of a stack's streams, one or two."""
        if readout is None or self.config.residual == "plain":
            return readout
        return lambda layer, streams: readout(
            layer, merge_streams(streams, self.config.residual_merge, self.config.compute_dtype)
        )

    def _remat(self, call: StackCall) -> str:
        """What the backward pass recomputes; a reversible stack that can't run backwards keeps its streams alone."""
        reversible = self.config.residual == "reversible"
        return "full" if reversible and call.readout is not None else self.config.remat

    def _scan(self, call: StackCall, carry: Any, variables: list[Any], memory: Any) -> tuple[Any, list[BlockAux]]:
        """All layers as a scan over periods; what comes out at each place of the period, stacked over the periods."""
        period = len(call.blocks)
        memory = jax.tree.map(lambda leaf: leaf.reshape(-1, period, *leaf.shape[1:]), memory)

        def body(carry: Any, step: tuple[Any, Any, Any]) -> tuple[Any, list[BlockAux]]:
            variables, index, memory = step
            outputs = []
            for place in range(period):
                part = jax.tree.map(lambda leaf, place=place: leaf[place], memory)
                carry, aux = call.apply(place, carry, variables[place], index, part)
                outputs.append(aux)
            return carry, outputs

        steps = (variables, jnp.arange(self.num_layers // period), memory)
        scan = _scan_groups if self.config.remat == "sqrt" else jax.lax.scan
        return scan(recompute(self.config, body, self._remat(call)), carry, steps)

    def _unroll(self, call: StackCall, carry: Any, variables: list[Any], memory: Any) -> tuple[Any, list[BlockAux]]:
        """All layers one after the other; what comes out of each, with a leading axis of length 1."""
        period = len(call.blocks)
        outputs = []
        for i in range(self.num_layers):
            part = jax.tree.map(lambda leaf, i=i: leaf[i], memory)
            run = recompute(self.config, functools.partial(call.apply, i % period), self._remat(call))
            carry, aux = run(carry, variables[i], jnp.asarray(i // period), part)
            outputs.append(jax.tree.map(lambda leaf: leaf[None], aux))
        return carry, outputs

    def _variables(self, blocks: list[TransformerBlock], x: Array) -> list[tuple[Any, Any]]:
        """(parameters, state) of each place of the period, stacked over the periods; unrolled, those of each layer."""
        period = len(blocks)

        def init(block: TransformerBlock, key: Array) -> tuple[Any, Any]:
            # Parameters depend on widths alone: one token serves, and traces fast.
            token = jnp.zeros((1, 1, x.shape[-1]), x.dtype)
            memory = jnp.zeros((1, 1, self.config.output_dim), x.dtype) if self.cross else None
            made = block.init(key, token, BlockInputs(memory=memory))
            return made["params"], made.get(STATE, {})

        def draw(key: Array) -> tuple[Any, Any]:
            keys = jax.random.split(key, self.num_layers).reshape(-1, period)
            made = [jax.vmap(functools.partial(init, block))(keys[:, place]) for place, block in enumerate(blocks)]
            return join_places([params for params, _ in made]), join_places([state for _, state in made])

        if self.config.scan_layers:
            params, state = self._declare("layers", draw)
            return list(zip(split_places(params, period), split_places(state, period)))
        inits = [functools.partial(init, blocks[i % period]) for i in range(self.num_layers)]
        return [self._declare(f"layers_{i}", one) for i, one in enumerate(inits)]

    def _declare(self, name: str, draw: Callable[[Array], tuple[Any, Any]]) -> tuple[Any, Any]:
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

    def _keep_state(self, outputs: list[BlockAux]) -> dict[str, Any]:
        """Store what the blocks changed of their state, and return it by name."""
        states = [aux.state for aux in outputs]
        if self.config.scan_layers:
            named = {"layers": join_places(states)}
        else:
            named = {f"layers_{i}": jax.tree.map(lambda leaf: leaf[0], state) for i, state in enumerate(states)}
        named = {name: state for name, state in named.items() if jax.tree.leaves(state)}
        for name, state in named.items():
            self.put_variable(STATE, name, state)
        return named


def _join(outputs: list[BlockAux]) -> BlockAux:
    """One ``BlockAux`` from those of the places, whose leaves have a leading axis: layers in order."""

    def join(parts: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {}
        for part in parts:
            for name, leaf in part.items():
                found.setdefault(name, []).append(leaf)
        return {name: jax.tree.map(interleave, *leaves) for name, leaves in found.items()}

    return BlockAux(
        losses=join([aux.losses for aux in outputs]),
        state={},
        cache=None,
        weights=join([aux.weights for aux in outputs]),
        metrics=join([aux.metrics for aux in outputs]),
        readouts=join([aux.readouts for aux in outputs]),
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
        layers = {name: layer["cross_attention"] for name, layer in params.items() if is_layer(name)}
        params = stack_layers(layers, period)
    else:
        params = {"layers": join_places([place["cross_attention"] for place in split_places(params["layers"], period)])}

    def keys_and_values(layer: Any) -> tuple[Array, Array]:
        return project_memory(layer, memory, config.kv_heads, config.compute_dtype)

    projected = [jax.vmap(keys_and_values)(place) for place in split_places(params["layers"], period)]
    return jax.tree.map(interleave, *projected)


def _scan_groups(body: Callable, carry: Any, steps: Any) -> tuple[Any, Any]:
    """``lax.scan`` that keeps the carry between groups of about sqrt(n) of the n steps only, and recomputes the rest.

    Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174, section 4.
    """
    count = jax.tree.leaves(steps)[0].shape[0]
    size = next(size for size in range(math.isqrt(count), 0, -1) if count % size == 0)
    groups = jax.tree.map(lambda leaf: leaf.reshape(count // size, size, *leaf.shape[1:]), steps)
    group = jax.checkpoint(functools.partial(jax.lax.scan, body), prevent_cse=False)
    carry, outputs = jax.lax.scan(group, carry, groups)
    return carry, jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), outputs)


def recompute(config: TransformerConfig, function: Callable, remat: str | None = None) -> Callable:
    """The function, whose results the backward pass recomputes as ``remat`` says (None = ``config.remat``)."""
    remat = config.remat if remat is None else remat
    if remat == "none":
        return function
    return jax.checkpoint(function, policy=_POLICIES[remat], prevent_cse=not config.scan_layers)


def make_blocks(config: TransformerConfig, num_layers: int, causal: bool, cross: bool) -> list[TransformerBlock]:
    """The blocks that the layers go through in turn, without parent, to be applied to one layer's parameters."""
    additions = num_layers * (3 if cross else 2)
    return [
        TransformerBlock(
            config,
            attention,
            causal=causal,
            cross=cross,
            experts=experts,
            residual_additions=additions,
            parent=None,
        )
        for attention, experts in zip(config.attentions, config.mixtures)
    ]
