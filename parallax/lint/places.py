"""Tells how each dim of an array is split before and after an operation that sends nothing.

A `Flat` program is a list of operations, its nodes. The program's values (arrays) have ids, and
the functions of this file take and return these ids. The `Dims` of a value have, for each dim, the
axes that split the dim, the outermost first: `((), ("data",))` for a matrix whose second dim is
split. `sent` has the kind and the axes of a collective; `sent` is None if the node is no
collective.
"""

from collections.abc import Sequence

from parallax import jaxprs
from parallax.lint import flat
from parallax.lint.flat import CHOSEN, LOOPS, Flat, Node
from parallax.lint.values import NO_AXES, Dims, sent_inside

ELEMENTWISE = jaxprs.ELEMENTWISE | {CHOSEN, "replicated", "stop_gradient"}
LAID_OUT = jaxprs.LAID_OUT  # broadcasts and reshapes (no transposes): they keep elements in order


def axes_of_blocks(dims: Dims, shape: tuple[int, ...]) -> frozenset[str]:
    """Returns the axes that split those dims in which a device's block has a size above 1. A
    device's reduction over such a dim covers only this device's part of the dim. `shape` is the
    shape of the device's block.
    """
    # If each device's block has size 1 along a dim, each index of the dim may be a separate model,
    # as in an ensemble.
    pairs = zip(dims, shape, strict=True)
    return frozenset(axis for axes, size in pairs if size > 1 for axis in axes)


def forward(program: Flat, node: Node, operand: int, result: int, dims: Dims) -> Dims | None:
    """Returns the `Dims` of the result of an operation that sends nothing: for each dim, the axes
    that split the dim. `dims` are the `Dims` of one operand.

    Returns None unless the operation is elementwise, is a transpose, or only adds or drops dims of
    size 1.
    """
    if node.name == "transpose":
        return tuple(dims[i] for i in node.eqn.params["permutation"])
    return _same_elements(node, dims, program.shape(operand), program.shape(result))


def backward(program: Flat, node: Node, operand: int, result: int, dims: Dims) -> Dims | None:
    """Returns the `Dims` of an operand; `dims` are the `Dims` of the result. Returns None unless
    the operation is elementwise, is a transpose, or only adds or drops dims of size 1.
    """
    if node.name == "transpose":
        order = node.eqn.params["permutation"]
        # Dim `order[j]` of the operand is dim j of the result.
        return tuple(dims[order.index(i)] for i in range(len(order)))
    return _same_elements(node, dims, program.shape(result), program.shape(operand))


def _same_elements(
    node: Node, dims: Dims, before: tuple[int, ...], after: tuple[int, ...]
) -> Dims | None:
    """Returns the `Dims` of an operation's result from the `Dims` of an operand, or the `Dims` of
    the operand from the `Dims` of the result. Returns None unless the operation keeps all elements
    in order.

    Args:
        node: the operation.
        dims: for each dim of the given array, the axes that split the dim.
        before: the shape of the given array, an operand or a result.
        after: the shape of the array whose `Dims` are returned.
    """
    if node.name in ELEMENTWISE:
        return dims if before == after else None
    if node.name not in LAID_OUT:
        return None
    # Only dims of size 1 may come or go. Which of them remains is not known, so none of them counts
    # as split afterwards. `axes_of_blocks` does not use the axes of such dims either.
    pairs = [(size, axes) for size, axes in zip(before, dims, strict=True) if size > 1]
    if [size for size, _ in pairs] != [size for size in after if size > 1]:
        return None
    larger = iter(axes for _, axes in pairs)
    return tuple(next(larger) if size > 1 else () for size in after)


def operands(node: Node, result: int) -> Sequence[int]:
    """Returns the operands from which an operation makes a result.

    For a carry that a loop returns, the list has one operand: the carry's initial value. For a
    stacked output of a loop, the list is empty. In an operation with several results and as many
    operands, such as a barrier, each result is made of the operand at the same place. In all other
    operations, each result is made of all operands.
    """
    if node.name in LOOPS:  # `carried` gives the places (operand, result) of each carry
        return [node.inputs[i] for i, j in flat.carried(node.eqn) if node.outputs[j] == result]
    if len(node.outputs) > 1 and len(node.outputs) == len(node.inputs):
        return [node.inputs[node.outputs.index(result)]]
    return node.inputs


def joined_axes(program: Flat, node: Node) -> frozenset[str]:
    """Returns the axes over which an operation is a collective. For a loop, returns the axes of all
    collectives in its body and its condition.

    This library's `replicated(x, axes)` declares that `x` is the same along `axes`, for example
    after a collective over them: these axes are returned too. `program.ours` returns the jaxpr of a
    collective of this library, and `sent_inside` yields the collectives in a jaxpr.
    """
    if node.sent:
        return frozenset(node.sent.axes)
    if node.name == "replicated":
        return frozenset(node.eqn.params["axes"])
    if node.name not in LOOPS:
        return NO_AXES
    bodies = jaxprs.inner(node.eqn)
    return frozenset(
        axis for body in bodies for sent in sent_inside(body, program.ours) for axis in sent.axes
    )
