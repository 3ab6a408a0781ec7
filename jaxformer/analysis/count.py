"""What a function computes, by its own program: matrix products counted in its trace, and the compiler's figures.

The formulas of `jaxformer.analysis.cost` are checked against both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params

# Products that this count would miss; nothing in the attentions uses them.
NOT_COUNTED = ("conv_general_dilated", "ragged_dot_general", "pallas_call")


def count_matmul_operations(function: Callable, *args: Any) -> int:
    """Operations of all matrix products in `function(*args)`, a multiplication and an addition being two.

    The function is traced, neither compiled nor run: each dot_general counts 2 x batch x rows x columns x inner, as
    often as the scans around it run. Products within jit, checkpoint, vmap and custom derivatives count as they are
    executed, recomputation included. Of the branches of a cond the one with the most operations counts, so that blocks
    which a mask may hide count as computed. What the compiler would drop as unused or common counts too.

    Args:
      function: of arrays.
      args: arrays, or `jax.ShapeDtypeStruct` in place of them.

    Returns:
      The number of operations.

    Raises:
      ValueError: a product inside a loop of unknown length, or a product of a kind that is not counted.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


@dataclass(frozen=True)
class CompiledCost:
    """XLA's own figures of one compiled function; the body of a loop counts once there, however often it runs.

    Attributes:
      operations: floating-point operations, transcendental functions apart.
      moved_bytes: bytes that the compiled operations read and write.
      temporary_bytes: largest amount of memory in use beside arguments and results.
    """

    operations: float
    moved_bytes: float
    temporary_bytes: int


def compiled_cost(function: Callable, *args: Any) -> CompiledCost:
    """XLA's figures of `function(*args)`: compiles it for this machine and runs nothing.

    Args:
      function: of arrays.
      args: arrays, or `jax.ShapeDtypeStruct` in place of them.

    Raises:
      ValueError: the backend tells no costs.
    """
    compiled = jax.jit(function).lower(*args).compile()
    costs, memory = compiled.cost_analysis(), compiled.memory_analysis()
    if costs is None or memory is None:
        raise ValueError(f"backend {jax.default_backend()!r} tells no costs of what it compiles.")
    return CompiledCost(
        operations=float(costs["flops"]),
        moved_bytes=float(costs["bytes accessed"]),
        temporary_bytes=int(memory.temp_size_in_bytes),
    )


def _count(jaxpr: Jaxpr) -> int:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: JaxprEqn) -> int:
    name = equation.primitive.name
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left, result = (_shape(variable) for variable in (equation.invars[0], equation.outvars[0]))
        return 2 * math.prod(result) * math.prod(left[axis] for axis in contracted)
    if name in NOT_COUNTED:
        raise ValueError(f"the function uses {name}, whose operations are not counted.")
    counts = [_count(jaxpr) for jaxpr in jaxprs_in_params(equation.params)]
    if name == "cond":
        return max(counts)
    if name == "while" and any(counts):
        raise ValueError("the function multiplies matrices in a loop whose number of steps is unknown.")
    return sum(counts) * (equation.params["length"] if name == "scan" else 1)


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape
