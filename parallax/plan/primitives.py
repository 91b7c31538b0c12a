"""Classifies an equation of a traced program by what it does on a device: arithmetic or messages.
Also tells whether the equation's result needs memory of its own."""

import math
from collections.abc import Mapping

from jax.extend.core import JaxprEqn

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
    "replicated",
    "terms",
    "reduce_precision",
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
PRODUCTS = {"dot_general", "conv_general_dilated"}
COLLECTIVES = {  # with their names in compiled programs
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all-gather"),
    "reduce_scatter": "reduce-scatter",
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
    """
    if eqn.primitive.name == "pallas_call":
        return int(eqn.params["cost_estimate"].flops)
    left, right = jaxprs.types(eqn.invars[:2])
    out = math.prod(jaxprs.types(eqn.outvars)[0].shape)
    if eqn.primitive.name == "dot_general":
        (over, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(left.shape[dim] for dim in over)
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


def axes(eqn: JaxprEqn, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes along which a collective moves data, without axes of size 1, in the order of
    the mesh. `sizes` has the number of devices on each axis of the mesh."""
    # Primitives call this parameter `axes` or `axis_name`.
    named = eqn.params.get("axes", eqn.params.get("axis_name"))
    named = named if isinstance(named, tuple) else (named,)
    return tuple(axis for axis in sizes if axis in named and sizes[axis] > 1)
