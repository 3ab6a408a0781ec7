"""One call of a stack: blocks without parent applied to one layer's variables, plainly or so that it can be undone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from jaxformer.functional import reversible_stack
from jaxformer.layers import STATE
from jaxformer.models.block import BlockAux, BlockInputs, TransformerBlock


@dataclasses.dataclass(frozen=True)
class StackCall:
    """What all layers have in common during one call.

    Attributes:
      blocks: the block of each place of the period.
      inputs: what every block reads.
      rng: PRNG key of all layers' dropout, or None.
      deterministic: switches dropout off.
      return_weights: attention weights are wanted.
      updating: blocks may change their state.
      readout: called with the number of each layer and its output [B, T, D]; what it returns by name comes out in
        ``readouts``.
    """

    blocks: list[TransformerBlock]
    inputs: BlockInputs
    rng: Array | None
    deterministic: bool
    return_weights: bool
    updating: bool
    readout: Callable[[Array, Array], dict[str, Array]] | None = None

    def apply(self, place: int, carry: tuple[Any, tuple], variables: Any, index: Any, memory: Any) -> tuple:
        """One block: layer ``index * period + place``.

        Args:
          place: of the block in the period.
          carry: the residual stream (or two) and the caches of all places.
          variables: (parameters, state) of the layer.
          index: number of the period.
          memory: cross-attention keys and values of the layer, or None.

        Returns:
          The new carry, and the block's ``BlockAux`` without cache.
        """
        x, caches = carry
        arguments = {"cache": caches[place], "layer": index, "memory": memory, "return_weights": self.return_weights}
        layer = index * len(self.blocks) + place
        (x, aux), state = self._run(self.blocks[place], None, variables, self.rng, layer, (x, self.inputs), arguments)
        caches = (*caches[:place], aux.cache, *caches[place + 1 :])
        readouts = {} if self.readout is None else self.readout(layer, x)
        return (x, caches), aux._replace(cache=None, state=state, readouts=readouts)

    def reverse(
        self, streams: tuple[Array, Array], variables: list[tuple[Any, Any]]
    ) -> tuple[tuple[Array, Array], list[BlockAux]]:
        """All layers, with a backward pass that recomputes their inputs; no caches and no weights.

        Args:
          streams: the two streams [B, T, embed_dim].
          variables: (parameters, state) of each place, stacked over the periods: as many places as one likes, to
            which the blocks are applied in turn.

        Returns:
          The two streams, and the ``BlockAux`` of each place, stacked over the periods.
        """
        blocks = [self.blocks[place % len(self.blocks)] for place in range(len(variables))]
        layers = [(self._sublayer(block, "attend"), self._sublayer(block, "feed")) for block in blocks]
        halves = [(_select(own, False), _select(own, True)) for own in variables]
        output = reversible_stack(layers, halves, streams, (self.inputs, self.rng))
        outputs = []
        for losses, ((state, metrics), (more_state, more_metrics)) in zip(output.losses, output.extras):
            aux = BlockAux(losses=losses, state=state | more_state, cache=None, weights={})
            outputs.append(aux._replace(metrics=metrics | more_metrics))
        return output.streams, outputs

    def _sublayer(self, block: TransformerBlock, method: str) -> Callable:
        """A half of a block as ``reversible_stack`` takes it."""

        def sublayer(variables: Any, x: Array, layer: Array, shared: Any) -> tuple[Array, dict, tuple[dict, dict]]:
            inputs, rng = shared
            params, state = variables
            x = x.astype(block.config.compute_dtype)
            result, state = self._run(
                block, method, (params, jax.lax.stop_gradient(state)), rng, layer, (x, inputs), {}
            )
            _, change, aux = result
            return change, aux.losses, (state, aux.metrics)

        return sublayer

    def _run(
        self,
        block: TransformerBlock,
        method: str | None,
        variables: tuple[Any, Any],
        rng: Array | None,
        layer: Any,
        inputs: tuple,
        arguments: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        """The result of a block's method, and its changed state."""
        params, state = variables
        applied: Any = block.apply(
            {"params": params, STATE: state} if state else {"params": params},
            *inputs,
            deterministic=self.deterministic,
            rngs={} if rng is None else {"dropout": jax.random.fold_in(rng, layer)},
            mutable=[STATE] if self.updating else False,
            method=method,
            **arguments,
        )
        result, changed = applied if self.updating else (applied, {})
        return result, changed.get(STATE, {})


def _select(variables: tuple[Any, Any], feeding: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of (parameters, state) those of the feed-forward sub-layer, or the rest."""
    params, state = (
        {name: tree for name, tree in part.items() if name.startswith("mlp") == feeding} for part in variables
    )
    return params, state
