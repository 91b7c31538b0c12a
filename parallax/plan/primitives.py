"""Classifies an equation of a traced program by what it does on a device: arithmetic or messages.
Also tells whether the equation's result needs memory of its own."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from parallax import jaxprs

# Results of these need no memory of their own: readers read the operand in its place.
SAME = {  # the same numbers, at most in another shape
    "reshape",
    "squeeze",
    "expand_dims",
    "pvary",
    "copy",
    "copy_p",
    "stop_gradient",
    "reduce_precision",
    "name",
    # These change only what the type of a value says about mesh axes
    *("replicated", "terms", "preduced", "vary_unreduced_cast", "vary_unreduced_cast_p"),
}
PARTS = {"slice", "dynamic_slice"}  # some of the numbers
VIEWS = SAME | PARTS | {"rev", "broadcast_in_dim", "iota", "pad"}
FUSED = VIEWS | jaxprs.CHEAP | jaxprs.DEAR  # views and elementwise operations
# These hold their result, and compute fused operands as they read them.
READERS = {
    "concatenate",
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "argmax",
    "argmin",
}
# These change a part of their first operand.
UPDATES = {
    *("dynamic_update_slice", "scatter", "scatter-add", "scatter-sub"),
    *("scatter-mul", "scatter-min", "scatter-max"),
}
PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}
COLLECTIVES = {  # with their names in compiled programs
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum"), "all-reduce"),
    **dict.fromkeys(("pmax", "pmin", "unreduced_pmax", "unreduced_pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all-gather"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "reduce-scatter"),
    **dict.fromkeys(("pbroadcast", "pbroadcast_dynamic"), "collective-broadcast"),
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
}


def nbytes(aval) -> int:
    """Returns the bytes of an array of the abstract type `aval`; 0 for a type that is no array
    type."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return itemsize * math.prod(getattr(aval, "shape", ()))


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


def is_unread(eqn: JaxprEqn) -> bool:
    """Returns whether an equation may do work that is not counted: a kernel that does not state its
    operations, or an equation whose inner programs nobody reads, with matmuls, loops or messages in
    them."""
    if eqn.primitive.name in ("pallas_call", "ffi_call"):
        return eqn.params.get("cost_estimate") is None
    costly = PRODUCTS | COLLECTIVES.keys() | {"linear_collective", "scan", "while"}
    inside = (each for body in jaxprs.inner(eqn) for each in jaxprs.every(body))
    return any(each.primitive.name in costly for each in inside)


def solve(eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[Jaxpr, list[Any]]:
    """Returns the program that a `custom_linear_solve` runs, and those of its `operands` that the
    program takes.

    The equation has four programs, but only `solve` runs: the others are for its gradient. The
    operands are first the constants of each program, and then the operands of all programs.
    """
    lengths = eqn.params["const_lengths"]
    first, last = lengths.matvec + lengths.vecmat, sum(lengths)
    taken = [*operands[first : first + lengths.solve], *operands[last:]]
    return jaxprs.opened(eqn.params["jaxprs"].solve), taken


def only_multiplies(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a `dot_general` that sums over no dim. Compilers treat such an
    equation as an elementwise multiplication."""
    return eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][0][0]


def axes(eqn: JaxprEqn, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes along which a collective moves data, without axes of size 1, in the order of
    the mesh. `sizes` has the number of devices on each axis of the mesh."""
    # Primitives call this parameter `axes` or `axis_name`.
    named = eqn.params.get("axes", eqn.params.get("axis_name"))
    named = named if isinstance(named, tuple) else (named,)
    return tuple(axis for axis in sizes if axis in named and sizes[axis] > 1)
