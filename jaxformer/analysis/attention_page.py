"""The page of attention maps: one HTML text with its style, its program and its weights, compressed."""

import base64
import html
import importlib.resources
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from jaxformer.analysis.eight_bits import eight_bits
from jaxformer.analysis.map_parts import span
from jaxformer.analysis.recording import AttentionMap

MOST_WEIGHTS = 8_000_000
"""Weights that a page holds at most, a byte each."""

_SCRIPTS = ("data.js", "state.js", "lines.js", "matrix.js", "heads.js", "main.js")
_TITLES = {
    "attention": "self-attention",
    "encoder": "encoder",
    "decoder": "decoder",
    "cross": "decoder to encoder",
}


def make_page(
    maps: Mapping[str, AttentionMap],
    *,
    second: int | None,
    window: tuple[int, int] | None,
    title: str,
) -> str:
    """The HTML of an ``AttentionView``, whose attributes the arguments are."""
    windows = _windows(maps, window)
    facts, values, offset = [], [], 0
    for name, shown in maps.items():
        (first_row, end_row), (first_column, end_column) = windows[name]
        # Columns are cut after rounding, so that what a row has outside of the window can be told.
        rows = slice(first_row - shown.first_row, end_row - shown.first_row)
        stored = eight_bits(shown.weights[:, :, rows])
        kept = stored.values[..., first_column:end_column]
        values.append(kept.tobytes())
        facts.append(
            {
                "title": _TITLES.get(name, name),
                "layers": list(shown.layers or range(kept.shape[0])),
                "heads": list(shown.heads or range(kept.shape[1])),
                "rows": list(shown.rows[rows]),
                "columns": list(shown.columns[first_column:end_column]),
                "firstRow": first_row,
                "firstColumn": first_column,
                "totalRows": len(shown.rows) if shown.total_rows is None else shown.total_rows,
                "totalColumns": len(shown.columns),
                "scales": _short(stored.scales.tolist()),
                "offset": offset,
            }
        )
        offset += kept.size
    parts = [{"title": entry["title"], "map": place} for place, entry in enumerate(facts)]
    if second is not None:
        parts = _pair_parts(facts[0], second)
    return _fill(title, {"title": title, "maps": facts, "parts": parts}, b"".join(values))


def _short(scales: list[list[float]]) -> list[list[float]]:
    """Numbers with the digits that 8 bits need."""
    return [[float(f"{scale:.6g}") for scale in layer] for layer in scales]


def _windows(
    maps: Mapping[str, AttentionMap], window: tuple[int, int] | None
) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """First and end of the rows and columns of each map that the page holds."""
    if window is None:  # everything, or else from the first recorded row on
        first, longest = max(m.first_row for m in maps.values()), max(max(m.weights.shape[2:]) for m in maps.values())
    else:
        first, longest = window[0], window[1] - window[0]

    def spans(size: int) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
        return {
            name: (
                span(first, size, m.first_row, m.first_row + len(m.rows)),
                span(first, size, 0, len(m.columns)),
            )
            for name, m in maps.items()
        }

    def count(size: int) -> int:
        return sum(
            m.weights.shape[0] * m.weights.shape[1] * (rows[1] - rows[0]) * (columns[1] - columns[0])
            for m, (rows, columns) in zip(maps.values(), spans(size).values())
        )

    low, high = 1, longest
    while low < high:  # the largest size that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(middle) <= MOST_WEIGHTS else (low, middle - 1)
    return spans(low)


def _pair_parts(shown: dict[str, Any], second: int) -> list[dict[str, Any]]:
    """The views of a pair of texts, as rows and columns of the one map within its window."""

    def sides(start: int, first: int, count: int) -> dict[str, list[int]]:
        middle = min(max(start - first, 0), count)
        return {"A": [0, middle], "B": [middle, count]}

    added = max(0, shown["totalColumns"] - shown["totalRows"])
    rows = sides(second, shown["firstRow"], len(shown["rows"]))
    columns = sides(second + added, shown["firstColumn"], len(shown["columns"]))
    parts: list[dict[str, Any]] = [{"title": "both texts", "map": 0}]
    for over, along in ("AA", "AB", "BA", "BB"):
        part = {"title": f"text {over} to text {along}", "map": 0, "rows": rows[over], "columns": columns[along]}
        if rows[over][0] < rows[over][1] and columns[along][0] < columns[along][1]:
            parts.append(part)
    return parts


def _fill(title: str, facts: dict[str, Any], values: bytes) -> str:
    folder = importlib.resources.files("jaxformer.analysis") / "page"
    read = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", *_SCRIPTS)}
    # No token can end the element that holds it, nor be anything else than text.
    text = json.dumps(facts, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    pieces = {
        "title": html.escape(title),
        "style": read["page.css"],
        "facts": text,
        "weights": base64.b64encode(zlib.compress(values, 6)).decode(),
        "script": "\n".join(read[name] for name in _SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: pieces[match[1]], read["page.html"])


def framed(page: str, title: str, height: int) -> str:
    """A page in a frame of its own, so that a notebook and the page don't touch each other."""
    return (
        f'<iframe title="{html.escape(title)}" srcdoc="{html.escape(page)}" sandbox="allow-scripts" '
        f'style="width:100%;height:{height}px;border:0;border-radius:8px"></iframe>'
    )
