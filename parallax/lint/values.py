"""What the lint knows of a value in a program: along which axes it may differ, and since when it is what it is.

The replication types of JAX say what is *known* to be the same; these say what *is*, as far as the program tells. A value that
was summed and cast to varying again still has the same bits everywhere, and so has one that `check_vma=False` never typed.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from parallax import jaxprs

# The result holds the numbers of the first operand, by no index that is computed.
VIEWS = frozenset(
    {
        "broadcast_in_dim",
        "copy",
        "expand_dims",
        "neg",
        "pvary",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    }
)
MOVES = VIEWS | {"dynamic_slice", "gather", "stop_gradient"}
GROUPED = {
    "psum": "sum",
    "psum_invariant": "sum",
    "pmax": "maximum",
    "pmin": "maximum",
    "reduce_scatter": "scatter",
}
GATHERS = {"all_gather": "gather", "all_gather_invariant": "gather", "all_gather_reduced": "gather"}
EXCHANGES = {
    "all_to_all": "exchange",
    "ragged_all_to_all": "exchange",
    "ppermute": "permute",
    "pbroadcast": "permute",
}
KINDS = GROUPED | GATHERS | EXCHANGES
LINEAR = "linear_collective"  # a collective of ours: see collectives/types.py


class Value(NamedTuple):
    """What is known of one array.

    Attributes:
        differs: the mesh axes along which devices may hold other numbers.
        trip: the depth of the innermost loop whose trips change it; 0 outside all.
        constant: made of nothing but numbers written into the program.
        narrow: the 16-bit type whose numbers it holds, in a wider type.
        summed: for axes along which it is the same because it was summed, the axis and the line.
        parts: the sums and carries of the innermost loop that it is a linear function of.
    """

    differs: frozenset[str] = frozenset()
    trip: int = 0
    constant: bool = False
    narrow: str = ""
    summed: tuple[tuple[str, str], ...] = ()
    parts: frozenset = frozenset()


class Sent(NamedTuple):
    """A collective: its kind, the axes it runs over, and whether it is made of permutes."""

    kind: str
    axes: tuple[str, ...]
    permutes: bool


def joined(values: Sequence[Value], **fields: Any) -> Value:
    """What is known of a function of all these."""
    together = Value(
        differs=frozenset().union(*(value.differs for value in values)),
        trip=max((value.trip for value in values), default=0),
        constant=all(value.constant for value in values),
        summed=tuple(dict(pair for value in values for pair in value.summed).items()),
    )
    return together._replace(**fields)


def either(one: Value, other: Value) -> Value:
    """What is known of a value that is the one or the other."""
    return joined([one, other], narrow=one.narrow if one.narrow == other.narrow else "")


def narrow(eqn: JaxprEqn, values: Sequence[Value]) -> str:
    """The 16-bit type whose numbers the result of an equation holds, in a wider type; or ""."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        source, result = (jaxprs.types(atoms)[0].dtype for atoms in (eqn.invars, eqn.outvars))
        return "" if not is_wide(result) else source.name if is_narrow(source) else values[0].narrow
    if name in MOVES:
        return values[0].narrow
    if name in ("concatenate", "select_n"):
        found = {value.narrow for value in values[name == "select_n" :] if not value.constant}
        return found.pop() if len(found) == 1 else ""
    return ""


def sent(eqn: JaxprEqn, ours: Jaxpr | None) -> Sent | None:
    """The collective that an equation is, or None. `ours` is what a collective of this library binds."""
    name = eqn.primitive.name
    if name in KINDS and eqn.params.get("axis_index_groups") is None:
        names = eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"]
        names = names if isinstance(names, tuple) else (names,)
        return Sent(
            KINDS[name],
            tuple(axis for axis in names if isinstance(axis, str)),
            KINDS[name] == "permute",
        )
    if ours is None:
        return None
    inside = list(jaxprs.every(ours))
    found = {
        axis
        for each in inside
        if each.primitive.name == "ppermute"
        for axis in each.params["axis_name"]
    }
    if not found or any(each.primitive.name == LINEAR for each in inside):
        return None  # nothing is sent, or what sends is inside
    before, after = (jaxprs.types(atoms)[0].size for atoms in (eqn.invars, eqn.outvars))
    kind = "scatter" if after < before else "gather" if after > before else "exchange"
    is_sum = any(each.primitive.name == "replicated" for each in inside)
    return Sent("sum" if is_sum else kind, tuple(sorted(found)), True)


def after(sent: Sent, value: Value, axes: frozenset[str], where: str) -> Value:
    """What is known of a collective's result; `axes` are those of more than one device."""
    if sent.kind in ("sum", "maximum", "gather"):
        summed = {axis: at for axis, at in value.summed if axis not in axes}
        summed |= dict.fromkeys(sorted(axes), where) if sent.kind == "sum" else {}
        return Value(value.differs - axes, value.trip, value.constant, summed=tuple(summed.items()))
    return Value(value.differs | axes, value.trip, value.constant)


def is_narrow(dtype: Any) -> bool:
    """Whether a type is a real floating-point type of 16 bits or fewer."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 16


def is_wide(dtype: Any) -> bool:
    """Whether a type is a real floating-point type of 32 bits or more."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 32


def nbytes(aval: Any) -> int:
    """The bytes of an array of this type."""
    return math.prod(aval.shape) * jax.dtypes.itemsize_bits(aval.dtype) // 8


def in_tuple(one_or_several: Any) -> tuple[Any, ...]:
    """A tuple as it is, and anything else as a tuple of one."""
    return one_or_several if isinstance(one_or_several, tuple) else (one_or_several,)
