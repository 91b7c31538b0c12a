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
from jax import export, lax
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from parallax import jaxprs, trees
from parallax._typing import PyTree
from parallax.collectives.types import axes_of_type, linear, varying_axes
from parallax.grads import matching_parameters

# Among the numbers of leaves: an array that no axis splits, and a result marked as right on shards.
WHOLE, RIGHT = -1, -2
RIGHT_ON_SHARDS, RIGHT_IF_GIVEN = "right on shards", "right on shards if what it is given is"


def right_on_shards(update: Callable[..., Any], *, at: str = "") -> Callable[..., Any]:
    """The `update` of an optimizer, whose results count as right on shards, whatever computes them.

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
    """`x`, marked as right on shards."""
    if not isinstance(x, jax.Array):
        return x
    return linear(x, forward=lambda x: x, backward=lambda ct: ct, name=RIGHT_ON_SHARDS)


def _marked_like(x: Any, like: Any) -> Any:
    """An array of the type of `like`, marked as right on shards if `x` is."""
    return linear(x, forward=lambda x: like, backward=lambda ct: ct, name=RIGHT_IF_GIVEN)


def has_unknown_sizes(tree: PyTree) -> bool:
    """Whether an array of the tree has a dim of unknown size."""
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


def of_leaf(number: int) -> Value:
    """Element for element that of a leaf."""
    return Value(frozenset([number]))


def same_everywhere(x: Any) -> Value:
    """The value of an array, or of an array's type, that is the same on all devices."""
    return Value() if np.ndim(x) == 0 or np.shape(x) == (1,) * np.ndim(x) else of_leaf(WHOLE)


def joined(values: Sequence[Value]) -> Value:
    """The value of what depends on all of these."""
    leaves = frozenset().union(*(value.leaves for value in values))
    return Value(leaves, next((value.mixes for value in values if value.mixes), ""))


def elementwise(values: Sequence[Value], operation: str, *, varies: bool) -> Value:
    """The value of what an operation computes of these element by element; `varies`: it differs
    between devices."""
    value = joined(values)
    # What `zero.sharded` returns is whole on every device, as the parameters are.
    both_whole = RIGHT in value.leaves and not varies
    if value.mixes or value.leaves <= {WHOLE} or WHOLE not in value.leaves or both_whole:
        return value
    return value._replace(mixes=f"{operation} combines it with an array that is not split like it")


def follow(
    program: Jaxpr | ClosedJaxpr, values: Sequence[Value], line: str = "an unknown line"
) -> list[Value]:
    """The values of a program's results, from those of its arguments; `line` is that of the call
    that it is in."""
    jaxpr = jaxprs.opened(program)
    known = dict(zip(jaxpr.constvars, map(_constant, getattr(program, "consts", ())), strict=True))
    known |= zip(jaxpr.invars, values, strict=True)

    def read(atom):
        return _constant(atom.val) if jaxprs.is_literal(atom) else known[atom]

    for eqn in jaxpr.eqns:
        results = _results(eqn, list(map(read, eqn.invars)), jaxprs.origin(eqn) or line)
        known |= zip(eqn.outvars, results, strict=True)
    return list(map(read, jaxpr.outvars))


def _constant(x: Any) -> Value:
    """The value of numbers that are written into the program."""
    if isinstance(x, Tracer) and split_over(x):
        return Value(mixes="it uses a value from outside that differs between devices")
    return same_everywhere(x)


def _results(eqn: JaxprEqn, operands: Sequence[Value], line: str) -> list[Value]:
    """The values of an equation's results."""
    name, types, value = eqn.primitive.name, jaxprs.types(eqn.outvars), joined(operands)
    operation = f"{name} at {line}"
    mark = eqn.params.get("name")
    if mark in (RIGHT_ON_SHARDS, RIGHT_IF_GIVEN):
        return [Value(value.leaves | {RIGHT}, value.mixes if mark == RIGHT_IF_GIVEN else "")]
    if name == "cond":
        return _branches(eqn, operands, line)
    if name not in ("while", "scan") and jaxprs.called(eqn):
        return follow(jaxprs.closed(eqn.params)[0], operands, line)
    if name in jaxprs.ELEMENTWISE:
        several = len(types) > 1  # a barrier
        return (
            list(operands) if several else [elementwise(operands, operation, varies=_vary(types))]
        )
    if name in jaxprs.LAID_OUT and (not any(value) or _keeps_places(eqn)):
        return [value]
    mixes = value.mixes or _mixes(eqn, value, line)
    return [Value(value.leaves, mixes) if mixes else same_everywhere(kind) for kind in types]


def _mixes(eqn: JaxprEqn, operands: Value, line: str) -> str:
    """Why an equation that is not elementwise is not right on shards; empty where all that it takes
    is whole."""
    operation = f"{eqn.primitive.name} at {line}"
    if operands.leaves - {WHOLE}:
        return f"{operation} uses more than one element"
    if not eqn.outvars:  # a print returns nothing
        return ""
    if _knows_size([*jaxprs.types([*eqn.invars, *eqn.outvars]), *eqn.params.values()]):
        return f"{operation} depends on the shard's size"
    if _vary(jaxprs.types(eqn.outvars)) and not _vary(jaxprs.types(eqn.invars)):
        return f"{operation} differs between devices"
    inside = []
    for body in jaxprs.closed(eqn.params):  # such as a loop's
        arguments = jaxprs.types(jaxprs.opened(body).invars)
        inside += follow(body, list(map(same_everywhere, arguments)), line)
    return joined(inside).mixes


def _branches(eqn: JaxprEqn, operands: Sequence[Value], line: str) -> list[Value]:
    """The values of a conditional's results, each of which is that of one branch or another."""
    choice, *arguments = operands
    if choice.mixes or choice.leaves - {WHOLE}:
        mixes = choice.mixes or f"cond at {line} depends on the elements"
        return [joined(operands)._replace(mixes=mixes)] * len(eqn.outvars)
    every_branch = [follow(branch, arguments, line) for branch in jaxprs.closed(eqn.params)]
    return [
        elementwise(values, f"cond at {line}", varies=_vary([kind]))
        for kind, *values in zip(jaxprs.types(eqn.outvars), *every_branch, strict=True)
    ]


def split_over(x: Any) -> frozenset[str]:
    """The axes of more than one device along which an array differs."""
    return frozenset(name for name in varying_axes(x) if lax.axis_size(name) > 1)


def _vary(types: Sequence[Any]) -> bool:
    """Whether values of these types may differ between devices."""
    return any(lax.axis_size(name) > 1 for kind in types for name in axes_of_type(kind))


def _keeps_places(eqn: JaxprEqn) -> bool:
    """Whether an equation that rearranges an array leaves each element in its place."""
    before, after = jaxprs.types(eqn.invars)[0], jaxprs.types(eqn.outvars)[0]
    return before.shape == after.shape and eqn.params.get("dimensions") is None


def _knows_size(x: Any, seen: tuple[int, ...] = ()) -> bool:
    """Whether an unknown size is part of `x`: of a shape, or of what a function takes from where it
    was made."""
    match x:
        case _ if id(x) in seen:
            parts = ()
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
