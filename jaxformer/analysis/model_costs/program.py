"""What a program computes, part by part: its trace is read equation by equation, as often as loops run them."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

from jaxformer.analysis.costs.work import Work
from jaxformer.analysis.count import NOT_COUNTED
from jaxformer.analysis.model_costs.parts import ATTENTION, find_part, is_attention_layer

# An operation for each element of the result.
_ELEMENTWISE = frozenset(
    (
        *("abs", "add", "add_any", "cbrt", "clamp", "cos", "cumlogsumexp", "cummax", "cumprod", "cumsum", "div", "erf"),
        *("exp", "exp2", "expm1", "integer_pow", "log", "log1p", "logistic", "max", "min", "mul", "neg", "pow"),
        *("rsqrt", "select_n", "sign", "sin", "sqrt", "square", "sub", "tanh"),
    )
)
# An operation for each element of what is reduced.
_REDUCING = frozenset(["argmax", "argmin", "reduce_max", "reduce_min", "reduce_prod", "reduce_sum"])

Tally = Counter[tuple[str, str]]
"""Sums by (part, name of a field of `Work`)."""


def count_by_part(
    function: Callable, *args: Any, matrices: frozenset[tuple[int, int]] = frozenset()
) -> dict[str, Work]:
    """Operations and traffic of `function(*args)` for each part of a model; traced, neither compiled nor run.

    Products count as in `jaxformer.analysis.count_matmul_operations`, to the same sum. Other operations are one for
    each element of floating arrays that arithmetic makes or a reduction reads. Moved bytes are the operands and results
    of products, once for each time that they run; what single elements' operations read and write is left out, as if
    all of it were fused into products.

    Args:
      function: of arrays.
      args: arrays, or `jax.ShapeDtypeStruct` in place of them.
      matrices: shapes of the output projections' kernels, which stand among the attention layers' own products.

    Returns:
      `Work` by part; parts that compute nothing are missing.

    Raises:
      ValueError: a product inside a loop of unknown length, or a product of a kind that is not counted.
    """
    tally = _walk(jax.make_jaxpr(function)(*args).jaxpr, "", matrices)
    names = {part for part, _ in tally}
    return {part: Work(**{name: tally[part, name] for name in ("matmul", "other", "moved_bytes")}) for part in names}


def scope_of(equation: JaxprEqn, outside: str) -> str:
    """The names under which an equation was traced, after those of the equation that it stands in."""
    own = str(equation.source_info.name_stack)
    return f"{outside}/{own}" if own else outside


def _walk(jaxpr: Jaxpr, outside: str, matrices: frozenset[tuple[int, int]]) -> Tally:
    tally: Tally = Counter()
    for equation in jaxpr.eqns:
        tally.update(_equation(equation, outside, matrices))
    return tally


def _equation(equation: JaxprEqn, outside: str, matrices: frozenset[tuple[int, int]]) -> Tally:
    name, scope = equation.primitive.name, scope_of(equation, outside)
    if name == "dot_general":
        return _product(equation, scope, matrices)
    if name in NOT_COUNTED:
        raise ValueError(f"the model uses {name}, whose operations are not counted; trace it for another backend.")
    inner = [_walk(jaxpr, scope, matrices) for jaxpr in jaxprs_in_params(equation.params)]
    if not inner:
        return _elements(equation, scope)
    if name == "cond":
        return max(inner, key=_products)
    if name == "while" and any(map(_products, inner)):
        raise ValueError("the model multiplies matrices in a loop whose number of steps is unknown.")
    times = equation.params["length"] if name == "scan" else 1
    tally: Tally = Counter()
    for part in inner:
        tally.update({key: times * value for key, value in part.items()})
    return tally


def _products(tally: Tally) -> int:
    return sum(value for (_, name), value in tally.items() if name == "matmul")


def _product(equation: JaxprEqn, scope: str, matrices: frozenset[tuple[int, int]]) -> Tally:
    (contracted, _), _ = equation.params["dimension_numbers"]
    arrays: list[Any] = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    part = find_part(scope)
    if is_attention_layer(scope) and not any(array.shape in matrices for array in arrays):
        part = ATTENTION
    operations = 2 * math.prod(arrays[-1].shape) * math.prod(arrays[0].shape[axis] for axis in contracted)
    moved = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    return Counter({(part, "matmul"): operations, (part, "moved_bytes"): moved})


def _elements(equation: JaxprEqn, scope: str) -> Tally:
    name = equation.primitive.name
    array: Any
    if name in _ELEMENTWISE:
        array = equation.outvars[0].aval
    elif name in _REDUCING:
        array = equation.invars[0].aval
    else:
        return Counter()
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return Counter()
    part = ATTENTION if is_attention_layer(scope) else find_part(scope)
    return Counter({(part, "other"): math.prod(array.shape)})
