"""Finds the outputs that update split arguments, the terms that such an output adds to its
argument, and the reductions in these terms.

An output is an *update* of an argument if both have the same shape and spec, and the output is the
argument, perhaps scaled or cast, plus a term with the same shape. Examples are `w + u` and
`decay * m + (1 - decay) * g`. The function `elements` returns the values (weights, gradients, an
optimizer's state) that become an update by elementwise operations, transposes and all-reduces.

A *value* is an array in a `Flat` program. The functions of this file take and return a value as its
id, an int. A `Node` is an operation of the program. `program.made` has the operation that makes a
value (none for an argument), and `program.used` has the operations that use the value. The `Dims`
of a value have, for each dim, the axes that split the dim. A value is *full* if the array has
several elements, and no broadcast repeats them. A gradient is full; an epsilon or a norm is not.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from parallax import jaxprs, source_lines
from parallax.lint import flat
from parallax.lint.flat import CHOSEN, LOOPS, Flat, Node
from parallax.lint.places import (
    ELEMENTWISE,
    LAID_OUT,
    axes_of_blocks,
    backward,
    forward,
    joined_axes,
    operands,
)
from parallax.lint.values import Dims, in_tuple

SCALED = frozenset(  # casts, copies and signs
    {
        *("convert_element_type", "copy", "copy_p", "neg", "optimization_barrier", "pbroadcast"),
        *("pcast", "pvary", "reduce_precision"),
    }
)
ADDS = frozenset({"add", "add_any", "sub"})
# Reductions, with the parameter that names their dims.
REDUCES = {f"reduce_{kind}": "axes" for kind in ("sum", "max", "min", "prod", "and", "or", "xor")}
REDUCES |= {"argmax": "axes", "argmin": "axes", "sort": "dimension"}
REDUCES |= {name: "axis" for name in ("cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp")}
# Operations that count as computing each element of a result from one element of each operand.
PLACED = ELEMENTWISE | LAID_OUT | LOOPS | {"transpose"}
# The operations that a reduction's result may pass through on its way to an update.
PASSED_ON = (
    ELEMENTWISE
    | LAID_OUT
    | REDUCES.keys()
    | {"concatenate", "dynamic_slice", "gather", "slice", "transpose"}
)


class Reduction(NamedTuple):
    """A reduction of an operand's elements on one device, or a sum of an operand over devices.

    Attributes:
        node: the operation.
        value: the id of the operand.
        axes: the axes along which the devices have different elements of the operand.
    """

    node: Node
    value: int
    axes: frozenset[str]


def terms(program: Flat, result: int, bases: Iterable[int]) -> list[int]:
    """Returns the ids of the terms that are added to an argument to make `result`: u in
    `result = w + u`.

    After the terms come the ids of the predicates that decide whether the terms are added. If
    `result` is no sum of an argument and a term of its shape, the list is empty.

    Args:
        program: the operations.
        result: the id of the value that may be an update.
        bases: the ids of the arguments of which `result` may be an update.
    """
    bases, added, based, decisions = set(bases), [], [], []
    # A list of values still to read, not a recursion: a sum may have thousands of terms.
    seen, waiting = set(), [result]
    while waiting:
        # The values before casts and scalar factors, and the predicates that choose among them.
        unscaled, predicates = _unscaled(program, waiting.pop())
        decisions += predicates
        for node in (program.made.get(value) for value in unscaled - seen):
            if not node or node.name not in ADDS:
                continue
            for operand in node.inputs:
                is_base = bool(_unscaled_values(program, operand) & bases)
                (based if is_base else added).append(operand)
            # In (w + a) + b and w + (a + b), an operand is a sum too.
            waiting += node.inputs
        seen |= unscaled
    if not based:
        return []
    # In w + decay * w both operands are bases: one of them is added to the other.
    added += based if len(based) > 1 else []
    # A term that is one number in every place, such as the epsilon of w + epsilon, does not count.
    full_terms = [
        term
        for term in added
        if any(_is_full(program, value) for value in _unscaled_values(program, term))
    ]
    return [*full_terms, *decisions] if full_terms else []


def elements(program: Flat, result: int, dims: Dims) -> tuple[dict[int, Dims], list[Reduction]]:
    """Returns a dict and a list. The dict has `result`, and the values from which elementwise
    operations, transposes and sums over devices compute `result`. The dict maps each of these
    values to its `Dims`. The list has the sums over devices that add different shards: a sum is in
    the list if its operand is split over an axis of the sum.

    Each sum in the list is a `Reduction`: the operation, the operand, and those axes of the sum
    that split the operand. This operand, and the values from which it is computed, are not in the
    dict. `dims` are the `Dims` of `result`.
    """
    dims_of, sums, waiting = {}, [], [(result, dims)]
    while waiting:
        value, dims = waiting.pop()
        if value in dims_of:
            continue
        dims_of[value] = dims
        node = program.made.get(value)
        if node is None:
            continue
        for operand in operands(node, value):
            # Of the collectives, only sums have a `before`, and it is `dims`, the result's `Dims`.
            before = _before(program, node, operand, value, dims)
            sent = frozenset(node.sent.axes if node.sent else ())
            axes = axes_of_blocks(dims, program.shape(value)) & sent
            if before is not None and axes:  # a sum of different shards
                sums.append(Reduction(node, operand, axes))
            elif before is not None:
                waiting.append((operand, before))
    return dims_of, sums


def _before(program: Flat, node: Node, operand: int, value: int, dims: Dims) -> Dims | None:
    """Returns the dims of an operand, computed from `dims`, the dims of the result `value`. Returns
    None if the operand does not hold the elements of the result.
    """
    # Sums over devices keep the shape and the split. So does a carry. It counts as an elementwise
    # function of its initial value: a loop that accumulates gradients adds to each element. For
    # stacked results, `operands` gives no operand.
    if node.name in LOOPS or (node.sent and node.sent.kind == "sum"):
        return dims if program.shape(operand) == program.shape(value) else None
    return None if node.sent else backward(program, node, operand, value, dims)


def may_be_gradient(program: Flat, value: int, dims: Dims) -> bool:
    """Returns whether some elements of a value come from a product, a reduction or a loop, as the
    elements of a gradient do. Every operation counts as one of these three, except elementwise
    ones, reshapes, broadcasts, transposes, collectives and `iota`.
    """
    dims_of, _ = elements(program, value, dims)
    nodes = [program.made.get(element) for element in dims_of]
    return any(
        node and node.name not in ELEMENTWISE | LAID_OUT | {"transpose", "iota"} and not node.sent
        for node in nodes
    )


def reductions(
    program: Flat, dims_of: Mapping[int, Dims], split: frozenset[str]
) -> Iterator[Reduction]:
    """Yields the reductions of the values in `dims_of` and of elementwise functions of these
    values. Each reduction comes with the axes over which a collective should complete it.

    The axes of a reduction of all elements to one number are `split`. A caller that checks an
    update passes as `split` all axes that split the updated argument. The axes of a reduction of
    only some dims are the axes that split these dims. Such a reduction counts only if optax made
    it, since a user may mean to reduce only the rows of one device. Nothing is yielded if an
    operation rounds one of the values (`_rounds`). The program may then be a quantiser, which
    reduces each shard on purpose, to find one scale for the shard.
    """
    # The values in `dims_of` and their elementwise functions, each with the axes that split its
    # dims. These are None if an operation, such as a reshape, moved the elements so that the axes
    # are not known; the value is still an elementwise function.
    known: dict[int, Dims | None] = {}
    known |= {value: dims for value, dims in dims_of.items() if _is_full(program, value)}
    waiting, reduced = list(known), []
    while waiting:
        value = waiting.pop()
        for node in program.used[value]:
            if _rounds(program, node):
                return
            if node.name in REDUCES or node.name == "dot_general":
                reduced.append((node, value))
            keeps_elements = node.name in ELEMENTWISE | LAID_OUT | {"transpose"}
            for output in node.outputs if keeps_elements else ():
                # Two kinds of outputs are left out: a broadcast, which repeats elements of `value`;
                # and, of a barrier, which returns each operand, the results other than `value`.
                same_size = program.types[output].size == program.types[value].size
                if same_size and output not in known and value in operands(node, output):
                    dims = known[value]
                    after = dims if dims is None else forward(program, node, value, output, dims)
                    known[output] = after
                    waiting.append(output)
    for node, value in reduced:
        dims = known[value]
        # A product of two functions of the elements is a norm; a product with another array is not.
        if node.name == "dot_general" and not all(operand in known for operand in node.inputs):
            continue
        if program.types[node.outputs[0]].size == 1:
            yield Reduction(node, value, split)
        elif dims is not None and _is_of_optax(node):
            # Dims of size 1 on a device are left out: such a dim may number separate models, one on
            # each device, and their elements should not be reduced together.
            several = [d for d in _reduced_dims(node, value) if program.shape(value)[d] > 1]
            yield Reduction(node, value, frozenset(axis for d in several for axis in dims[d]))


def origins(program: Flat, result: int) -> set[int]:
    """Returns `result`, and the values that it is computed from by elementwise operations.

    Reshapes, transposes, loops, slices, concatenations and sums over devices count as elementwise
    here. So a returned value may have more or fewer elements than `result`, or the elements may be
    in another order. Values of one element, and values whose elements are repeated by a broadcast,
    are left out.
    """
    seen, waiting = set(), [result]
    while waiting:
        value = waiting.pop()
        node = None if value in seen else program.made.get(value)
        seen.add(value)
        if node and node.name in ("concatenate", "slice", "split"):
            waiting += node.inputs
        # `PLACED` are elementwise operations, reshapes, transposes and loops.
        elif node and (node.name in PLACED or (node.sent and node.sent.kind == "sum")):
            # An operand of another size, such as a factor or an index, gives no elements.
            size = program.types[value].size
            waiting += [x for x in operands(node, value) if program.types[x].size == size]
    return {value for value in seen if _is_full(program, value)}


def scalings(
    program: Flat, values: set[int], axes: frozenset[str]
) -> Iterator[tuple[Reduction, Node, int]]:
    """Yields the products and quotients that scale one of `values` by a number, such as a norm,
    that is a reduction of `values`.

    Each item is a triple: the reduction and its operand (`Reduction`), the product or quotient, and
    the value that it scales. `axes` are those of a later sum over devices. If collectives over all
    of `axes` complete the reduction before a product, the product is left out.
    """
    # `reductions` needs the dims of each value. Here no dim counts as split: the axes that
    # `reductions` gives are not used below.
    whole = {value: ((),) * len(program.shape(value)) for value in values}
    for reduced in reductions(program, whole, axes):
        # A reduction of integers or bools, such as a test for nan, is no norm.
        if not jaxprs.is_float(program.types[reduced.value]):
            continue
        # The values that depend on the reduction, without those that come after collectives over
        # all of `axes`.
        dependent = reached(program, reduced.node.outputs, axes)
        # Only a product that is itself one of `values` is a step of the update's computation.
        for node in (program.made.get(value) for value in values):
            if node and node.name in ("mul", "div"):
                # One operand is in `dependent`; the other must be one of `values`. If a collective
                # has completed the reduction, neither is in `dependent`. A literal is an operand
                # too, but is in neither.
                scaled = [operand for operand in node.inputs if operand not in dependent]
                if len(scaled) == 1 and scaled[0] in values:
                    yield reduced, node, scaled[0]


def reached(program: Flat, start: Sequence[int], axes: frozenset[str]) -> dict[int, frozenset[str]]:
    """Returns the values that depend on `start`, the results of a reduction on one device. Each
    value is returned with its *missing* axes: those over which the reduction is not complete.

    An axis of `axes` is missing for a value if there is a path from `start` to the value without a
    collective over that axis. A value without missing axes is left out. A path may lead through
    collectives over other axes, the carries of loops, and the operations in `PASSED_ON`:
    elementwise ones, broadcasts, reshapes, transposes, reductions, slices and concatenations.
    """
    missing: dict[int, frozenset[str]] = {}
    waiting = [(value, axes) for value in start]
    while waiting:
        value, axes = waiting.pop()
        # Several paths may lead to a value. An axis is missing if any of these paths lacks it.
        axes |= missing.get(value, frozenset())
        if not axes or missing.get(value) == axes:
            continue
        missing[value] = axes
        for node in program.used[value]:
            left = axes - joined_axes(program, node)  # without those that a collective goes over
            if node.name in LOOPS:  # the carry that begins as this value
                carries = flat.carried(node.eqn)
                waiting += [(node.outputs[j], left) for i, j in carries if node.inputs[i] == value]
            elif node.sent or node.name in PASSED_ON:
                outputs = (output for output in node.outputs if value in operands(node, output))
                waiting += [(output, left) for output in outputs]
    return missing


def _unscaled(program: Flat, value: int) -> tuple[set[int], list[int]]:
    """Returns a set and a list. The set has the value that becomes `value` by casts and scalar
    factors, and the list is empty.

    If a `select_n` or a conditional (`CHOSEN`) chooses among several values, the set has all of
    them, without their casts and scalar factors, and the list has the predicates that choose.
    """
    unscaled, predicates, seen, waiting = set(), [], set(), [value]
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        node = program.made.get(value)
        inputs = node.inputs if node else ()
        # A cast of a broadcast is not full either, so casts are taken off first.
        full = [operand for operand in inputs if _is_full(program, _uncast(program, operand))]
        if node and node.name in SCALED:  # casts, copies and changes of sign
            waiting += operands(node, value)
        elif node and node.name in ("mul", "div") and len(full) == 1:
            # The other operand is a scalar. A quotient scalar / x is taken like x / scalar, since
            # its elements come from x alone too.
            waiting += full
        elif node and node.name in ("select_n", CHOSEN):
            predicates.append(node.inputs[0])
            waiting += node.inputs[1:]
        else:
            unscaled.add(value)
    return unscaled, predicates


def _unscaled_values(program: Flat, value: int) -> set[int]:
    """Returns the set that `_unscaled` returns."""
    unscaled, _ = _unscaled(program, value)
    return unscaled


def _uncast(program: Flat, value: int) -> int:
    """Returns the value that becomes `value` by casts, copies and changes of sign."""
    while (node := program.made.get(value)) and node.name in SCALED:
        (value,) = operands(node, value)
    return value


def _is_full(program: Flat, value: int) -> bool:
    """Returns whether a value has several elements, none of them repeated by a broadcast.

    If the value is made by one of `LAID_OUT` (broadcasts and reshapes) from a smaller operand, the
    operation is a broadcast that repeats elements. The operations that make the operand are not
    looked at.
    """
    size, node = program.types[value].size, program.made.get(value)
    if node is None or node.name not in LAID_OUT:
        return size > 1
    return size > 1 and program.types[node.inputs[0]].size >= size


def _is_of_optax(node: Node) -> bool:
    """Returns whether optax made the operation: whether the innermost known function outside JAX is
    in a file of optax.

    `scope.at` has the operation's equation and the equations of the calls around it. For each
    equation, `maker` returns the file of the innermost function that belongs neither to JAX nor to
    Python's standard library, or "" if this file is not known.
    """
    return source_lines.is_of_optax(next(filter(None, map(source_lines.maker, node.scope.at)), ""))


def _reduced_dims(node: Node, value: int) -> tuple[int, ...]:
    """Returns the dims of the operand `value` that a reduction or a product sums over. If `value`
    is both operands of a product, the dims are those of the left one."""
    if node.name == "dot_general":
        (left, right), _ = node.eqn.params["dimension_numbers"]
        return tuple(left if value == node.inputs[0] else right)
    # `REDUCES` has the name of the parameter with the dims, which may be one number.
    return in_tuple(node.eqn.params[REDUCES[node.name]])


def _rounds(program: Flat, node: Node) -> bool:
    """Returns whether an operation rounds to whole numbers, or casts to numbers of fewer than 16
    bits, or from floating-point numbers to integers."""
    if node.name != "convert_element_type":
        return node.name in ("round", "floor", "ceil")
    aval = program.types[node.outputs[0]]
    is_integer = jnp.issubdtype(aval.dtype, jnp.integer)
    if is_integer or jnp.issubdtype(aval.dtype, jnp.floating):
        # A count of bools casts them to 32 bits, which rounds nothing.
        is_small = jax.dtypes.itemsize_bits(aval.dtype) < 16
        return is_small or (is_integer and jaxprs.is_float(program.types[node.inputs[0]]))
    return False
