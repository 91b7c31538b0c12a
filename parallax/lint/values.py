"""Records what the lint knows about the values of a program (the *facts*), and how some operations
change the facts.

A *value* is an array in the program. A *fact* is one thing that the lint knows about a value
without running the program, such as "it differs along 'data'". A `Value` has the facts about one
value, and a `Dim` has the facts about one dim of a value. Each value of a program also has an id,
an int.

JAX's replication types say along which axes a value is *known* to be the same on all devices. The
facts say along which axes it *is* the same, as far as the program shows. A value that was summed
and then cast to varying has the same bits on all devices, although its type does not say so. A
program with `check_vma=False` has no such types.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from parallax import jaxprs

NO_AXES: frozenset[str] = frozenset()
Dims = tuple[tuple[str, ...], ...]  # for each dim the axes that split it, the outermost first

# Operations whose results hold elements of the first operand (or their negatives), at places that
# do not depend on other operands.
VIEWS = frozenset(
    {
        *("broadcast_in_dim", "copy", "expand_dims", "neg", "pvary", "reshape", "rev", "slice"),
        *("squeeze", "transpose"),
    }
)
# Operations like `VIEWS`, but the places may depend on other operands.
_MOVES = VIEWS | {"dynamic_slice", "gather", "stop_gradient"}
GATHERS = frozenset({"all_gather", "all_gather_invariant", "all_gather_reduced"})
_KINDS = {
    **dict.fromkeys(("psum", "psum_invariant", "unreduced_psum"), "sum"),
    **dict.fromkeys(("pmax", "pmin"), "maximum"),
    **dict.fromkeys(GATHERS, "gather"),
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "exchange"),
    **dict.fromkeys(("ppermute", "pbroadcast"), "permute"),
    **dict.fromkeys(("reduce_scatter", "unreduced_reduce_scatter"), "scatter"),
}
# The primitive of a collective of this library (see collectives/types.py). The function `ours`
# returns its jaxpr, which is made of `ppermute`s.
LINEAR = "linear_collective"


class Dim(NamedTuple):
    """The facts about one dim of a value.

    Attributes:
        split: the axes along which devices have different elements of the dim.
        within: if a reshape cut a split dim into several dims, and this dim is one of them but not
            the outermost: the axes of the split dim. Else empty.
        rows: whether the dim runs over the rows (examples) of the batch.
        drawn: whether each index of the dim has random numbers of its own.
        counted: whether the elements were computed from an `iota` along the dim; the `iota`
            begins at 0 on each device.
        parts: the slices of split dims, such as `x[:k]`, from which the elements were computed.
    """

    split: frozenset[str] = NO_AXES
    within: frozenset[str] = NO_AXES
    rows: bool = False
    drawn: bool = False
    counted: bool = False
    parts: frozenset["Part"] = frozenset()


class Part(NamedTuple):
    """A slice of a split dim.

    Attributes:
        source: the split dim, as three numbers: `id(program)`, the id of the value that has the
            dim, and the index of the dim in the value.
        aval: the type of that value.
        start: the index, along the split dim, of the first element of the slice.
    """

    source: tuple[int, int, int]
    aval: Any
    start: int


class Term(NamedTuple):
    """The fact that a value is computed from a *term*. A term is the result that one device gets
    when it reduces a dim that is split over devices.

    Attributes:
        node: the reduction whose result is the term.
        aval: the type of the reduction's operand.
        is_linear: whether the value that this fact is about is a linear function of the term, so
            that a later sum over devices completes the reduction.
        is_peak: whether the reduction is a maximum or a minimum.
        added: the operation that added to the term a value that is the same on all devices; None if
            no operation did.
    """

    node: Any
    aval: Any
    is_linear: bool = True
    is_peak: bool = False
    added: Any = None


class Shard(NamedTuple):
    """The argument from which a value was made, only by elementwise operations, reshapes,
    transposes and all-gathers.

    Attributes:
        argument: the index of the argument.
        dims: for each dim of the value, the axes that split the dim.
    """

    argument: int
    dims: Dims


class Value(NamedTuple):
    """The facts about one value.

    Attributes:
        differs: the mesh axes along which devices may hold different elements.
        trip: the depth of the innermost loop whose iterations change the value; 0 if no loop does.
        constant: whether the value is made only of numbers written into the program, and of
            `iota`s (0, 1, 2, ...).
        narrow: the name of the 16-bit type that the value was cast from, if the value's own type is
            wider; else "".
        summed: the axes along which the value is the same on all devices because it was summed,
            each with the source line of the sum.
        parts: the carries of the innermost loop, and the sums over devices in its body, on which
            the value depends linearly.
        dims: the facts about each dim; None for numbers written into the program.
        terms: the axes over which a reduction is not yet complete, since the value is only this
            device's term of it; each axis comes with its `Term`.
        shared: the axes for which the value was divided by the number of devices along the axis.
        shard: the argument from which the value was made, only by elementwise operations, reshapes,
            transposes and all-gathers; None if there is no such argument.
        fed: the axes that split the rows of a batch on which the value depends. An axis is left out
            if a collective over this axis stands between the batch and the value.
        chosen: the axes along which the value depends on the device's index (`axis_index`).
        ref: for a mutable array, the `id` of the operation that made it; else None.
    """

    differs: frozenset[str] = NO_AXES
    trip: int = 0
    constant: bool = False
    narrow: str = ""
    summed: tuple[tuple[str, str], ...] = ()
    parts: frozenset = frozenset()
    dims: tuple[Dim, ...] | None = None
    terms: tuple[tuple[str, Term], ...] = ()
    shared: frozenset[str] = NO_AXES
    shard: Shard | None = None
    fed: frozenset[str] = NO_AXES
    chosen: frozenset[str] = NO_AXES
    ref: int | None = None

    @property
    def has_rows(self) -> bool:
        """Whether a dim of the value runs over the rows of the batch."""
        return any(dim.rows for dim in self.dims or ())

    def with_dims_and_origin_of(self, value: "Value") -> "Value":
        """Returns facts about one array, joined from `self` and `value`, which are both about this
        array.

        The facts about dims (`dims`, `terms`, `shared`) are those of `value`, and so are the facts
        about the origin (`shard`, `fed`, `chosen`): what the array was computed from. Two functions
        compute these facts: `dims_after` and `origin_facts`. All other facts are those of `self`.
        """
        return value._replace(
            differs=self.differs,
            trip=self.trip,
            constant=self.constant,
            narrow=self.narrow,
            summed=self.summed,
            parts=self.parts,
            ref=self.ref,
        )

    def sliced(self) -> "Value":
        """Returns the facts about `x[i]`, one slice of the value `x` along its first dim."""
        shard = self.shard and self.shard._replace(dims=self.shard.dims[1:])
        return self._replace(dims=self.dims[1:] if self.dims else self.dims, shard=shard)

    def stacked(self) -> "Value":
        """Returns the facts about an array that stacks several values along a new first dim. `self`
        has the facts that are true of each of these values. The stack has no `shard`, which would
        need the axes that split the new dim: they are not known."""
        dims = None if self.dims is None else (Dim(), *self.dims)
        return self._replace(dims=dims, shard=None)


class Sent(NamedTuple):
    """A collective.

    Attributes:
        kind: "sum", "maximum" (also for a minimum), "gather", "scatter", "exchange" or "permute".
        axes: the mesh axes along which the collective sends.
        permutes: whether the collective is made of `ppermute`s, which wait for all devices of the
            program.
    """

    kind: str
    axes: tuple[str, ...]
    permutes: bool


def joined(values: Sequence[Value], **fields: Any) -> Value:
    """Returns the facts `differs`, `trip`, `constant` and `summed` about a value that is computed
    from all `values`. The other facts are given in `fields`, or are not known.
    """
    together = Value(
        differs=NO_AXES.union(*(value.differs for value in values)),
        # The depth of the innermost of the loops that change `values`.
        trip=max((value.trip for value in values), default=0),
        constant=all(value.constant for value in values),  # only numbers written in the program
        # Pairs of an axis and the line of the sum over it. An axis is listed once, with one of its
        # lines: they are only for messages.
        summed=tuple(dict(pair for value in values for pair in value.summed).items()),
    )
    return together._replace(**fields)


def either(first: Value, second: Value) -> Value:
    """Returns the facts about a value that is one of two, such as the result of a conditional.

    An axis is in `differs` or `chosen` of the result if it is there for one of the two. All other
    facts must hold for both. There is one exception: if one of the two is made only of numbers
    written into the program, such as zeros, the result has the other value's facts about dims.
    """
    together = joined(
        [first, second],
        narrow=first.narrow if first.narrow == second.narrow else "",
        shard=first.shard if first.shard == second.shard else None,
        fed=first.fed & second.fed,
        chosen=first.chosen | second.chosen,  # these axes excuse a finding
    )
    # The dims of numbers written into the program are None.
    if first.dims is None or second.dims is None:
        known = first if second.dims is None else second
        return together._replace(dims=known.dims, terms=known.terms, shared=known.shared)
    return together._replace(
        dims=tuple(map(_either_dim, first.dims, second.dims)),
        terms=tuple(pair for pair in first.terms if pair in second.terms),
        shared=first.shared & second.shared,
    )


def _either_dim(first: Dim, second: Dim) -> Dim:
    """Returns the facts about a dim that is either `first` or `second`. Each fact must hold for
    both dims, except `rows` (the dim runs over the rows of the batch): one of the two is enough.
    """
    return Dim(
        first.split & second.split,
        first.within & second.within,
        first.rows or second.rows,  # a carry may begin as zeros, and get rows later
        first.drawn and second.drawn,
        first.counted and second.counted,
        first.parts & second.parts,
    )


def narrow(eqn: JaxprEqn, values: Sequence[Value]) -> str:
    """Returns the name of the 16-bit type that an equation's result was cast from, if the result's
    own type is wider; else "".

    `values` are the facts about the operands. For a result of a `cond`, they are the facts about
    the predicate, and then those about the value that each branch returns for this result.
    """
    name = eqn.primitive.name
    if name == "convert_element_type":
        source, result = (jaxprs.types(atoms)[0].dtype for atoms in (eqn.invars, eqn.outvars))
        if not is_wide(result):
            return ""
        return source.name if is_narrow(source) else values[0].narrow
    if name in _MOVES:
        return values[0].narrow
    if name in ("concatenate", "select_n", "cond"):
        chosen = values if name == "concatenate" else values[1:]  # without the predicate
        # A constant, such as the 0 of a mask, does not count.
        types = {value.narrow for value in chosen if not value.constant}
        return types.pop() if len(types) == 1 else ""
    return ""


def sent(eqn: JaxprEqn, ours: Jaxpr | None) -> Sent | None:
    """Returns a `Sent` if the equation itself is a collective; otherwise returns None.

    An equation with the primitive `LINEAR` is a collective of this library, and `ours` is its
    jaxpr. For any other equation, `ours` is None. All kinds of these collectives are made of
    `ppermute`s, so the kind is found by comparing the sizes of the operand and the result.
    """
    kind = _KINDS.get(eqn.primitive.name)
    # A collective among groups of an axis's devices is left out, as it does not go over the whole
    # axis. An axis with a number for a name is one of `vmap`, and no mesh axis.
    if kind and eqn.params.get("axis_index_groups") is None:
        names = in_tuple(eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"])
        axes = tuple(axis for axis in names if isinstance(axis, str))
        return Sent(kind, axes, permutes=kind == "permute")
    if ours is None:
        return None
    inside = list(jaxprs.every(ours))
    permutes = [eqn for eqn in inside if eqn.primitive.name == "ppermute"]
    # If `ours` has further collectives of this library inside, the equation as a whole counts as no
    # collective: the caller reads each of those inside.
    if not permutes or any(eqn.primitive.name == LINEAR for eqn in inside):
        return None
    axes = {axis for permute in permutes for axis in permute.params["axis_name"]}
    before, after = (jaxprs.types(atoms)[0].size for atoms in (eqn.invars, eqn.outvars))
    if before != after:
        kind = "scatter" if after < before else "gather"
    else:
        # An all-reduce declares inside its jaxpr that its result is `replicated`.
        is_sum = any(eqn.primitive.name == "replicated" for eqn in inside)
        kind = "sum" if is_sum else "exchange"
    return Sent(kind, tuple(sorted(axes)), permutes=True)


def sent_inside(jaxpr: Jaxpr, ours: Callable[[JaxprEqn], Jaxpr]) -> Iterator[Sent]:
    """Yields the collectives of a jaxpr and of all jaxprs inside it. `ours` returns the jaxpr of a
    collective of this library.
    """
    for eqn in jaxprs.every(jaxpr):
        collective = sent(eqn, ours(eqn) if eqn.primitive.name == LINEAR else None)
        if collective:
            yield collective


def after_collective(sent: Sent, value: Value, axes: frozenset[str], where: str) -> Value:
    """Returns the facts `differs`, `trip`, `constant` and `summed` about a collective's result. The
    result of a sum, a maximum, a minimum or a gather is the same on all devices along `axes`. The
    result of a scatter, an exchange or a permute counts as different on these devices.

    Args:
        sent: the collective.
        value: the facts about the collective's operand.
        axes: the axes of the collective that have several devices.
        where: the source line of the collective, "file.py:12".
    """
    # The first three fields of a `Value` are `differs`, `trip` and `constant`. `summed`, which only
    # serves messages, is left out: after a permute, a scatter or an exchange, the value is not the
    # array that an earlier sum made.
    if sent.kind not in ("sum", "maximum", "gather"):  # a minimum is of the kind "maximum" too
        return Value(value.differs | axes, value.trip, value.constant)
    # The lines of sums, for messages: a new collective over an axis replaces the earlier sum.
    summed = {axis: line for axis, line in value.summed if axis not in axes}
    if sent.kind == "sum":
        summed |= dict.fromkeys(sorted(axes), where)
    return Value(value.differs - axes, value.trip, value.constant, summed=tuple(summed.items()))


def is_narrow(dtype: Any) -> bool:
    """Returns whether a type is a real floating-point type of 16 bits or fewer."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 16


def is_wide(dtype: Any) -> bool:
    """Returns whether a type is a real floating-point type of 32 bits or more."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 32


def holds_keys(aval: Any) -> bool:
    """Returns whether an array of this type holds random keys, as `jax.random.key` makes them."""
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def nbytes(aval: Any) -> int:
    """Returns the bytes of an array of this type; for random keys, of the numbers they hold."""
    if holds_keys(aval):
        keys = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        aval = jax.eval_shape(jax.random.key_data, keys)
    return math.prod(aval.shape) * jax.dtypes.itemsize_bits(aval.dtype) // 8


def in_tuple(one_or_several: Any) -> tuple[Any, ...]:
    """Returns a tuple as it is, and anything else as a tuple of one."""
    return one_or_several if isinstance(one_or_several, tuple) else (one_or_several,)
