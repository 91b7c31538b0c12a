"""An optimizer's update as a program: from which leaves each value is computed, and whether element
by element.

The program is traced on leaves whose split dims have an unknown size, JAX's symbolic dimensions. So
what holds for it holds for the shards and for the whole leaves alike.
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

# Among the numbers of leaves: an array that no axis splits, and a result marked as right on shards.
WHOLE, RIGHT = -1, -2
RIGHT_ON_SHARDS, RIGHT_IF_GIVEN = "right on shards", "right on shards if what it is given is"


def right_on_shards(update: Callable[..., Any], *, at: str = "") -> Callable[..., Any]:
    """Returns the `update` of an optimizer, whose results count as right on shards, whatever
    computes them.

    Args:
        update: `(gradients, state, parameters, **extra) -> (updates, state)`; the parameters are
            those that have a gradient.
        at: the function that made it, for the message; "" where it does not need the parameters.
    """

    def wrapped(gradients, state, params=None, **extra):
        if at and params is None:
            raise ValueError(
                f"{at}: update needs the parameters, whose shapes tell shares from wholes. "
                "Pass params."
            )
        weights = None if params is None else matching_parameters(gradients, params)
        # `checked` traces it on unknown sizes, of which `update` knows nothing. Only the types and
        # the mark of this answer matter: it is never computed.
        if has_unknown_sizes((gradients, weights)):
            like = gradients if weights is None else weights
            return jax.tree.map(_marked_like, gradients, like), jax.tree.map(_marked, state)
        return jax.tree.map(_marked, update(gradients, state, weights, **extra))

    return wrapped


def _marked(x: Any) -> Any:
    """Returns `x`, marked as right on shards."""
    if not isinstance(x, jax.Array):
        return x
    # A primitive with a name survives in the program, where a Python object would not.
    return linear(x, forward=lambda x: x, backward=lambda ct: ct, name=RIGHT_ON_SHARDS)


def _marked_like(x: Any, like: Any) -> Any:
    """Returns an array of the type of `like`, marked as right on shards if `x` is."""
    return linear(x, forward=lambda x: like, backward=lambda ct: ct, name=RIGHT_IF_GIVEN)


def has_unknown_sizes(tree: PyTree) -> bool:
    """Returns whether an array of the tree has a dim of unknown size."""
    return any(
        export.is_symbolic_dim(size) for leaf in jax.tree.leaves(tree) for size in np.shape(leaf)
    )


class Value(NamedTuple):
    """What is known of a value in an optimizer's program.

    Attributes:
        leaves: the numbers of the leaves that it is computed from, `WHOLE` and `RIGHT` among them.
            Without any, it is one number, or an array of equal ones, the same on all devices.
        mixes: why it is not computed element by element; empty where it is.
    """

    leaves: frozenset[int] = frozenset()
    mixes: str = ""

    def __or__(self, second: tuple[Any, ...]) -> "Value":
        """Returns the value of an array that depends on both."""
        return Value(self.leaves | second[0], self.mixes or second[1])


def of_leaf(number: int) -> Value:
    """Returns a value that is, element for element, that of a leaf."""
    return Value(frozenset([number]))


def same_everywhere(aval: Any) -> Value:
    """Returns an array of this type that is the same on all devices."""
    return Value() if aval.shape == (1,) * aval.ndim else of_leaf(WHOLE)


def split_over(aval: Any) -> frozenset[str]:
    """Returns the axes of more than one device along which an array of this type differs."""
    return frozenset(axes_of_several_devices(axes_of_type(aval)))


class _Elements(jaxprs.Following):
    """Follows from which leaves each value is computed, and whether element by element."""

    unknown = Value()

    def constant(self, aval: Any, value: Any) -> Value:
        if split_over(aval):
            return Value(mixes="it uses a value from outside that differs between devices")
        return same_everywhere(aval)

    def results(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        # The trips of a loop may take elements of different places, so no loop is opened.
        if eqn.primitive.name in ("scan", "while"):
            return [self.plain(eqn, operands, var.aval) for var in eqn.outvars]
        return super().results(eqn, operands)

    def branches(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        choice, *arguments = operands
        # Each device would choose by its own elements.
        if choice.mixes or choice.leaves - {WHOLE}:
            mixes = choice.mixes or f"{_operation(eqn)} depends on the elements"
            return [self.met(operands)._replace(mixes=mixes)] * len(eqn.outvars)
        every_branch = [self.run(branch, arguments) for branch in eqn.params["branches"]]
        return [
            _elementwise(self.met(values), eqn, var.aval)
            for var, *values in zip(eqn.outvars, *every_branch, strict=True)
        ]

    def plain(self, eqn: JaxprEqn, operands: list[Value], aval: Any) -> Value:
        name, value, mark = eqn.primitive.name, self.met(operands), eqn.params.get("name")
        # `RIGHT` stays through what is computed element by element of it, up to the results of the
        # program.
        if mark in (RIGHT_ON_SHARDS, RIGHT_IF_GIVEN):
            return Value(value.leaves | {RIGHT}, value.mixes if mark == RIGHT_IF_GIVEN else "")
        if name in jaxprs.ELEMENTWISE:
            return _elementwise(value, eqn, aval)
        # A reshape or a broadcast of equal numbers gives equal numbers; of a leaf it may move
        # elements, so it must keep the shape.
        if name in jaxprs.LAID_OUT and (not any(value) or _keeps_places(eqn)):
            return value
        mixes = value.mixes or self._mixes(eqn, value)
        return Value(value.leaves, mixes) if mixes else same_everywhere(aval)

    def _mixes(self, eqn: JaxprEqn, operands: Value) -> str:
        """Returns why an equation that is not elementwise is not right on shards; empty where all
        that it takes is whole."""
        if operands.leaves - {WHOLE}:
            return f"{_operation(eqn)} uses more than one element"
        # All operands are the same on every device. Three things can still make the result depend
        # on the shard: its size, the device's place, and a constant inside a loop.
        given, returned = jaxprs.types(eqn.invars), jaxprs.types(eqn.outvars)
        if _knows_size([*given, *returned, *eqn.params.values()]):
            return f"{_operation(eqn)} depends on the shard's size"
        if any(map(split_over, returned)) and not any(map(split_over, given)):
            return f"{_operation(eqn)} differs between devices"
        inside = []
        for body in jaxprs.closed(eqn.params):  # such as a loop's
            arguments = jaxprs.types(jaxprs.opened(body).invars)
            inside += self.run(body, list(map(same_everywhere, arguments)))
        return self.met(inside).mixes


def _elementwise(value: Value, eqn: JaxprEqn, aval: Any) -> Value:
    """Returns the value of a result of the type `aval` that an equation computes element by
    element."""
    # What `zero.sharded` returns is whole on every device, as the parameters are.
    both_whole = RIGHT in value.leaves and not split_over(aval)
    if value.mixes or value.leaves <= {WHOLE} or WHOLE not in value.leaves or both_whole:
        return value
    mixes = f"{_operation(eqn)} combines it with an array that is not split like it"
    return value._replace(mixes=mixes)


def _operation(eqn: JaxprEqn) -> str:
    """Returns an equation, for messages: `sort at rules.py:12`."""
    return f"{eqn.primitive.name} at {jaxprs.origin(eqn) or 'an unknown line'}"


def _keeps_places(eqn: JaxprEqn) -> bool:
    """Returns whether an equation that rearranges an array leaves each element in its place."""
    before, after = jaxprs.types(eqn.invars)[0], jaxprs.types(eqn.outvars)[0]
    return before.shape == after.shape and eqn.params.get("dimensions") is None


def _knows_size(x: Any, seen: tuple[int, ...] = ()) -> bool:
    """Returns whether an unknown size is part of `x`: of a shape, or of what a function takes from
    where it was made."""
    match x:
        # A function may close over itself.
        case _ if id(x) in seen:
            parts = ()
        # JAX hands a callback's Python function through the program, and what it closes over with
        # it.
        case FunctionType():
            parts = [cell.cell_contents for cell in x.__closure__ or ()]
            parts += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        case functools.partial():
            parts = x.func, *x.args, *x.keywords.values()
        case tuple() | list():
            parts = x
        case _ if trees.is_array(x) or isinstance(x, ShapedArray):
            parts = getattr(x, "shape", ())
        case _ if dataclasses.is_dataclass(x):  # as JAX's record of a callback
            parts = [getattr(x, field.name) for field in dataclasses.fields(x)]
        case _:
            return export.is_symbolic_dim(x)
    return any(_knows_size(part, (*seen, id(x))) for part in parts)


def follow(program: Any, values: Sequence[Value]) -> list[Value]:
    """Returns the values of a program's results, from those of its arguments."""
    return _Elements().run(program, values)
