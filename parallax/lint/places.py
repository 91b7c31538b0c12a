"""How arrays are split, dim by dim, and what local operations and collectives make of it."""

from collections.abc import Sequence
from typing import NamedTuple

from parallax import jaxprs
from parallax.lint import flat, spread, values
from parallax.lint.flat import CHOSEN, LOOPS, Flat, Node
from parallax.lint.spread import WRITTEN, Spread
from parallax.lint.values import LINEAR

Dims = tuple[tuple[str, ...], ...]  # for each dim the axes that split it, the outermost first

ELEMENTWISE = jaxprs.ELEMENTWISE | {CHOSEN, "replicated", "stop_gradient"}
LAID_OUT = jaxprs.LAID_OUT


class Known(NamedTuple):
    """What is known of a value.

    Attributes:
        dims: how it is split, while its elements are those of one argument; None where they are not.
        argument: the number of that argument.
        fed: the axes along which it depends on a split batch, where no collective lies between.
        chosen: the axes whose index it depends on.
        spread: which of its dims are split, whatever it was made of.
    """

    dims: Dims | None = None
    argument: int = -1
    fed: frozenset[str] = frozenset()
    chosen: frozenset[str] = frozenset()
    spread: Spread = WRITTEN


def either(one: Known, other: Known) -> Known:
    """What is known of a carry, from its first value and from the one after a trip."""
    same = (one.dims, one.argument) == (other.dims, other.argument)
    place = one if same else Known()
    together = spread.either(one.spread, other.spread)
    return Known(
        place.dims, place.argument, one.fed & other.fed, one.chosen | other.chosen, together
    )


def axes_of_blocks(dims: Dims, shape: tuple[int, ...]) -> frozenset[str]:
    """The axes that split an array into blocks of several rows."""
    return frozenset(
        axis for axes, size in zip(dims, shape, strict=True) if size > 1 for axis in axes
    )


def forward(program: Flat, node: Node, operand: int, result: int, dims: Dims) -> Dims | None:
    """How the result of a local operation is split, element for element, given how one operand is; None if it is not."""
    before, after = program.shape(operand), program.shape(result)
    if node.name in ELEMENTWISE:
        return dims if before == after else None
    if node.name == "transpose":
        return tuple(dims[i] for i in node.eqn.params["permutation"])
    return _relaid(dims, before, after) if node.name in LAID_OUT else None


def backward(program: Flat, node: Node, operand: int, result: int, dims: Dims) -> Dims | None:
    """How an operand is split, given how the result is, of which it is the elements; None if it is not."""
    before, after = program.shape(operand), program.shape(result)
    if node.name in ELEMENTWISE:
        return dims if before == after else None
    if node.name == "transpose":
        order = node.eqn.params["permutation"]
        return tuple(dims[order.index(i)] for i in range(len(order)))
    return _relaid(dims, after, before) if node.name in LAID_OUT else None


def _relaid(dims: Dims, before: tuple[int, ...], after: tuple[int, ...]) -> Dims | None:
    """`dims` after dims of size 1 came or went."""
    kept = [(size, axes) for size, axes in zip(before, dims, strict=True) if size > 1]
    if [size for size, _ in kept] != [size for size in after if size > 1]:
        return None
    rest = iter(axes for _, axes in kept)
    return tuple(next(rest) if size > 1 else () for size in after)


def operands(node: Node, result: int) -> Sequence[int]:
    """The operands that a result is made of: of a loop, the carry's first value."""
    if node.name in LOOPS:
        return [node.inputs[i] for i, j in flat.carried(node.eqn) if node.outputs[j] == result]
    if len(node.outputs) > 1 and len(node.outputs) == len(node.inputs):
        return [node.inputs[node.outputs.index(result)]]
    return node.inputs


def joined_axes(program: Flat, node: Node) -> frozenset[str]:
    """The axes along which an operation joins devices, or something in a loop does."""
    if node.sent:
        return frozenset(node.sent.axes)
    if node.name == "replicated":
        return frozenset(node.eqn.params["axes"])
    inside = (
        [each for part in jaxprs.inner(node.eqn) for each in jaxprs.every(part)]
        if node.name in LOOPS
        else []
    )
    sent = [
        values.sent(each, program.ours(each) if each.primitive.name == LINEAR else None)
        for each in inside
    ]
    return frozenset(axis for each in sent if each for axis in each.axes)
