"""Attention to look at: an object that shows itself in notebooks, and one HTML file that needs no network."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from jaxformer.analysis.attention_page import framed, make_page
from jaxformer.analysis.map_parts import Part, check_numbers, make_part
from jaxformer.analysis.recording import AttentionMap

Weights = AttentionMap | Mapping[str, AttentionMap] | Sequence[ArrayLike] | ArrayLike


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AttentionView:
    """Attention maps as a page: lines between tokens, the matrix of a head, and all heads of all layers.

    A notebook shows it where it is the value of a cell.

    Attributes:
      maps: float32 weights [layers, N, T, S] with their tokens, by name.
      second: index of the first token of the second text of a pair; None = one text.
      window: first token and the one behind the last that the page holds, of rows and of columns; None = as many from
        the first on as its size allows.
      title: of the page.
      height: of the frame in a notebook, in pixels.
    """

    maps: Mapping[str, AttentionMap]
    second: int | None = None
    window: tuple[int, int] | None = None
    title: str = "Attention"
    height: int = 680

    @functools.cached_property
    def html(self) -> str:
        """The whole page. It holds what it needs, and a policy that forbids it to load anything."""
        return make_page(self.maps, second=self.second, window=self.window, title=self.title)

    def __repr__(self) -> str:
        """Sizes alone: a console would print all weights."""
        sizes = (
            f"{name}: {shown.weights.shape[0]} layers of {shown.weights.shape[1]} heads, {len(shown.rows)} tokens to "
            f"{len(shown.columns)}"
            for name, shown in self.maps.items()
        )
        return f"AttentionView({'; '.join(sizes)})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page as an HTML file."""
        Path(path).write_text(self.html, encoding="utf-8")

    def bertviz(self, convert: Callable[[np.ndarray], Any] = np.asarray) -> dict[str, Any]:
        """The arguments of BertViz's ``head_view`` and ``model_view``: ``head_view(**view.bertviz(torch.from_numpy))``.

        BertViz (Vig 2019, arXiv:1906.05714) takes torch tensors, a list with [1, N, T, S] of each layer.

        Args:
          convert: makes a tensor of an array.

        Returns:
          Of one map "attention" and "tokens", and "sentence_b_start" of a pair; of an encoder-decoder
          "encoder_attention", "decoder_attention", "cross_attention", "encoder_tokens" and "decoder_tokens", as far as
          there are such maps. The decoder's tokens are those that it reads.

        Raises:
          ValueError: a map between two texts without a name that BertViz has, or other names than these.
        """
        lists = {
            name: [convert(np.ascontiguousarray(layer[None])) for layer in shown.weights]
            for name, shown in self.maps.items()
        }
        if len(self.maps) == 1 and "cross" not in self.maps:
            ((name, shown),) = self.maps.items()
            if shown.weights.shape[2] != shown.weights.shape[3]:
                raise ValueError(f"the map {name!r} has other columns than rows; BertViz shows such as 'cross' alone")
            pair = {} if self.second is None else {"sentence_b_start": self.second}
            return {"attention": lists[name], "tokens": list(shown.columns), **pair}
        unknown = set(self.maps) - {"encoder", "decoder", "cross"}
        if unknown:
            raise ValueError(f"maps {sorted(unknown)} have no place in BertViz, which has encoder, decoder and cross")
        found: dict[str, Any] = {f"{name}_attention": layers for name, layers in lists.items()}
        for name, side in (("cross", "encoder"), ("encoder", "encoder"), ("decoder", "decoder")):
            if name in self.maps:
                found[f"{side}_tokens"] = list(self.maps[name].columns)
        if "decoder_tokens" not in found and "cross" in self.maps:
            found["decoder_tokens"] = list(self.maps["cross"].rows)
        return found

    def _repr_html_(self) -> str:
        return framed(self.html, self.title, self.height)


def attention_view(
    weights: Weights,
    tokens: Sequence[str] | None = None,
    column_tokens: Sequence[str] | None = None,
    *,
    second: int | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
    title: str = "Attention",
    height: int = 680,
) -> AttentionView:
    """Shows attention weights: lines from token to token, a head's matrix, and a small picture of each head.

    The page holds 8 bits a weight: where rows are distributions they sum to 255 of 255 units (by largest remainder; no
    weight is off by 1/255 or more), other weights are rounded to 1/127 of the largest of their head. It holds at most
    8 million weights, so that the file stays under 12 MB; of longer texts it holds a window and says so.

    Args:
      weights: what ``record_attention`` or ``attention_maps`` gave, or one of its maps, or an array [layers, N, T, S],
        [N, T, S] of one layer or [T, S] of one head, or a list of the layers' [N, T, S] or [1, N, T, S].
      tokens: of arrays: the T tokens that look, as text; None = their numbers.
      column_tokens: the S tokens that are looked at; None = the same.
      second: of a pair of texts in one sequence the index of the second's first token.
      layers: numbers of the layers to keep, from 0, in that order; None = all.
      heads: numbers of the heads to keep.
      window: first token and the one behind the last, of rows and columns: (100, 200). None = from the first on, as
        many as the page may hold.
      title: of the page.
      height: of the frame in a notebook, in pixels.

    Returns:
      An ``AttentionView``: the value of a notebook's cell, or ``.save("view.html")``, or ``.bertviz()``.

    Raises:
      ValueError: weights of other shapes or not finite, tokens that are not as many as rows or columns, or numbers out
        of range.
    """
    part = make_part(layers, heads, window)
    maps = _as_maps(weights, tokens, column_tokens)
    maps = {name: _selected(name, _checked(name, shown), part) for name, shown in maps.items()}
    longest = max(max(_total_rows(shown), len(shown.columns)) for shown in maps.values())
    if part.window is not None and part.window[0] >= longest:
        raise ValueError(f"window={part.window} begins behind the {longest} tokens")
    if second is not None and (len(maps) != 1 or not _is_whole(second) or not 0 < second < longest):
        raise ValueError(f"second={second!r} must be in [1, {longest - 1}], of one map of a sequence with two texts")
    if not _is_whole(height) or height < 1:
        raise ValueError(f"height={height!r} must be a number of pixels")
    return AttentionView(maps, None if second is None else int(second), part.window, str(title), int(height))


def _is_whole(number: Any) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def _total_rows(shown: AttentionMap) -> int:
    return len(shown.rows) if shown.total_rows is None else shown.total_rows


def _as_maps(
    weights: Any, tokens: Sequence[str] | None, column_tokens: Sequence[str] | None
) -> dict[str, AttentionMap]:
    """What was given as maps by name."""
    if isinstance(weights, Mapping | AttentionMap):
        if tokens is not None or column_tokens is not None:
            raise ValueError("tokens can't be given with a map, which has its own")
        maps = dict(weights) if isinstance(weights, Mapping) else {"attention": weights}
        if not maps or not all(isinstance(shown, AttentionMap) for shown in maps.values()):
            raise ValueError("weights must hold an AttentionMap by name, or be an array: see record_attention")
        return maps
    array = _as_array(weights)
    rows = _texts(tokens, array.shape[2], "tokens", "rows")
    if column_tokens is None and tokens is not None and array.shape[3] == array.shape[2]:
        column_tokens = rows
    return {"attention": AttentionMap(array, rows, _texts(column_tokens, array.shape[3], "column_tokens", "columns"))}


def _as_array(weights: Any) -> np.ndarray:
    """Arrays as [layers, N, T, S]."""
    if isinstance(weights, list | tuple):
        weights = [_read(layer) for layer in weights]
        if len({layer.shape for layer in weights}) > 1:
            raise ValueError(f"weights has layers of shapes {[layer.shape for layer in weights]}; they must be equal")
        if weights and weights[0].ndim == 4 and weights[0].shape[0] == 1:
            weights = [layer[0] for layer in weights]
    array = _read(weights)
    if not 2 <= array.ndim <= 4 or 0 in array.shape:
        raise ValueError(f"weights has shape {array.shape}; must be [layers, heads, rows, columns], none of them 0")
    return array.reshape((1,) * (4 - array.ndim) + array.shape).astype(np.float32)


def _read(weights: Any) -> np.ndarray:
    """Numbers of any library as an array."""
    try:
        array = np.asarray(weights)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"weights, a {type(weights).__name__}, can't be read as an array: {error}") from error
    if array.dtype.kind not in "biuf" and str(array.dtype) != "bfloat16":
        raise ValueError(f"weights has dtype {array.dtype}; must be real numbers")
    return array


def _texts(given: Sequence[str] | None, count: int, name: str, axis: str) -> tuple[str, ...]:
    if given is None:
        return tuple(map(str, range(count)))
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ValueError(f"{name}={given!r} must be a sequence of texts, one a token")
    texts = tuple(map(str, given))
    if len(texts) != count:
        raise ValueError(f"{name} has {len(texts)} texts; must be {count}, one for each of the {axis} of weights")
    return texts


def _checked(name: str, shown: AttentionMap) -> AttentionMap:
    """A map with weights in float32 that fit its tokens.

    Raises:
      ValueError: weights that do not fit, or are not finite.
    """
    weights = _read(shown.weights)
    if weights.ndim != 4 or 0 in weights.shape or weights.shape[2:] != (len(shown.rows), len(shown.columns)):
        raise ValueError(
            f"weights: the map {name!r} has weights of shape {weights.shape}, {len(shown.rows)} rows and "
            f"{len(shown.columns)} columns; must be [layers, heads, rows, columns]"
        )
    for what, numbers, count in zip(("layers", "heads"), (shown.layers, shown.heads), weights.shape):
        if numbers is not None and len(numbers) != count:
            raise ValueError(f"weights: the map {name!r} has {count} {what} and {len(numbers)} numbers of them")
    weights = weights.astype(np.float32)
    if not np.isfinite(weights).all():
        raise ValueError(f"weights: the map {name!r} has weights that are not finite")
    return shown._replace(weights=weights, rows=tuple(map(str, shown.rows)), columns=tuple(map(str, shown.columns)))


def _selected(name: str, shown: AttentionMap, part: Part) -> AttentionMap:
    """The wanted layers and heads of a map, by the numbers that it gives them."""
    weights, numbers = shown.weights, {"layers": shown.layers, "heads": shown.heads}
    for axis, (what, wanted) in enumerate((("layers", part.layers), ("heads", part.heads))):
        if wanted is not None:
            known = list(numbers[what] or range(weights.shape[axis]))
            check_numbers(wanted, known, what, f"of the map {name!r}")
            weights = np.take(weights, [known.index(number) for number in wanted], axis)
            numbers[what] = wanted
    return shown._replace(weights=weights, layers=numbers["layers"], heads=numbers["heads"])
