"""Reads an optimizer's update as a program: finds the leaves that each array is computed from, and
whether the array is computed element by element.

The program is traced on leaves whose split dims have an unknown size, a JAX symbolic dimension. So
a fact about the program is true for shards and for whole leaves. A result is *correct on shards* if
each device computes, from its shards, its own part of the result for whole leaves. An array that
*mixes* is computed from several elements at a time, as a sum is, and would be wrong on shards.

Leaves are parameters, named by numbers from 0 on. Two more numbers are used in the same way.
`WHOLE` stands for any array that no axis splits. `RIGHT` stands for a result that a wrapper of an
optimizer has marked as correct on shards. The computation of such a result may mix elements. Each
array of the program has a `Value`: the numbers of the leaves that the array is computed from
(`leaves`), and why the array mixes (`mixes`, "" if it does not). `met` joins several `Value`s into
one, and `run` follows a program inside an equation, such as a branch. A wrapper marks a result by a
call of `linear(x, forward=..., backward=..., name=...)`, from `parallax.collectives.types`: the
call is one equation of the program, and the argument `name` is the mark.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn

from parallax import jaxprs, trees
from parallax._typing import PyTree
from parallax.collectives.types import axes_of_type, linear
from parallax.grads.axes import axes_of_several_devices
from parallax.grads.results import matching_parameters

# Numbers beside those of the leaves (see above), and the names of the two marks in the program.
WHOLE, RIGHT = -1, -2
RIGHT_ON_SHARDS, RIGHT_IF_GIVEN = "right on shards", "right on shards if its operands are"


def right_on_shards(update: Callable[..., Any], *, at: str = "") -> Callable[..., Any]:
    """Returns an optimizer's `update` with a mark on each result. The mark says that the result is
    correct when each device updates only its shards, so `checked` does not examine the result.

    Args:
        update: `(gradients, state, parameters, **extra) -> (updates, state)`; the parameters are
            those that have a gradient.
        at: the name of the function that made `update`, for the error if no parameters are passed;
            "" if `update` does not need parameters.
    """

    def wrapped(gradients, state, params=None, **extra):
        """Returns the updates and the new state; each of their arrays is marked as correct on
        shards (`_marked`). If a dim of a gradient or a parameter has an unknown size, `update` is
        not called, since collectives need known sizes. In that case the parameters (the gradients,
        if `params` is None) stand for the updates, and the old state for the new state: their types
        are equal."""
        if at and params is None:
            raise ValueError(
                f"{at}: update needs the parameters, whose shapes show which gradients are shares "
                "and which are whole. Pass params."
            )
        weights = None if params is None else matching_parameters(gradients, params)
        # `checked` traces this function on unknown sizes. Only the types and the marks of the
        # results matter there. An update has the type of its parameter, and is marked as correct on
        # the condition that its gradient is (`_marked_like`). The state has its old type, and is
        # marked without a condition (`_marked`): if a gradient is wrong, the check refuses its
        # update anyway.
        if has_unknown_sizes((gradients, weights)):
            like = gradients if weights is None else weights
            return jax.tree.map(_marked_like, gradients, like), jax.tree.map(_marked, state)
        return jax.tree.map(_marked, update(gradients, state, weights, **extra))

    return wrapped


def _marked(x: Any) -> Any:
    """Returns the array `x`, marked as a result that is correct on shards. An `x` that is no array
    is returned unchanged."""
    if not isinstance(x, jax.Array):
        return x
    # The mark is the name of an equation, since only equations are kept in a traced program.
    return linear(x, forward=lambda x: x, backward=lambda ct: ct, name=RIGHT_ON_SHARDS)


def _marked_like(x: Any, like: Any) -> Any:
    """Returns `like` marked as a result that is computed from `x`. If `x` was computed from several
    elements at a time, `x` is wrong on shards already, and so is this result. Otherwise this result
    is correct on shards."""
    return linear(x, forward=lambda x: like, backward=lambda ct: ct, name=RIGHT_IF_GIVEN)


def has_unknown_sizes(tree: PyTree) -> bool:
    """Returns whether an array of the tree has a dim of unknown size."""
    return any(
        export.is_symbolic_dim(size) for leaf in jax.tree.leaves(tree) for size in np.shape(leaf)
    )


class Value(NamedTuple):
    """How an array of an optimizer's program is computed: from which leaves, and whether element by
    element.

    Attributes:
        leaves: the numbers of the leaves from which the array is computed. `WHOLE` is among them if
            the array is computed from an array that no axis splits, and `RIGHT` if it is computed
            from a result that a wrapper of an optimizer has marked as correct on shards. If
            `leaves` is empty, all elements of the array are equal, and the array is the same on all
            devices.
        mixes: why the array is not computed element by element; "" if it is.
    """

    leaves: frozenset[int] = frozenset()
    mixes: str = ""

    def __or__(self, second: tuple[Any, ...]) -> "Value":
        """Returns the `Value` of an array that is computed from two arrays, whose `Value`s are
        `self` and `second`."""
        return Value(self.leaves | second[0], self.mixes or second[1])


def of_leaf(number: int) -> Value:
    """Returns the `Value` of an array that is computed element by element from one leaf."""
    return Value(frozenset([number]))


def same_everywhere(aval: Any) -> Value:
    """Returns the `Value` of an array of the type `aval` that is the same on all devices: its
    `leaves` is {`WHOLE`}. For a single number, `leaves` is empty, since a number may be combined
    with the elements of any shard."""
    return Value() if aval.shape == (1,) * aval.ndim else of_leaf(WHOLE)


def split_over(aval: Any) -> frozenset[str]:
    """Returns the axes along which an array of this type differs between devices. Axes of one
    device are left out."""
    return frozenset(axes_of_several_devices(axes_of_type(aval)))


class _Elements(jaxprs.Following):
    """Finds the `Value` of each array of a program, equation by equation."""

    unknown = Value()

    def constant(self, aval: Any, value: Any) -> Value:
        """Returns the `Value` of a constant of the type `aval`, which the update reads by closure.
        If the constant differs between devices, `mixes` of the `Value` says so. Otherwise `leaves`
        is {`WHOLE`}, or empty for a single number. The type alone decides, so `value` is unused."""
        if split_over(aval):
            return Value(mixes="it uses a value from outside that differs between devices")
        return same_everywhere(aval)

    def results(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Returns the `Value`s of an equation's results from the `Value`s of its operands."""
        # A loop may combine elements of different places over its iterations, so it is not read: to
        # `plain` it is one operation that is not elementwise.
        if eqn.primitive.name in ("scan", "while"):
            return [self.plain(eqn, operands, var.aval) for var in eqn.outvars]
        return super().results(eqn, operands)

    def branches(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Returns the `Value`s of the results of a `cond`, from all its branches."""
        choice, *arguments = operands
        # If the predicate is computed from a split leaf, each device would choose by its own shard.
        if choice.mixes or choice.leaves - {WHOLE}:
            mixes = choice.mixes or f"{_operation(eqn)} depends on the elements"
            return [self.met(operands)._replace(mixes=mixes)] * len(eqn.outvars)
        # The predicate is the same on all devices. The `Value` of a result joins those of all
        # branches. `_elementwise` then refuses a result that is a shard in one branch and a whole
        # array in another: it would be correct in neither role.
        every_branch = [self.run(branch, arguments) for branch in eqn.params["branches"]]
        return [
            _elementwise(self.met(values), eqn, var.aval)
            for var, *values in zip(eqn.outvars, *every_branch, strict=True)
        ]

    def plain(self, eqn: JaxprEqn, operands: list[Value], aval: Any) -> Value:
        """Returns the `Value` of the result of `eqn`, which counts as one operation, even if it has
        a program inside. `aval` is the type of the result."""
        name, value, mark = eqn.primitive.name, self.met(operands), eqn.params.get("name")
        # A mark adds `RIGHT`, which elementwise operations keep up to the results of the program.
        # A result with the mark `RIGHT_IF_GIVEN` (`_marked_like`) is correct if its operands are,
        # so the result keeps the reason why they mix.
        if mark in (RIGHT_ON_SHARDS, RIGHT_IF_GIVEN):
            return Value(value.leaves | {RIGHT}, value.mixes if mark == RIGHT_IF_GIVEN else "")
        # An elementwise operation mixes only if it combines a split array with one that is not
        # split.
        if name in jaxprs.ELEMENTWISE:
            return _elementwise(value, eqn, aval)
        # A reshape or a broadcast (`LAID_OUT`). If `value` has neither leaves nor `mixes` (`not
        # any(value)`), all elements of the operand are equal, so they may be laid out in any way.
        # Any other operand must keep its elements in place.
        if name in jaxprs.LAID_OUT and (not any(value) or _keeps_places(eqn)):
            return value
        # Any other operation is correct only if all its operands are whole, and nothing in it
        # depends on the shard, such as its size. The result is then whole too, `same_everywhere`.
        # `_mixes` returns a text: why the operation is wrong, or "".
        mixes = value.mixes or self._mixes(eqn, value)
        return Value(value.leaves, mixes) if mixes else same_everywhere(aval)

    def _mixes(self, eqn: JaxprEqn, sources: Value) -> str:
        """Returns the reason why an equation that is not elementwise is wrong on shards. Returns ""
        if the operands are whole, and the result depends neither on the device nor on the size of a
        shard. `sources` joins the `Value`s of all operands."""
        if sources.leaves - {WHOLE}:
            return f"{_operation(eqn)} uses more than one element"
        # All operands are the same on every device. (Their types may still vary, as those of
        # gathered leaves do.) The result can depend on the shard nevertheless: by its size, by the
        # device's index or, in the body of a loop, by a constant that differs between devices.
        given, returned = jaxprs.types(eqn.invars), jaxprs.types(eqn.outvars)
        if _knows_size([*given, *returned, *eqn.params.values()]):
            return f"{_operation(eqn)} depends on the shard's size"
        if any(map(split_over, returned)) and not any(map(split_over, given)):
            return f"{_operation(eqn)} differs between devices"
        inside = []
        # The programs inside, such as a loop's body; their arguments are whole. `run` calls the
        # method `constant` for each of their constants. If a constant differs between devices, this
        # method sets `mixes`.
        for body in jaxprs.closed(eqn.params):
            arguments = jaxprs.types(jaxprs.opened(body).invars)
            inside += self.run(body, list(map(same_everywhere, arguments)))
        return self.met(inside).mixes


def _elementwise(value: Value, eqn: JaxprEqn, aval: Any) -> Value:
    """Returns the `Value` of a result of type `aval` that an equation computes element by element.

    `value` joins the `Value`s of all operands of the equation. If a shard and a whole array are
    among the operands, the result mixes elements: element i of the shard is not element i of the
    whole array.
    """
    # Updates that `zero.sharded` has gathered are whole, though they are made of shards: they are
    # marked by `RIGHT`, and vary along no axis.
    both_whole = RIGHT in value.leaves and not split_over(aval)
    # The equation adds no mixing if all operands are whole, or if none is. A single number that is
    # the same on all devices, such as a step count, has no leaves, so it fits both cases.
    if value.mixes or value.leaves <= {WHOLE} or WHOLE not in value.leaves or both_whole:
        return value
    mixes = f"{_operation(eqn)} combines it with an array that is not split like it"
    return value._replace(mixes=mixes)


def _operation(eqn: JaxprEqn) -> str:
    """Returns the name and the line of an equation for messages, such as `sort at rules.py:12`."""
    return f"{eqn.primitive.name} at {jaxprs.origin(eqn) or 'an unknown line'}"


def _keeps_places(eqn: JaxprEqn) -> bool:
    """Returns whether an equation keeps each element of its first operand at the same place. The
    equation is a reshape, a broadcast, `squeeze` or `expand_dims` (`LAID_OUT`)."""
    before, after = jaxprs.types(eqn.invars)[0], jaxprs.types(eqn.outvars)[0]
    # A reshape with `dimensions` would also transpose.
    return before.shape == after.shape and eqn.params.get("dimensions") is None


def _knows_size(x: Any, seen: tuple[int, ...] = ()) -> bool:
    """Returns whether `x` contains a symbolic size, in a shape or in a value that a Python function
    in `x` closes over. An operation that knows the size may give other results on a shard. `seen`
    are the ids of the objects that contain `x`."""
    match x:
        # A function may close over itself, so an object inside itself is not searched again.
        case _ if id(x) in seen:
            parts = ()
        # A program holds the Python function of a callback, with the values that it closes over.
        case FunctionType():
            parts = [cell.cell_contents for cell in x.__closure__ or ()]
            parts += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        case functools.partial():
            parts = x.func, *x.args, *x.keywords.values()
        case tuple() | list():
            parts = x
        case _ if trees.is_array(x) or isinstance(x, ShapedArray):
            parts = getattr(x, "shape", ())
        case _ if dataclasses.is_dataclass(x):  # such as JAX's record of a callback
            parts = [getattr(x, field.name) for field in dataclasses.fields(x)]
        case _:
            return export.is_symbolic_dim(x)
    return any(_knows_size(part, (*seen, id(x))) for part in parts)


def follow(program: Any, values: Sequence[Value]) -> list[Value]:
    """Returns the `Value`s of a program's results. `values` are the `Value`s of its arguments."""
    return _Elements().run(program, values)
