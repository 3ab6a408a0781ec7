"""Everything that a config may name, with a line each."""

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxformer.training.config import bundled_configs


def catalogue() -> dict[str, dict[str, str]]:
    """By kind of thing, each name with a line of what it is."""
    from jaxformer.data import DATASETS, PAIR_DATASETS, PICTURES, TASKS
    from jaxformer.models import MODELS
    from jaxformer.training.objectives import OBJECTIVES
    from jaxformer.training.optimizers import OPTIMIZERS
    from jaxformer.training.schedules import SCHEDULES

    return {
        "experiments": {name: _first_line(_module_docstring(path)) for name, path in bundled_configs().items()},
        "attentions": _attentions(),
        "models": _documented(MODELS),
        "datasets": _documented(DATASETS),
        "pairs": _documented(PAIR_DATASETS),
        "pictures": _documented(PICTURES),
        "tasks": {name: f"{task.summary} ({task.paper})" for name, task in TASKS.items()},
        "objectives": _documented(OBJECTIVES),
        "optimizers": _documented(OPTIMIZERS),
        "schedules": _documented(SCHEDULES),
    }


def _attentions() -> dict[str, str]:
    """Kinds and patterns: what a query sees and whose it is; whether causal, whether it decodes with a cache; cost."""
    from jaxformer.attention import ATTENTION, PATTERNS

    described = {}
    kinds: dict[str, Any] = {**ATTENTION, **PATTERNS}
    for name, kind in kinds.items():
        causal = "causal" if kind.causal else "never causal"
        decodes = "decodes" if name in PATTERNS or ATTENTION[name].decodes else "no decoding"
        authors, _, rest = kind.paper.partition(', "')
        source = f"{authors}, {rest.rpartition(', ')[2]}"
        described[name] = f"{kind.summary} ({source})\n{causal:<12}  {decodes:<11}  {kind.cost}"
    return described


def _documented(table: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    return {name: _first_line(function.__doc__) for name, function in table.items()}


def _module_docstring(path: Path) -> str | None:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def _first_line(docstring: str | None) -> str:
    return docstring.strip().splitlines()[0] if docstring else ""
