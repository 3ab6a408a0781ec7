"""What a model attends to while it reads given tokens: the weights of all layers and heads, with their tokens."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxformer.analysis.map_parts import EVERYTHING, Part, check_numbers, cut, cutting, make_part
from jaxformer.data import Tokenizer
from jaxformer.inference.prompts import check_rows
from jaxformer.inference.sources import has_encoder
from jaxformer.models import RecurrentSeq2Seq

NAMES = {"encoder": "encoder_attention", "decoder": "attention", "cross": "cross_attention"}
"""What maps of an encoder-decoder are called, and the model's names of them."""

# Bytes of float32 weights that are recorded at most.
_LARGEST = 2**32


class AttentionMap(NamedTuple):
    """Attention weights of all layers and heads between tokens that are named.

    Attributes:
      weights: float32 [layers, N, T, S]; what row t takes of column s, before dropout.
      rows: the T tokens that look, as text.
      columns: the S tokens that are looked at.
      layers: the layers' numbers in the model; None = 0, 1, ….
      heads: the heads' numbers; None = 0, 1, ….
      first_row: index of the first of the rows in its text.
      total_rows: tokens of that text; None = the rows.
    """

    weights: Float[np.ndarray, "layers N T S"]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    first_row: int = 0
    total_rows: int | None = None


def record_attention(
    model: nn.Module,
    params: Any,
    token_ids: Sequence[int] | Int[np.ndarray, "T"],
    *,
    source_ids: Sequence[int] | Int[np.ndarray, "S"] | None = None,
    token_types: Sequence[int] | Int[np.ndarray, "T"] | None = None,
    tokenizer: Tokenizer | None = None,
    source_tokenizer: Tokenizer | None = None,
    model_state: Any = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
) -> dict[str, AttentionMap]:
    """The weights by which each token takes from the others in one pass, of any model, layer by layer, head by head.

    They are those that the kind of attention really uses, as a matrix: of local and sparse kinds with zeros outside the
    pattern, of hashed and routed ones with zeros where buckets and clusters kept tokens apart (rounds and clusters
    merged), of linear ones and Performer the normalised products of features. Linformer's are the factors of its
    values, neither positive nor of sum 1. O(layers N T²) memory, whatever the kind costs; of a long text record a
    window. To plot one head: ``plt.imshow(maps["attention"].weights[layer, head])``; all of them:
    ``attention_view(maps)``.

    Args:
      model: a ``Transformer``, a ``TaskModel`` or a ``RecurrentSeq2Seq``.
      params: its parameters.
      token_ids: what it reads, with its start and end ids where it was trained so [T]; of an encoder-decoder what the
        decoder reads, its start id in front.
      source_ids: of an encoder-decoder what the encoder reads [S]; None for the others.
      token_types: which text of a pair each token belongs to [T]; None = 0.
      tokenizer: names the tokens; None = they are named by their ids.
      source_tokenizer: names the source's; None = the same.
      model_state: the model's other variable collections, a dict (what a kind drew or learned: ``{"state": …}``).
      layers: numbers of the layers to keep, from 0; None = all.
      heads: numbers of the heads to keep; the others' weights take memory one layer at a time.
      window: first of the tokens that look to keep, and the one behind the last (of a text too short for that its last
        ones); the others' weights take memory one layer at a time. None = all.

    Returns:
      "attention", or of an encoder-decoder "encoder" [layers, N, S, S], "decoder" [layers, N, T, T] and "cross"
      [layers, N, T, S], rows and columns named by the tokens read. Tokens that the attention adds are columns before
      the others, named ``<added 0>``, …. Of a Universal Transformer layers are steps.

    Raises:
      ValueError: ids that are empty, out of range or more than the model has positions; a source where there is no
        encoder, or none where there is one; layers whose weights have different shapes; a kind whose values are not
        weighted by one matrix; layers, heads or a window that are not there; weights of more than 4 GiB; or something
        else than a model and its parameters.
    """
    part = make_part(layers, heads, window)
    if not hasattr(model, "config"):
        raise ValueError(f"model={model!r} must be a Transformer, a TaskModel or a RecurrentSeq2Seq")
    (ids,) = check_rows([token_ids], "token_ids", model.config.vocab_size)
    given: dict[str, Any] = {}
    if (source_ids is None) == has_encoder(model):
        needs = "needs source_ids" if source_ids is None else "has no encoder of its own, so source_ids must be None"
        raise ValueError(f"the model {needs}")
    source = None
    if source_ids is not None:
        size = getattr(model.config, "source_vocab_size", None) or model.config.vocab_size
        (source,) = check_rows([source_ids], "source_ids", size)
        given["source"] = jnp.asarray(source[None], jnp.int32)
    longest = max(ids.size, 0 if source is None else source.size)
    if part.window is not None and part.window[0] >= longest:
        raise ValueError(f"window={part.window} begins behind the {longest} tokens")
    if token_types is not None:
        if np.shape(token_types) != ids.shape:
            raise ValueError(f"token_types has shape {np.shape(token_types)}; must be one a token, {ids.shape}")
        given["token_types"] = jnp.asarray(token_types, jnp.int32)[None]
    variables = {"params": params, **(model_state or {})}
    check_layers(model)
    if not isinstance(params, Mapping) or not params or "params" in params:
        raise ValueError("params must be the model's parameters: variables['params'] of what init gave")
    weights = model_weights(model, variables, jnp.asarray(ids[None], jnp.int32), given, part)
    if not weights:
        raise ValueError(f"attention={getattr(model.config, 'attention', None)!r} has no weights to show")
    rows = token_texts(tokenizer, ids)
    columns = {"attention": rows}
    if source is not None:
        across = token_texts(source_tokenizer or tokenizer, source)
        columns |= {"encoder_attention": across, "cross_attention": across}
    sides = {"encoder_attention": columns.get("encoder_attention", rows)}
    names = {"attention": "attention"} if source is None else NAMES
    return {
        name: _map(weights[key], sides.get(key, rows), columns[key], part)
        for name, key in names.items()
        if key in weights
    }


def _map(
    weights: Float[Array, "layers 1 N R S"], rows: tuple[str, ...], columns: tuple[str, ...], part: Part
) -> AttentionMap:
    """The weights with their tokens; columns that no token read has are those that the attention added."""
    added = tuple(f"<added {place}>" for place in range(weights.shape[-1] - len(columns)))
    first, end = part.rows(len(rows))
    return AttentionMap(
        np.asarray(weights, np.float32)[:, 0],
        rows[first:end],
        (*added, *columns),
        part.layers,
        part.heads,
        first,
        len(rows),
    )


def check_layers(model: Any) -> None:
    """Refuse layers whose weights have different shapes, since they are stacked.

    Raises:
      ValueError: as said.
    """
    sides = [model.config]
    if getattr(model.config, "architecture", None) == "encoder_decoder":
        sides.append(model.config.encoder_side)
    for side in sides:
        added = {dict(choice.args).get("num_added", 0) for choice in getattr(side, "attentions", ())}
        if len(added) > 1:
            raise ValueError(
                f"attention={side.attention!r} adds different numbers of tokens in different layers (num_added="
                f"{sorted(added)}), so that their weights have different shapes"
            )


def model_weights(
    model: nn.Module,
    variables: Any,
    tokens: Int[np.ndarray | Array, "1 T"],
    given: dict[str, Any],
    part: Part = EVERYTHING,
) -> dict[str, Float[Array, "layers 1 N R S"]]:
    """The weights of one row by the model's own names.

    Args:
      model: of any kind that takes ``return_weights``.
      variables: its variables.
      tokens: what it reads.
      given: further arguments of its call.
      part: the layers, heads and rows to keep.

    Raises:
      ValueError: they take more than 4 GiB, or layers or heads of the part are not there.
    """
    whole = jax.eval_shape(functools.partial(_apply, model, EVERYTHING), variables, tokens, given)
    for name, leaf in whole.items():
        for wanted, what, count in ((part.layers, "layers", leaf.shape[0]), (part.heads, "heads", leaf.shape[2])):
            check_numbers(wanted, range(count), what, f"of the model's {name}")
    # A scan stacks the weights of all layers before those of some are taken.
    stacked = Part(None, part.heads, part.window)
    kept = jax.eval_shape(functools.partial(_apply, model, stacked), variables, tokens, given)
    size = max(sum(leaf.size for leaf in kept.values()), *(leaf.size // leaf.shape[0] for leaf in whole.values()), 0)
    if 4 * size > _LARGEST:
        total = sum(leaf.size for leaf in whole.values())
        raise ValueError(
            f"the weights of {tokens.shape[1]} tokens take {4 * size / 2**30:.1f} GiB in all layers, more than the "
            f"{_LARGEST // 2**30} GiB that are recorded: give fewer tokens, a window of at most "
            f"{max(1, tokens.shape[1] * _LARGEST // (4 * total))} tokens, or fewer heads"
        )
    return _apply(model, part, variables, tokens, given)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(
    model: nn.Module, part: Part, variables: Any, tokens: Int[Array, "1 T"], given: dict[str, Any]
) -> dict[str, Array]:
    """Weights with a leading layer axis; what a model returns beside them (shares of halting) is left out."""
    with nn.intercept_methods(cutting(part)):
        output: Any = model.apply(variables, tokens, **given, return_weights=True)
    weights = output.aux.weights
    found = {name: array if array.ndim == 5 else array[None] for name, array in weights.items() if array.ndim > 3}
    if isinstance(model, RecurrentSeq2Seq):  # has no layers that could cut
        found = {name: cut(array, part) for name, array in found.items()}
    return found if part.layers is None else {name: array[jnp.array(part.layers)] for name, array in found.items()}


def token_texts(tokenizer: Tokenizer | None, ids: Sequence[int] | Int[np.ndarray, "L"]) -> tuple[str, ...]:
    """Each token by itself as text, for labels; one that has none by its role, or by its id in angle brackets."""
    if tokenizer is None:
        return tuple(f"<{int(token)}>" for token in ids)
    roles = {tokenizer.pad_id: "<pad>", tokenizer.bos_id: "<bos>", tokenizer.eos_id: "<eos>"}
    return tuple(_text(tokenizer, int(token), roles) for token in ids)


def _text(tokenizer: Tokenizer, token: int, roles: dict[int | None, str]) -> str:
    if token in roles:
        return roles[token]
    text = tokenizer.decode([token]) if token < tokenizer.vocab_size else ""
    return f"<{token}>" if text in ("", "\ufffd") else text
