"""Classifies an equation of a traced program by what it does on a device: arithmetic or messages.
Also tells whether the equation's result needs memory of its own."""

import math
from collections.abc import Mapping

from jax.extend.core import JaxprEqn

from parallax import arithmetic, jaxprs

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


def is_unread(eqn: JaxprEqn) -> bool:
    """Returns whether an equation may do work that is not counted: a kernel that does not state its
    operations, or an equation whose inner programs nobody reads, with matmuls, loops or messages in
    them."""
    if eqn.primitive.name in ("pallas_call", "ffi_call"):
        return eqn.params.get("cost_estimate") is None
    costly = arithmetic.PRODUCTS | COLLECTIVES.keys() | {"linear_collective", "scan", "while"}
    inside = (each for body in jaxprs.inner(eqn) for each in jaxprs.every(body))
    return any(each.primitive.name in costly for each in inside)


def axes(eqn: JaxprEqn, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes along which a collective moves data, without axes of size 1, in the order of
    the mesh. `sizes` has the number of devices on each axis of the mesh."""
    # Primitives call this parameter `axes` or `axis_name`.
    named = eqn.params.get("axes", eqn.params.get("axis_name"))
    named = named if isinstance(named, tuple) else (named,)
    return tuple(axis for axis in sizes if axis in named and sizes[axis] > 1)
