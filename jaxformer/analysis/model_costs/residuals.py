"""What the forward pass keeps for the backward pass, part by part: the memory of activations."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Var, jaxprs_in_params

from jaxformer.analysis.model_costs.parts import find_part
from jaxformer.analysis.model_costs.program import scope_of


def saved_bytes(loss: Callable[[Any], jax.Array], params: Any) -> dict[str, int]:
    """Bytes of arrays that the gradient of `loss(params)` keeps from the forward pass, parameters apart.

    They are what differentiation itself keeps, under the config's recomputation; a compiler may keep less, by computing
    some again or storing them where others were. An array belongs to the part that made it.

    Args:
      loss: scalar function of the parameters.
      params: tree of arrays or of `jax.ShapeDtypeStruct`.

    Returns:
      Bytes by part; parts that keep nothing are missing.
    """
    jaxpr = jax.make_jaxpr(lambda params: jax.tree.leaves(jax.vjp(loss, params)[1]))(params).jaxpr
    given = {*jaxpr.invars, *jaxpr.constvars}
    kept = dict.fromkeys(var for var in jaxpr.outvars if not isinstance(var, Literal) and var not in given)
    sizes: Counter[str] = Counter()
    for var in kept:
        sizes[_maker(jaxpr, var, "")] += math.prod(var.aval.shape) * var.aval.dtype.itemsize
    return dict(sizes)


def _maker(jaxpr: Jaxpr, var: Var, outside: str) -> str:
    """The part of the equation that makes a variable: within loops and calls the innermost one."""
    for equation in reversed(jaxpr.eqns):
        if var not in equation.outvars:
            continue
        scope, place = scope_of(equation, outside), equation.outvars.index(var)
        for inner in jaxprs_in_params(equation.params):
            # Of loops and calls the results stand in the same order inside.
            if len(inner.outvars) == len(equation.outvars):
                made = inner.outvars[place]
                if isinstance(made, Var) and made not in inner.invars:
                    return _maker(inner, made, scope)
        return find_part(scope)
    return find_part(outside)
