"""Counts the arithmetic of an equation of a traced program: of matmuls, convolutions, and Pallas
kernels that state it. Also finds the program that a linear solve runs."""

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from parallax import jaxprs

PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}


def operations(eqn: JaxprEqn) -> int:
    """Returns the floating-point operations of a matmul or a convolution: 2 for each product of two
    numbers that is added to a sum. For a Pallas kernel, returns the number that the kernel states.
    A `lax.ragged_dot` multiplies each row with the matrix of one group. Where JAX has no kernel for
    it, as on CPUs, the compiled program multiplies each row with the matrices of all groups.
    """
    if eqn.primitive.name == "pallas_call":
        return int(eqn.params["cost_estimate"].flops)
    left, right = jaxprs.types(eqn.invars[:2])
    out = math.prod(jaxprs.types(eqn.outvars)[0].shape)
    if eqn.primitive.name == "dot_general":
        (over, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(left.shape[dim] for dim in over)
    if eqn.primitive.name == "ragged_dot_general":
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (over, _), _ = numbers.dot_dimension_numbers
        (ragged,) = numbers.lhs_ragged_dimensions
        # If the groups divide the dim that is summed over, each group has a result of its own, for
        # which only its own terms are added up.
        groups = jaxprs.types(eqn.invars)[2].shape[-1] if ragged in over else 1
        return 2 * out * math.prod(left.shape[dim] for dim in over) // max(groups, 1)
    # The dims of the kernel: first its output features, then its input features and the dims of
    # space. A sum goes over all of them but the first.
    kernel = eqn.params["dimension_numbers"].rhs_spec
    terms = out * math.prod(right.shape[dim] for dim in kernel[1:])
    # The transpose of a strided convolution reads its input with zeros between the numbers, and
    # does not multiply those.
    return 2 * terms // math.prod(eqn.params["lhs_dilation"])


def is_product(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a matmul, a convolution, or a Pallas kernel with a stated
    cost. A `dot_general` of two vectors does not count: compilers run it as a multiplication and a
    sum."""
    if eqn.primitive.name == "pallas_call":
        return eqn.params["cost_estimate"] is not None
    if eqn.primitive.name != "dot_general":
        return eqn.primitive.name in PRODUCTS
    # An operand must have a dim that is neither summed over nor a batch dim; vectors have none.
    (over, _), (batched, _) = eqn.params["dimension_numbers"]
    return any(len(each.shape) > len(over) + len(batched) for each in jaxprs.types(eqn.invars))


def only_multiplies(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a `dot_general` that sums over no dim. Compilers treat such an
    equation as an elementwise multiplication."""
    return eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][0][0]


def solve(eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """Returns the program that a `custom_linear_solve` runs, and those of its `operands` that the
    program takes.

    The equation has four programs, but only `solve` runs: the others are for its gradient. The
    operands are first the constants of each program, and then arrays that every program takes.
    """
    lengths = eqn.params["const_lengths"]
    first, last = lengths.matvec + lengths.vecmat, sum(lengths)
    taken = [*operands[first : first + lengths.solve], *operands[last:]]
    return jaxprs.opened(eqn.params["jaxprs"].solve), taken
