"""What an equation of a traced program does on a device: arithmetic, messages, and whether it needs
memory of its own."""

import math
from collections.abc import Mapping

from jax.extend.core import JaxprEqn

from parallax import jaxprs

# Read where they lie, in another shape or order, or not all of them: they need no memory of their
# own.
SAME = {
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
PARTS = {"slice", "dynamic_slice"}
VIEWS = SAME | PARTS | {"rev", "broadcast_in_dim", "iota", "pad"}
FUSED = VIEWS | jaxprs.CHEAP | jaxprs.DEAR  # computed as they are read
# These compute what they read as they read it.
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
UPDATES = {
    "dynamic_update_slice": 0,
    "scatter": 0,
    "scatter-add": 0,
    "scatter_add": 0,
}  # which operand is written
PRODUCTS = {"dot_general", "conv_general_dilated"}
COLLECTIVES = {  # by the names that compiled programs have for them
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant", "all_gather_reduced"), "all-gather"),
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def nbytes(aval) -> int:
    """Returns the bytes of an array of this type; of what is no array, 0."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return itemsize * math.prod(getattr(aval, "shape", ()))


def operations(eqn: JaxprEqn) -> int:
    """Returns the floating-point operations of a product: 2 for each pair of numbers that are
    multiplied and added.

    A kernel (Pallas) states its own.
    """
    if eqn.primitive.name == "pallas_call":
        return int(eqn.params["cost_estimate"].flops)
    left, right = jaxprs.types(eqn.invars[:2])
    out = math.prod(jaxprs.types(eqn.outvars)[0].shape)
    if eqn.primitive.name == "dot_general":
        (over, _), _ = eqn.params["dimension_numbers"]
        return 2 * out * math.prod(left.shape[dim] for dim in over)
    kernel = eqn.params["dimension_numbers"].rhs_spec  # of outputs, inputs, then space
    terms = out * math.prod(right.shape[dim] for dim in kernel[1:])
    # The transpose of a strided convolution reads its input with zeros between, which cost nothing.
    return 2 * terms // math.prod(eqn.params["lhs_dilation"])


def is_product(eqn: JaxprEqn) -> bool:
    """Returns whether it multiplies matrices. Compilers take a product of vectors for a
    multiplication and a sum."""
    if eqn.primitive.name == "pallas_call":
        return eqn.params["cost_estimate"] is not None
    if eqn.primitive.name != "dot_general":
        return eqn.primitive.name in PRODUCTS
    (over, _), (batched, _) = eqn.params["dimension_numbers"]
    return any(len(each.shape) > len(over) + len(batched) for each in jaxprs.types(eqn.invars))


def only_multiplies(eqn: JaxprEqn) -> bool:
    """Returns whether it is a product over no dim: an elementwise multiplication, as compilers
    treat it."""
    return eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][0][0]


def axes(eqn: JaxprEqn, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of more than one device along which a collective moves something, in the
    mesh's order."""
    named = eqn.params.get("axes", eqn.params.get("axis_name"))
    named = named if isinstance(named, tuple) else (named,)
    return tuple(axis for axis in sizes if axis in named and sizes[axis] > 1)
