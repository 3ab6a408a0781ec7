"""What a model costs, part by part: parameters, operations, activations and caches, in training and generation.

    cost = model_cost(gpt("small"), batch_size=8, length=1024)
    cost.parameters["embedding"], cost.phases["forward"]["attention"].matmul, cost.activation_bytes["head"]

The model's own program is traced on shapes alone and read equation by equation, so that every config is known: any
attention, experts, recomputation, reversible and universal stacks. `forward_products` gives the forward pass of
Transformers by formula, at once; both agree exactly.

**What bounds what.** A language model's forward pass takes about two operations for each parameter and token, and the
backward pass twice as much; attention comes to it as length grows. Reading a prompt is like the forward pass. A decoded
token reads all parameters and the whole cache for so few operations that memory alone decides: see
`jaxformer.analysis.roofline`.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxformer.analysis.cost import MOST
from jaxformer.analysis.costs.work import Work
from jaxformer.analysis.count import compiled_cost
from jaxformer.analysis.experts import feed_forward_cost
from jaxformer.analysis.model_costs.formulas import forward_products
from jaxformer.analysis.model_costs.parts import ATTENTION, PARTS, find_part
from jaxformer.analysis.model_costs.phases import (
    Inputs,
    Phase,
    abstract_variables,
    generation,
    has_source,
    training_loss,
)
from jaxformer.analysis.model_costs.program import count_by_part
from jaxformer.analysis.model_costs.residuals import saved_bytes
from jaxformer.analysis.model_costs.traffic import array_bytes, attention_traffic
from jaxformer.models import Transformer, TransformerConfig

__all__ = ["ModelCost", "forward_products", "model_cost"]


@dataclasses.dataclass(frozen=True)
class ModelCost:
    """The cost of a model at one size of batch; parts are those of `jaxformer.analysis.PARTS`, where they cost any.

    Attributes:
      dtype: of products.
      num_tokens: tokens of each phase: of the batch in the forward and backward pass, of the prompts (the sources and
        one token a row, with an encoder), and one a row of decoding.
      parameters: numbers that are learned, by part; a tied head has none of its own.
      active_parameters: how many of them one token uses: less than all with experts.
      parameter_bytes: their memory, by part.
      state_bytes: memory of what is neither parameter nor cache.
      phases: by name (``forward``, ``backward``, ``prefill``, ``decode``) what each part computes, of the whole batch.
        ``backward`` is the gradient less the forward pass, recomputation included; the other two are missing where the
        model does not generate. Moved bytes are the least: those of products (operands and results), and of a
        Transformer's attention its inputs, outputs and cache, as if all else stayed in the cores.
      activation_bytes: memory of what the forward pass keeps for the backward pass, by part.
      cache_bytes: of decoding `length` tokens a row; None where the model does not generate.
      no_generation: why it does not; None where it does.
      temporary_bytes: memory beside arguments and results as XLA compiles ``training`` (loss and gradient), ``prefill``
        and ``decode`` for this machine; None if that was not asked for.
    """

    dtype: str
    num_tokens: Mapping[str, int]
    parameters: Mapping[str, int]
    active_parameters: int
    parameter_bytes: Mapping[str, int]
    state_bytes: int
    phases: Mapping[str, Mapping[str, Work]]
    activation_bytes: Mapping[str, int]
    cache_bytes: int | None
    no_generation: str | None
    temporary_bytes: Mapping[str, int] | None

    def products(self, phase: str) -> int:
        """Operations of all matrix products of a phase, a multiplication and an addition being two."""
        return sum(work.matmul for work in self.phases[phase].values())

    def products_per_token(self, phase: str) -> float:
        """The same for one of the phase's tokens."""
        return self.products(phase) / self.num_tokens[phase]


def model_cost(
    model: nn.Module | TransformerConfig,
    batch_size: int,
    length: int,
    *,
    source_length: int | None = None,
    loss_chunk_size: int | None = None,
    compiled: bool = False,
) -> ModelCost:
    """The cost of a model, by part, from its own program: traced, and only with `compiled` compiled; never run.

    Args:
      model: a `Transformer`, `TaskModel` or `RecurrentSeq2Seq`; a `TransformerConfig` stands for its `Transformer`.
      batch_size: rows.
      length: tokens of a row, and slots of a cache.
      source_length: tokens of an encoder's rows (None = length); of models that have an encoder beside a decoder.
      loss_chunk_size: tokens whose logits exist at once in the loss (None = all); of a `Transformer`.
      compiled: also the compiler's figures of memory, which takes as long as it compiles.

    Returns:
      `ModelCost`.

    Raises:
      ValueError: a size below 1, more tokens than the model has positions, a source of a model without encoder, or
        chunks of a head that is not a product alone.
    """
    module: Any = Transformer(model) if isinstance(model, TransformerConfig) else model
    config = module.config
    inputs = _checked(module, batch_size, length, source_length)
    if getattr(config, "early_exit", False):
        module = module.clone(config=dataclasses.replace(config, early_exit=False))
    variables = abstract_variables(module, inputs)
    matrices = _output_kernels(config)
    loss, arguments = training_loss(module, variables, inputs, loss_chunk_size)
    gradient = jax.value_and_grad(loss)
    phases = {"forward": count_by_part(loss, *arguments, matrices=matrices)}
    phases["backward"] = _less(count_by_part(gradient, *arguments, matrices=matrices), phases["forward"])
    params, *others = arguments
    activations = saved_bytes(lambda params: loss(params, *map(_placeholders, others)), params)
    cache, generating, refusal = None, {}, None
    try:
        cache, prefill, decode = generation(module, variables, inputs)
        generating = {"prefill": prefill, "decode": decode}
    except ValueError as error:
        refusal = str(error)
    for name, phase in generating.items():
        phases[name] = count_by_part(phase.function, *phase.arguments, matrices=matrices)
    temporary = None
    if compiled:
        programs = {"training": Phase(gradient, arguments), **generating}
        temporary = {name: compiled_cost(p.function, *p.arguments).temporary_bytes for name, p in programs.items()}
    if isinstance(config, TransformerConfig):
        phases = _with_traffic(phases, attention_traffic(config, inputs, cache))
    parameters, sizes = _by_part(variables["params"])
    prompt = inputs.num_tokens if inputs.source_length is None else batch_size * (inputs.source_length + 1)
    return ModelCost(
        dtype=str(config.dtype),
        num_tokens={
            **dict.fromkeys(("forward", "backward"), inputs.num_tokens),
            **({"prefill": prompt, "decode": batch_size} if generating else {}),
        },
        parameters=parameters,
        active_parameters=sum(parameters.values()) - _unused(config, length),
        parameter_bytes=sizes,
        state_bytes=array_bytes({name: tree for name, tree in variables.items() if name != "params"}),
        phases={name: _in_order(works) for name, works in phases.items()},
        activation_bytes=_in_order(activations),
        cache_bytes=None if cache is None else array_bytes(cache),
        no_generation=refusal,
        temporary_bytes=temporary,
    )


def _checked(model: Any, batch_size: int, length: int, source_length: int | None) -> Inputs:
    """The sizes, refused where they can't be."""
    sourced = has_source(model)
    if source_length is not None and not sourced:
        raise ValueError(f"source_length is {source_length}; it must be None: the model has no encoder of its own.")
    inputs = Inputs(batch_size, length, (source_length or length) if sourced else None)
    for name, size in {"batch_size": batch_size, "length": length, "source_length": source_length}.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{name} is {size!r}; it must be an integer of at least 1.")
        if size is not None and size > MOST:
            raise ValueError(f"{name} is {size}; it must be at most {MOST}.")
    return inputs


def _output_kernels(config: Any) -> frozenset[tuple[int, int]]:
    """The output projection's shape, and its gradient's."""
    if not isinstance(config, TransformerConfig):
        return frozenset()
    heads = config.num_heads * config.width_of_head
    return frozenset({(heads, config.embed_dim), (config.embed_dim, heads)})


def _placeholders(tree: Any) -> Any:
    """Arrays of the shapes, which a trace closes over."""

    def make(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(make, tree)


def _less(whole: Mapping[str, Work], part: Mapping[str, Work]) -> dict[str, Work]:
    """The works of the gradient without those of the forward pass."""
    less = {}
    for name, work in whole.items():
        own = part.get(name, Work(0))
        less[name] = Work(
            work.matmul - own.matmul, max(0, work.other - own.other), max(0, work.moved_bytes - own.moved_bytes)
        )
    return less


def _with_traffic(phases: Mapping[str, dict[str, Work]], traffic: Mapping[str, int]) -> dict[str, dict[str, Work]]:
    return {
        name: {**works, ATTENTION: dataclasses.replace(works.get(ATTENTION, Work(0)), moved_bytes=traffic[name])}
        for name, works in phases.items()
    }


def _by_part(params: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Numbers and bytes of parameters by part."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        part = find_part("/".join(str(getattr(key, "key", key)) for key in path))
        counts[part] += math.prod(leaf.shape)
        sizes[part] += math.prod(leaf.shape) * leaf.dtype.itemsize
    return _in_order(counts), _in_order(sizes)


def _unused(config: Any, length: int) -> int:
    """Parameters of experts that a token does not choose, in all layers."""
    if not isinstance(config, TransformerConfig) or config.num_experts is None:
        return 0
    sides = [config] + ([config.encoder_side] if config.architecture == "encoder_decoder" else [])
    layers = sum(side.num_layers // len(side.mixtures) * sum(side.mixtures) for side in sides)
    own = feed_forward_cost(config, length)
    return layers * (own.total_parameters - own.active_parameters)


def _in_order(by_part: Mapping[str, Any]) -> dict[str, Any]:
    return {part: by_part[part] for part in PARTS if part in by_part}
