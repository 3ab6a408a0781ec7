"""The Universal Transformer's stack: one block's parameters over a scan of steps, a fixed number or as needed."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional import adaptive_steps, compute_dtype, ponder_cost, sinusoidal_positions
from jaxformer.layers import STATE, project_memory
from jaxformer.models.block import BlockAux, BlockInputs, TransformerBlock
from jaxformer.models.config import TransformerConfig
from jaxformer.models.initializers import make_kernel_init
from jaxformer.models.stack import make_blocks, recompute


class UniversalStack(nn.Module):
    """``num_layers`` steps of one block, whose parameters stand under ``block``.

    Dehghani et al. 2019, "Universal Transformers", arXiv:1807.03819, section 2. At every step the vectors of position
    and step (equations 6 and 7; positions count from 0, steps from 1) are added to the state, then the block is
    applied. With the same vectors left out it is a plain stack whose layers all have the same parameters, dropout
    masks included: step i draws its randomness from ``fold_in(rng, i)``.

    With ``halting="act"`` every position halts by itself (section 2.2, and ``jaxformer.functional.adaptive_steps``):
    its halting probability at a step is read from the state before the block, with the vectors added; from its last
    step on its state is copied, and the others go on to attend to the copy, with each step's vectors added. So nothing
    that a position sees depends on later positions, and cached decoding is the full pass: the cache holds keys and
    values of every step, also of those that a token did not make.

    Args:
      config: the model's configuration.
      num_layers: steps, at most.
      causal: self-attention sees the past only.
      cross: the block has cross-attention; keys and values of the memory are the same at all steps.
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
        coordinates: Float[Array, "B T D"] | None = None,
        cache: Any = None,
        memory: tuple[Array, Array] | None = None,
        deterministic: bool = True,
        return_weights: bool = False,
        readout: Callable[[Array, Array], dict[str, Array]] | None = None,
    ) -> tuple[Array, BlockAux]:
        """Apply all steps.

        Args:
          x: the state before the first step [B, T, embed_dim].
          inputs: what every step reads. Where ``key_mask`` is False or ``segments`` 0, halting makes no step.
          coordinates: vectors of the positions [B, T, embed_dim], added at every step.
          cache: self-attention caches stacked over the steps.
          memory: cross-attention keys and values from ``project_tied_memory``, in place of ``inputs.memory``.
          deterministic: switches dropout off.
          return_weights: also return attention weights and each step's share of the output, stacked over the steps.
          readout: called with the number of each step and the state after it; what it returns by name comes out in
            ``readouts``, stacked over the steps.

        Returns:
          The state [B, T, embed_dim] and a ``BlockAux``. With halting its losses have ``ponder``, the mean over real
          tokens of N + R times ``ponder_weight``; its metrics ``ponder_steps``, (sum of N, number of real tokens); its
          maps ``ponder_steps`` int32 [B, T], N, and ``ponder_remainder`` [B, T], R, both 0 where there is no token; and
          its weights, when asked for, ``halting`` [num_layers, B, T], each step's share of the output. After an early
          exit the losses of the attention are left out.
        """
        config = self.config
        if readout is not None and config.halting != "none":
            raise ValueError(
                f"readout can't be given with halting={config.halting!r}: a position's output is a mix of its steps, "
                "none of which is a layer's output"
            )
        block = make_blocks(config, self.num_layers, self.causal, self.cross)[0]
        variables = self._variables(block, x)
        if self.cross and memory is None:
            assert inputs.memory is not None
            memory = project_tied_memory(variables["params"], inputs.memory, config)
        updating = not deterministic and self.is_mutable_collection(STATE) and not self.is_initializing()
        apply = self._step(block, variables, inputs, memory, deterministic, return_weights, updating)
        locate = self._locate(x, coordinates)
        carry = (cache, variables.get(STATE, {}) if updating else {})
        if config.halting == "none":

            def body(loop: tuple[Array, Any], index: Array) -> tuple[tuple[Array, Any], BlockAux]:
                x, carry, aux = apply(index, locate(loop[0], index), loop[1])
                return (x, carry), aux if readout is None else aux._replace(readouts=readout(index, x))

            steps = jnp.arange(self.num_layers, dtype=jnp.int32)
            (x, carry), aux = jax.lax.scan(recompute(config, body), (x, carry), steps, unroll=not config.scan_layers)
        else:
            x, carry, aux = self._adaptive(x, carry, apply, locate, inputs, deterministic, return_weights)
        cache, state = carry
        if updating and state:
            self.put_variable(STATE, "block", state)
        return x, aux._replace(cache=cache, state={"block": state} if state else {})

    def _adaptive(
        self,
        x: Array,
        carry: Any,
        apply: Callable,
        locate: Callable,
        inputs: BlockInputs,
        deterministic: bool,
        return_weights: bool,
    ) -> tuple[Array, Any, BlockAux]:
        """Steps until every position has halted."""
        config = self.config
        early_exit = config.early_exit and deterministic and not return_weights and not self.is_initializing()
        unit = HaltingUnit(
            config.embed_dim, config.halting_bias_init, config.parameter_dtype, make_kernel_init(config), name="halting"
        )
        kernel, bias = unit.kernel, unit.bias

        def step(index: Array, x: Array, carry: Any) -> tuple[Array, Array, Any, BlockAux]:
            x = locate(x, index)
            wide = compute_dtype(x.dtype)
            probability = jax.nn.sigmoid(x.astype(wide) @ kernel.astype(wide) + bias.astype(wide))
            x, carry, aux = apply(index, x, carry)
            return probability, x, carry, aux

        exists = _existing(inputs, x)
        out = adaptive_steps(
            step if early_exit else recompute(config, step),
            x,
            self.num_layers,
            carry=carry,
            mask=exists,
            threshold=config.halting_threshold,
            mix=config.halting_mix,
            early_exit=early_exit,
            unroll=not config.scan_layers,
        )
        carry, aux = out.carry, out.outputs
        if early_exit:
            aux = BlockAux(losses={}, state={}, cache=None, weights={})
            carry = self._fill(out.executed, out.state, carry, apply, locate)
        halting = out.halting
        cost = ponder_cost(halting.num_steps, halting.remainder, mask=exists)
        sums = (halting.num_steps.astype(jnp.float32).sum(), exists.astype(jnp.float32).sum())
        aux = aux._replace(
            losses={**aux.losses, "ponder": config.ponder_weight * cost},
            metrics={**aux.metrics, "ponder_steps": sums},
            weights={**aux.weights, "halting": out.weights} if return_weights else aux.weights,
            maps={"ponder_steps": halting.num_steps, "ponder_remainder": halting.remainder},
        )
        return out.output, carry, aux

    def _fill(self, executed: Array, x: Array, carry: Any, apply: Callable, locate: Callable) -> Any:
        """Keys and values of the steps after an early exit, which later tokens may read.

        Of the block the compiler keeps what the cache needs, since nothing reads the rest.
        """
        if carry[0] is None:
            return carry

        def body(loop: tuple[Array, Any]) -> tuple[Array, Any]:
            index, carry = loop
            return index + 1, apply(index, locate(x, index), carry)[1]

        return jax.lax.while_loop(lambda loop: loop[0] < self.num_layers, body, (executed, carry))[1]

    def _step(
        self,
        block: TransformerBlock,
        variables: Any,
        inputs: BlockInputs,
        memory: Any,
        deterministic: bool,
        return_weights: bool,
        updating: bool,
    ) -> Callable[[Array, Array, Any], tuple[Array, Any, BlockAux]]:
        """(index, state with coordinates, (cache, module state)) -> the same after the block, and its ``BlockAux``."""
        config = self.config
        rng = self.make_rng("dropout") if config.is_random and not deterministic else None

        def apply(index: Array, x: Array, carry: Any) -> tuple[Array, Any, BlockAux]:
            cache, state = carry
            applied: Any = block.apply(
                {**variables, STATE: state} if state else variables,
                x,
                inputs,
                cache=cache,
                layer=index,
                memory=memory,
                deterministic=deterministic,
                return_weights=return_weights,
                rngs={} if rng is None else {"dropout": jax.random.fold_in(rng, index)},
                mutable=[STATE] if updating else False,
            )
            (x, aux), changed = applied if updating else (applied, {})
            return x, (aux.cache, changed.get(STATE, {})), aux._replace(cache=None, state={})

        return apply

    def _locate(self, x: Array, coordinates: Array | None) -> Callable[[Array, Array], Array]:
        """(state, index of the step) -> the state with the vectors of position and step added."""
        config = self.config
        width, dtype = x.shape[-1], x.dtype

        def locate(x: Array, index: Array) -> Array:
            if coordinates is not None:
                x = x + coordinates
            if config.step_embedding == "sinusoidal":
                x = x + sinusoidal_positions(index[None, None] + 1, width, dtype=dtype)
            return x

        return locate

    def _variables(self, block: TransformerBlock, x: Array) -> dict[str, Any]:
        """The block's parameters and state, drawn together at initialisation."""
        drawn: dict[str, Any] = {}

        def draw(key: Array) -> Any:
            # Parameters depend on widths alone: one token serves, and traces fast.
            token = jnp.zeros((1, 1, x.shape[-1]), x.dtype)
            drawn.update(block.init(key, token, BlockInputs(memory=token if self.cross else None)))
            return drawn["params"]

        params = self.param("block", draw)
        state = drawn.get(STATE, {}) if self.is_initializing() else self.get_variable(STATE, "block", {})
        if self.is_initializing() and jax.tree.leaves(state):
            self.put_variable(STATE, "block", state)
        return {"params": params, STATE: state} if state else {"params": params}


class HaltingUnit(nn.Module):
    """Parameters of the halting probability sigmoid(x · kernel + bias).

    Args:
      embed_dim: width of x.
      bias_init: the bias at the start.
      param_dtype: dtype of ``kernel`` [embed_dim] and ``bias`` [].
      kernel_init: initialiser of the kernel, called with the shape [embed_dim, 1].
    """

    embed_dim: int
    bias_init: float
    param_dtype: Any
    kernel_init: Callable

    def setup(self) -> None:
        """Declare the parameters."""
        self.kernel = self.param(
            "kernel", lambda key: self.kernel_init(key, (self.embed_dim, 1), self.param_dtype)[:, 0]
        )
        self.bias = self.param("bias", nn.initializers.constant(self.bias_init), (), self.param_dtype)


def project_tied_memory(params: Any, memory: Float[Array, "B S M"], config: TransformerConfig) -> tuple[Array, Array]:
    """Cross-attention keys and values of a universal decoder, computed once for all steps.

    Args:
      params: parameters of the decoder's block.
      memory: the encoder's output [B, S, embed_dim].
      config: the model's configuration.

    Returns:
      (key, value), each [B, S, num_kv_heads, head_dim].
    """
    return project_memory(params["cross_attention"], memory, config.kv_heads, config.compute_dtype)


def _existing(inputs: BlockInputs, x: Array) -> Array:
    """Which tokens exist, bool [B, T]."""
    exists = jnp.ones(x.shape[:2], bool)
    if inputs.key_mask is not None:
        exists = exists & inputs.key_mask.astype(bool)
    return exists if inputs.segments is None else exists & (inputs.segments != 0)
