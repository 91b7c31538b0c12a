"""The updates of split arguments: what they add up, and which reductions of a shard go into them.

An output is the *update* of an argument where both have one shape and one spec, and the output is that argument, perhaps
scaled or cast, plus something of its shape: `w + u`, or `decay * m + (1 - decay) * g`. Its *elements* are the values that
elementwise operations, transposes and all-reduces join to it: weights, gradients, an optimizer's state.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from parallax import jaxprs
from parallax.lint import flat
from parallax.lint.flat import CHOSEN, LOOPS, Flat, Node
from parallax.lint.places import (
    ELEMENTWISE,
    LAID_OUT,
    Dims,
    axes_of_blocks,
    backward,
    forward,
    joined_axes,
    operands,
)
from parallax.lint.values import in_tuple

SCALED = frozenset(
    {
        "convert_element_type",
        "copy",
        "copy_p",
        "neg",
        "optimization_barrier",
        "pbroadcast",
        "pcast",
        "pvary",
        "reduce_precision",
    }
)
ADDS = frozenset({"add", "add_any", "sub"})
REDUCES = {f"reduce_{kind}": "axes" for kind in ("sum", "max", "min", "prod", "and", "or", "xor")}
REDUCES |= {"argmax": "axes", "argmin": "axes", "sort": "dimension"}
REDUCES |= {name: "axis" for name in ("cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp")}
PLACED = ELEMENTWISE | LAID_OUT | LOOPS | {"transpose"}
# A number goes through these on its way from a reduction to an update.
PASSED_ON = (
    ELEMENTWISE
    | LAID_OUT
    | REDUCES.keys()
    | {"concatenate", "dynamic_slice", "gather", "slice", "transpose"}
)


class Joined(NamedTuple):
    """An operation that joins elements, what it takes, and the axes along which that is split."""

    node: Node
    value: int
    axes: frozenset[str]


def terms(program: Flat, result: int, bases: Iterable[int]) -> list[int]:
    """What is added to an argument of `bases` to make `result`, and what decides whether; nothing if it is no such sum."""
    bases, added, decisions, seen, waiting = set(bases), [], [], set(), [result]
    while waiting:
        ends, predicates = _ends(program, waiting.pop())
        decisions += predicates
        for node in (program.made.get(end) for end in ends - seen):
            if not node or node.name not in ADDS:
                continue
            is_base = [bool(_ends(program, operand)[0] & bases) for operand in node.inputs]
            if any(is_base):
                added.append(node.inputs[1 - is_base.index(True)])
            else:
                waiting += node.inputs
        seen |= ends
    shaped = [
        term for term in added if any(_is_full(program, end) for end in _ends(program, term)[0])
    ]
    return [*shaped, *decisions] if shaped else []


def elements(program: Flat, result: int, dims: Dims) -> tuple[dict[int, Dims], list[Joined]]:
    """The values whose elements are those of `result`, with their dims, and the sums on the way that are over its own axes."""
    found, sums, waiting = {}, [], [(result, dims)]
    while waiting:
        value, dims = waiting.pop()
        if value in found:
            continue
        found[value] = dims
        if node := program.made.get(value):
            for operand in operands(node, value):
                before = _before(program, node, operand, value, dims)
                axes = axes_of_blocks(dims, program.shape(value)) & set(
                    node.sent.axes if node.sent else ()
                )
                if before is not None and axes:
                    sums.append(Joined(node, operand, axes))
                elif before is not None:
                    waiting.append((operand, before))
    return found, sums


def _before(program: Flat, node: Node, operand: int, value: int, dims: Dims) -> Dims | None:
    """How an operand is split: of a sum over devices as its result, of a loop as the carry that it ends with."""
    if node.name in LOOPS or (node.sent and node.sent.kind == "sum"):
        return dims if program.shape(operand) == program.shape(value) else None
    return None if node.sent else backward(program, node, operand, value, dims)


def is_made(program: Flat, value: int, dims: Dims) -> bool:
    """Whether a value has elements that a product, a reduction or the like made, as a gradient has."""
    nodes = [program.made.get(each) for each in elements(program, value, dims)[0]]
    return any(
        node and node.name not in ELEMENTWISE | LAID_OUT | {"iota"} and not node.sent
        for node in nodes
    )


def reductions(program: Flat, own: Mapping[int, Dims], split: frozenset[str]) -> Iterator[Joined]:
    """The reductions over a split dim of the elements `own`, or of what is computed from them one by one.

    Of all to one number, by anybody; of some dims, in optax alone. None if they are rounded somewhere.
    """
    known: dict[int, Dims | None] = {
        value: dims for value, dims in own.items() if _is_full(program, value)
    }
    waiting, reduced = list(known), []
    while waiting:
        value = waiting.pop()
        dims = known[value]
        for node in program.used[value]:
            if _rounds(program, node):
                return
            if node.name in REDUCES or node.name == "dot_general":
                reduced.append((node, value))
            for output in (
                node.outputs if node.name in ELEMENTWISE | LAID_OUT | {"transpose"} else ()
            ):
                same_size = program.types[output].size == program.types[value].size
                if same_size and output not in known and value in operands(node, output):
                    known[output] = (
                        forward(program, node, value, output, dims) if dims is not None else None
                    )
                    waiting.append(output)
    for node, value in reduced:
        dims = known[value]
        if node.name == "dot_general" and not all(each in known for each in node.inputs):
            continue
        if program.types[node.outputs[0]].size == 1:
            yield Joined(node, value, split)
        elif dims is not None and _is_of_optax(node):
            several = [d for d in _reduced_dims(node, value) if program.shape(value)[d] > 1]
            yield Joined(node, value, frozenset(axis for d in several for axis in dims[d]))


def origins(program: Flat, result: int) -> set[int]:
    """The values whose elements, each computed on by itself, are elements of `result`: `elements` in any order and number."""
    found, waiting = set(), [result]
    while waiting:
        value = waiting.pop()
        node = None if value in found else program.made.get(value)
        found.add(value)
        if node and node.name in ("concatenate", "slice", "split"):
            waiting += node.inputs
        elif node and (node.name in PLACED or (node.sent and node.sent.kind == "sum")):
            waiting += [
                each
                for each in operands(node, value)
                if program.types[each].size == program.types[value].size
            ]
    return {value for value in found if _is_full(program, value)}


def scalings(
    program: Flat, own: set[int], axes: frozenset[str]
) -> Iterator[tuple[Joined, Node, int]]:
    """The products and quotients among `own` that scale a value by a number reduced from it, or from others of `own`.

    Each comes with the reduction, which no collective over all of `axes` completes, and the value.
    """
    for reduced in reductions(
        program, {value: ((),) * len(program.shape(value)) for value in own}, axes
    ):
        if not jaxprs.is_float(program.types[reduced.value]):
            continue
        numbers = reached(program, reduced.node.outputs, axes)
        for node in (program.made.get(value) for value in own):
            scaled = [operand for operand in node.inputs if operand not in numbers] if node else []
            if node and node.name in ("mul", "div") and len(scaled) == 1 and scaled[0] in own:
                yield reduced, node, scaled[0]


def reached(program: Flat, start: Sequence[int], axes: frozenset[str]) -> dict[int, frozenset[str]]:
    """The values that a reduced number goes into with no collective between, each with the axes that are still missing."""
    found: dict[int, frozenset[str]] = {}
    waiting = [(value, axes) for value in start]
    while waiting:
        value, axes = waiting.pop()
        axes |= found.get(value, frozenset())
        if not axes or found.get(value) == axes:
            continue
        found[value] = axes
        for node in program.used[value]:
            left = axes - joined_axes(program, node)
            if node.name in LOOPS:
                waiting += [
                    (node.outputs[j], left)
                    for i, j in flat.carried(node.eqn)
                    if node.inputs[i] == value
                ]
            elif node.sent or node.name in PASSED_ON:
                waiting += [
                    (output, left) for output in node.outputs if value in operands(node, output)
                ]
    return found


def _ends(program: Flat, value: int) -> tuple[set[int], list[int]]:
    """The values that a value is, but for casts and a factor; of a choice all of them, and the predicates that choose."""
    ends, predicates, seen, waiting = set(), [], set(), [value]
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        node = program.made.get(value)
        full = (
            [each for each in node.inputs if _is_full(program, _bare(program, each))]
            if node
            else []
        )
        if node and node.name in SCALED:
            waiting += operands(node, value)
        elif node and node.name in ("mul", "div") and len(full) == 1:
            waiting += full
        elif node and node.name in ("select_n", CHOSEN):
            predicates.append(node.inputs[0])
            waiting += node.inputs[1:]
        else:
            ends.add(value)
    return ends, predicates


def _bare(program: Flat, value: int) -> int:
    """The value that a value is but for casts."""
    while (node := program.made.get(value)) and node.name in SCALED:
        (value,) = operands(node, value)
    return value


def _is_full(program: Flat, value: int) -> bool:
    """Whether a value has elements of its own, and is not one number in every place."""
    size = lambda each: program.types[each].size
    node = program.made.get(value)
    repeats = node is not None and node.name in LAID_OUT and size(node.inputs[0]) < size(value)
    return size(value) > 1 and not repeats


def _is_of_optax(node: Node) -> bool:
    return jaxprs.is_of_optax(next(filter(None, map(jaxprs.maker, node.at)), ""))


def _reduced_dims(node: Node, value: int) -> tuple[int, ...]:
    if node.name == "dot_general":
        (left, right), _ = node.eqn.params["dimension_numbers"]
        return tuple(left if value == node.inputs[0] else right)
    return in_tuple(node.eqn.params[REDUCES[node.name]])


def _rounds(program: Flat, node: Node) -> bool:
    """Whether an operation makes numbers of fewer than 16 bits, or whole ones, of others."""
    if node.name != "convert_element_type":
        return node.name == "round"
    dtype = program.types[node.outputs[0]].dtype
    small = jnp.issubdtype(dtype, jnp.floating) and jax.dtypes.itemsize_bits(dtype) < 16
    return bool(small or jnp.issubdtype(dtype, jnp.integer))
