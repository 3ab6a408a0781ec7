"""The programs of a model whose costs are counted: its loss, and the phases of generation, on shapes alone."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.functional import chunked_cross_entropy, cross_entropy, mean_loss
from jaxformer.models import RecurrentSeq2Seq, TaskModel, Transformer


@dataclasses.dataclass(frozen=True)
class Phase:
    """A function, and the arguments or shapes that it is called with.

    Attributes:
      function: from `arguments`.
      arguments: arrays or `jax.ShapeDtypeStruct`.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Sizes of what a model reads.

    Attributes:
      batch_size: rows.
      length: tokens of a row.
      source_length: of an encoder's rows; None = there is no encoder of its own.
    """

    batch_size: int
    length: int
    source_length: int | None

    @property
    def num_tokens(self) -> int:
        """All tokens, of sources too."""
        return self.batch_size * (self.length + (self.source_length or 0))

    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the model's inputs by name."""
        lengths = {"tokens": self.length, "source": self.source_length}
        return {name: tokens(self.batch_size, length) for name, length in lengths.items() if length is not None}


def tokens(batch_size: int, length: int) -> jax.ShapeDtypeStruct:
    """The shape of token ids."""
    return jax.ShapeDtypeStruct((batch_size, length), jnp.int32)


def has_source(model: nn.Module) -> bool:
    """Whether the model has an encoder beside its decoder."""
    if isinstance(model, RecurrentSeq2Seq):
        return True
    return isinstance(model, Transformer) and model.config.architecture == "encoder_decoder"


def abstract_variables(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Shapes of the parameters and of what else the model keeps, by collection."""
    one = dataclasses.replace(inputs, batch_size=1).arrays()
    # A closure, so that no shape is taken for one of the key's.
    return dict(jax.eval_shape(lambda arrays: model.init(jax.random.key(0), **arrays), one))


def training_loss(
    model: nn.Module, variables: dict[str, Any], inputs: Inputs, chunk_size: int | None
) -> tuple[Callable[[Any, Any, Any], Array], tuple[Any, Any, Any]]:
    """The loss of a batch, as a function of parameters, inputs and rng, and the shapes of those.

    Every token of a language model's rows is supervised, the next one being its label; auxiliary losses are added. A
    task's head is trained by the mean of its squared outputs, which costs nothing beside the model.
    """
    others = {name: value for name, value in variables.items() if name != "params"}

    def loss(params: Any, arrays: dict[str, Any], rng: Array) -> Float[Array, ""]:
        given = {"params": params, **{name: _zeros(value) for name, value in others.items()}}
        options: Any = {"deterministic": False, "rngs": {"dropout": rng}, "mutable": list(others)}
        labels = jnp.roll(arrays["tokens"], -1, axis=1)
        if isinstance(model, Transformer) and chunk_size is not None:
            (hidden, aux), _ = model.apply(given, **arrays, method="hidden", **options)
            kernel: Any = model.apply({"params": params}, method="head_kernel")
            with jax.named_scope("token_head"):
                sums = chunked_cross_entropy(
                    hidden, kernel, labels, chunk_size=chunk_size, vocab_size=model.config.vocab_size
                )
                return _with_losses(mean_loss(sums.loss_sum, sums.weight_sum), aux)
        out, _ = model.apply(given, **arrays, **options)
        with jax.named_scope("token_head"):
            if isinstance(model, TaskModel):
                return _with_losses(jnp.square(out.logits.astype(jnp.float32)).mean(), out.aux)
            sums = cross_entropy(out.logits, labels)
            total = mean_loss(sums.loss_sum, sums.weight_sum)
            if out.next_sentence is not None:
                pairs = cross_entropy(out.next_sentence, labels[:, 0] * 0)
                total = total + mean_loss(pairs.loss_sum, pairs.weight_sum)
            return _with_losses(total, out.aux)

    return loss, (variables["params"], inputs.arrays(), jax.eval_shape(lambda: jax.random.key(0)))


def _with_losses(loss: Array, aux: Any) -> Array:
    return loss + sum(value.sum().astype(loss.dtype) for value in aux.losses.values())


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def generation(model: nn.Module, variables: dict[str, Any], inputs: Inputs) -> tuple[list[Any], Phase, Phase]:
    """The cache's shapes, reading a prompt of `length` tokens, and one more token of each row on a full cache.

    With an encoder the prompt is the source, which is encoded, and the decoder's first token; the cache has `length`
    slots all the same. Each phase computes the logits of the next token only.

    Raises:
      ValueError: the model does not generate.
    """
    rows, length = inputs.batch_size, inputs.length
    source = None if inputs.source_length is None else tokens(rows, inputs.source_length)

    def begin(variables: Any, source: Array | None) -> Any:
        if source is not None:
            return model.apply(variables, source, length, method="start")
        init_cache: Any = getattr(model, "init_cache", None)
        if init_cache is None:
            raise ValueError(f"a {type(model).__name__} does not generate")
        return init_cache(rows, length)

    cache, structure = _shapes(begin, variables, source)

    def step(variables: Any, tokens: Array, cache: Any) -> tuple[Array, list[Array]]:
        last = jnp.full((tokens.shape[0], 1), tokens.shape[1] - 1, jnp.int32)
        out: Any = model.apply(variables, tokens, cache=jax.tree.unflatten(structure, cache), select=last)
        return out.logits, jax.tree.leaves(out.aux.cache)

    one = tokens(rows, 1)
    if source is None:
        prefill = Phase(step, (variables, tokens(rows, length), cache))
    else:

        def translate(variables: Any, source: Array, tokens: Array) -> tuple[Array, list[Array]]:
            return step(variables, tokens, jax.tree.leaves(begin(variables, source)))

        prefill = Phase(translate, (variables, source, one))
    return cache, prefill, Phase(step, (variables, one, cache))


def _shapes(function: Callable[..., Any], *arguments: Any) -> tuple[list[Any], Any]:
    """Shapes of the leaves of what a function returns, and its structure: a tree of shapes alone may not be made."""
    structures = []

    def leaves(*arguments: Any) -> list[Any]:
        found, structure = jax.tree.flatten(function(*arguments))
        structures.append(structure)
        return found

    return jax.eval_shape(leaves, *arguments), structures[0]
