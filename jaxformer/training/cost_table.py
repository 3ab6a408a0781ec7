"""The cost of a run as text: a table of parts, memory, and the least times on a device."""

import math
from collections.abc import Mapping, Sequence

from jaxformer.analysis.model_costs.parts import PARTS
from jaxformer.analysis.roofline import Bound
from jaxformer.training.run_cost import RunCost

_PREFIXES = {-4: "p", -3: "n", -2: "µ", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E"}
_LEAST, _MOST = min(_PREFIXES), max(_PREFIXES)
_LARGEST = 1000.0 ** (_MOST + 1)


def short(number: float, unit: str = "") -> str:
    """A number with three figures and a prefix, 1.23 M, and the unit behind it."""
    if not abs(number) < _LARGEST:
        return f"{number:.3g} {unit}".rstrip()
    value = float(f"{number:.3g}")
    exponent = 0 if value == 0 else max(_LEAST, min(_MOST, math.floor(math.log10(abs(value))) // 3))
    scaled = value / 1000.0**exponent
    figures = f"{scaled:.0f}" if scaled == round(scaled) and (exponent == 0 or abs(scaled) >= 100) else f"{scaled:#.3g}"
    return f"{figures.rstrip('.')} {_PREFIXES[exponent]}{unit}".rstrip()


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def cost_table(cost: RunCost, device: str = "", bounds: Mapping[str, Bound] | None = None) -> str:
    """What a run costs; `bounds` are the least times on the device of that name."""
    parts = [_introduction(cost), _parts(cost), _memory(cost)]
    if bounds is not None:
        parts.append(_bounds(cost, device, bounds))
    return "\n\n".join(parts)


def _introduction(cost: RunCost) -> str:
    model, total = cost.model, sum(cost.model.parameters.values())
    active = "" if model.active_parameters == total else f", {model.active_parameters:,} active in a token"
    often = "" if cost.accumulation_steps == 1 else f", {cost.accumulation_steps} times an update"
    lines = [
        f"{cost.name}: {total:,} parameters{active}; {model.dtype}",
        f"{cost.batch_size} rows of {cost.length:,} tokens at a time{often}",
    ]
    if model.no_generation is not None:
        lines.append(f"no generation: {model.no_generation}")
    return "\n".join(lines)


def _parts(cost: RunCost) -> str:
    """Products of a token in each phase, by part."""
    model, phases = cost.model, list(cost.model.phases)
    head = ["operations of products a token", "parameters", *phases, "activations"]
    rows = []
    for part in PARTS:
        works = [model.phases[phase].get(part) for phase in phases]
        kept, own = model.activation_bytes.get(part, 0), model.parameters.get(part, 0)
        if not (own or kept or any(works)):
            continue
        counts = [0.0 if work is None else work.matmul / model.num_tokens[p] for work, p in zip(works, phases)]
        rows.append([part, _or_dash(own), *map(_or_dash, counts), _or_dash(kept, "B")])
    sums = [model.products_per_token(phase) for phase in phases]
    whole = ["all", short(sum(model.parameters.values())), *map(short, sums)]
    return columns([head, *rows, [*whole, short(sum(model.activation_bytes.values()), "B")]])


def _or_dash(number: float, unit: str = "") -> str:
    return short(number, unit) if number else "-"


def _memory(cost: RunCost) -> str:
    model = cost.model
    rows = [
        ["memory of training", short(cost.training_bytes, "B")],
        ["  parameters", short(sum(model.parameter_bytes.values()), "B")],
        ["  gradient", short(cost.gradient_bytes, "B")],
        ["  optimizer", short(cost.optimizer_bytes, "B")],
        ["  activations", short(sum(model.activation_bytes.values()), "B")],
    ]
    if model.state_bytes:
        rows.append(["  other state", short(model.state_bytes, "B")])
    if model.cache_bytes is not None:
        rows.append(["cache of generation", short(model.cache_bytes, "B")])
        rows.append(["  a token of a row", short(model.cache_bytes / (cost.batch_size * cost.length), "B")])
    for name, size in (model.temporary_bytes or {}).items():
        rows.append([f"temporaries of {name}, as compiled here", short(size, "B")])
    return columns(rows)


def _bounds(cost: RunCost, device: str, bounds: Mapping[str, Bound]) -> str:
    rows = [[f"least time on {device}", "seconds", "tokens/s at most", "bound by", "longest part"]]
    for name, bound in bounds.items():
        part = max(bound.parts, key=lambda part: bound.parts[part].seconds)
        share = bound.parts[part].seconds / bound.seconds
        speed = cost.model.num_tokens[name] / bound.seconds
        rows.append([name, short(bound.seconds, "s"), short(speed), bound.bound, f"{part} {share:.0%}"])
    return columns(rows)
