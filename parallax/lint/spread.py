"""Which dims of the values between parameters and loss are split, and which sums over them are still to be completed.

A dim is split where a trained argument's spec splits it, and in whatever that argument is multiplied into: hidden units, heads.
So are the dims of a batch that its spec splits, tokens, but for the first one, which counts its rows.
A reduction over such a dim gives each device a term of its own. All is well where a collective over the axis comes next. It is
not where the term meets the split dim again (a norm, a softmax), or something that is whole is added to it (a bias).
Sought are values that still have a dim of the batch's rows, in the forward pass: gradients and updates are of weights.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from parallax import jaxprs
from parallax.lint import mistakes
from parallax.lint.flat import CHOSEN, Flat, Node
from parallax.lint.values import Sent, in_tuple

NO_AXES: frozenset[str] = frozenset()
Note = Callable[..., None]  # (mistake, the node at fault, its facts)


class Dim(NamedTuple):
    """What is known of a dim.

    Attributes:
        split: the axes along which each device has other elements of it.
        within: those of a split dim of which this is the inner part, since a reshape.
        rows: whether it counts the batch's rows.
        drawn: whether random numbers were drawn for each of its elements.
        counted: whether its elements were made of their numbers on the device: 0, 1, 2, ...
        parts: the slices of split dims that its elements are made of.
    """

    split: frozenset[str] = NO_AXES
    within: frozenset[str] = NO_AXES
    rows: bool = False
    drawn: bool = False
    counted: bool = False
    parts: frozenset["Part"] = frozenset()


class Part(NamedTuple):
    """A slice of a split dim: the dim, by value and number; the type of that value; and where the slice begins."""

    source: tuple[int, int, int]
    aval: Any
    start: int


class Term(NamedTuple):
    """A device's term of a reduction over a split dim.

    Attributes:
        node: the reduction.
        aval: the type of what it reduces.
        is_linear: whether the value is still a linear function of it, so that a later sum completes it.
        is_peak: whether it is a maximum or minimum.
        added: what added something whole to it.
    """

    node: Node
    aval: Any
    is_linear: bool = True
    is_peak: bool = False
    added: Node | None = None


class Spread(NamedTuple):
    """What is known of a value; by default that it is made of numbers written into the program.

    Attributes:
        dims: its dims; of a constant, None.
        terms: for each axis along which it is a term, which.
        differs: the axes along which devices may hold other numbers.
        shared: those by whose size it was divided.
        is_count: whether it was made of numbers written into the program, and of counts, alone.
    """

    dims: tuple[Dim, ...] | None = None
    terms: tuple[tuple[str, Term], ...] = ()
    differs: frozenset[str] = NO_AXES
    shared: frozenset[str] = NO_AXES
    is_count: bool = False

    @property
    def has_rows(self) -> bool:
        """Whether a dim of it counts rows of the batch."""
        return any(dim.rows for dim in self.dims or ())

    def sliced(self) -> "Spread":
        """What is known of a slice along the first dim."""
        return self._replace(dims=self.dims[1:]) if self.dims else self

    def stacked(self) -> "Spread":
        """What is known of such values, stacked along a first dim."""
        return self if self.dims is None else self._replace(dims=(Dim(), *self.dims))


WRITTEN = Spread()


def either(one: Spread, other: Spread) -> Spread:
    """What is known of a value that is the one or the other."""
    if one.dims is None or other.dims is None:
        known = one if other.dims is None else other
        return known._replace(differs=one.differs | other.differs)
    return Spread(
        tuple(_either_dim(a, b) for a, b in zip(one.dims, other.dims, strict=True)),
        tuple(pair for pair in one.terms if pair in other.terms),
        one.differs | other.differs,
        one.shared & other.shared,
        one.is_count and other.is_count,
    )


def _either_dim(one: Dim, other: Dim) -> Dim:
    flags = one.rows or other.rows, one.drawn and other.drawn, one.counted and other.counted
    return Dim(one.split & other.split, one.within & other.within, *flags, one.parts & other.parts)


# Operations that keep what is linear in their operand
LINEAR = frozenset(
    {
        "neg",
        "convert_element_type",
        "copy",
        "copy_p",
        "pbroadcast",
        "pcast",
        "pvary",
        "real",
        "reduce_precision",
        "reshard",
    }
    | {"stop_gradient", "replicated"}
)
JOINS = jaxprs.ELEMENTWISE | LINEAR
COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
ARITHMETIC = frozenset({"add", "sub", "mul", "div", "max", "min", "pow", "atan2", "rem"})


def after(
    program: Flat, node: Node, inputs: Sequence[Spread], sizes: Mapping[str, int], note: Note
) -> list[Spread]:
    """What is known of the results of an operation, given what is known of its operands; `note` is told of mistakes."""
    reading = _Operation(program, node, sizes)
    results = reading.results(inputs)
    if any(each.has_rows for each in (*inputs, *results)):
        for mistake in reading.mistakes:
            note(*mistake)
    return results


class _Operation:
    """One operation, and the mistakes in it."""

    def __init__(self, program: Flat, node: Node, sizes: Mapping[str, int]):
        self.program, self.node, self.sizes = program, node, sizes
        self.params, self.mistakes = node.eqn.params, []
        self.avals = [program.types[value] for value in node.inputs]
        self.shapes = [program.shape(value) for value in node.outputs]

    def results(self, inputs: Sequence[Spread]) -> list[Spread]:
        """What is known of its results."""
        name, differs = self.node.name, NO_AXES.union(*(each.differs for each in inputs))
        if self.node.sent:
            return self._sent(self.node.sent, inputs, differs)
        if name == "optimization_barrier":
            return list(inputs)
        if name == "axis_index":
            return [Spread((), differs=frozenset(in_tuple(self.params["axis_name"])))]
        if name == "replicated":
            differs -= set(self.params["axes"])
        if name not in ("random_bits", "iota") and all(each.dims is None for each in inputs):
            return [Spread(differs=differs) for _ in self.shapes]
        found = (RULES.get(name) or (_Operation._joined if name in JOINS else _Operation._other))(
            self, inputs
        )
        is_count = (
            name != "random_bits"
            and not differs
            and all(each.dims is None or each.is_count for each in inputs)
        )
        return [
            each._replace(differs=differs, is_count=is_count)
            for each in (found if isinstance(found, list) else [found])
        ]

    def _other(self, inputs: Sequence[Spread]) -> list[Spread]:
        return [_unknown(shape) for shape in self.shapes]

    def _chosen(self, inputs: Sequence[Spread]) -> Spread:
        return functools.reduce(either, inputs[1:])

    def _drawn(self, inputs: Sequence[Spread]) -> Spread:
        return Spread((Dim(drawn=True),) * len(self.shapes[0]))

    def _counted(self, inputs: Sequence[Spread]) -> Spread:
        return Spread(
            tuple(Dim(counted=i == self.params["dimension"]) for i in range(len(self.shapes[0])))
        )

    # Operations that lay elements out

    def _broadcast(self, inputs: Sequence[Spread]) -> Spread:
        dims, before, after = self._dims(inputs[0]), self.avals[0].shape, self.shapes[0]
        found = [Dim()] * len(after)
        for i, j in enumerate(self.params["broadcast_dimensions"]):
            found[j] = dims[i] if before[i] == after[j] else Dim()
        return inputs[0]._replace(dims=tuple(found))

    def _relaid(self, inputs: Sequence[Spread]) -> Spread:
        return inputs[0]._replace(
            dims=_reshaped(self._dims(inputs[0]), self.avals[0].shape, self.shapes[0])
        )

    def _turned(self, inputs: Sequence[Spread]) -> Spread:
        dims = self._dims(inputs[0])
        return inputs[0]._replace(dims=tuple(dims[i] for i in self.params["permutation"]))

    def _squeezed(self, inputs: Sequence[Spread]) -> Spread:
        left = (
            dim for i, dim in enumerate(self._dims(inputs[0])) if i not in self.params["dimensions"]
        )
        return inputs[0]._replace(dims=tuple(left))

    def _sliced(self, inputs: Sequence[Spread]) -> Spread:
        strides = self.params["strides"] or itertools.repeat(1)
        starts = zip(self.params["start_indices"], strides, strict=False)
        return self._part(
            inputs[0],
            {i: start for i, (start, stride) in enumerate(starts) if stride == 1},
            self.shapes[0],
        )

    def _divided(self, inputs: Sequence[Spread]) -> list[Spread]:
        starts = itertools.accumulate(map(int, (0, *self.params["sizes"][:-1])))
        dim = self.params["axis"]
        return [
            self._part(inputs[0], {dim: start}, shape)
            for start, shape in zip(starts, self.shapes, strict=True)
        ]

    def _unstacked(self, inputs: Sequence[Spread]) -> list[Spread]:
        """A value for each element of a dim, as newer versions of JAX unpack an array."""
        gone = self.params["axis"]
        left = tuple(dim for i, dim in enumerate(self._dims(inputs[0])) if i != gone)
        return [inputs[0]._replace(dims=left) for _ in self.shapes]

    def _stacked(self, inputs: Sequence[Spread]) -> Spread:
        known, place = [each.dims for each in inputs if each.dims is not None], self.params["axis"]
        dims = [self._together(column) for column in zip(*known, strict=True)]
        terms = [
            pair for pair in inputs[0].terms if all(pair[0] in dict(each.terms) for each in inputs)
        ]
        return Spread((*dims[:place], Dim(), *dims[place:]), tuple(terms))

    def _same_but_resized(self, inputs: Sequence[Spread]) -> Spread:
        """An operation along some dims: what is known of those of other sizes is lost."""
        sizes = zip(self._dims(inputs[0]), self.avals[0].shape, self.shapes[0], strict=True)
        return Spread(
            tuple(dim if before == after else Dim(rows=dim.rows) for dim, before, after in sizes)
        )

    def _dims(self, value: Spread, place: int = 0) -> tuple[Dim, ...]:
        return (Dim(),) * self.avals[place].ndim if value.dims is None else value.dims

    def _part(self, value: Spread, starts: Mapping[int, int], shape: tuple[int, ...]) -> Spread:
        """A slice that begins there: of split dims it is remembered."""
        dims = list(self._dims(value))
        for i, start in starts.items():
            if self.avals[0].shape[i] != shape[i] and dims[i].split:
                source = (id(self.program), self.node.inputs[0], i)
                dims[i] = dims[i]._replace(
                    parts=frozenset({Part(source, self.avals[0], int(start))})
                )
        return value._replace(dims=tuple(dims))

    def _concatenated(self, inputs: Sequence[Spread]) -> Spread:
        known, place = (
            [each.dims for each in inputs if each.dims is not None],
            self.params["dimension"],
        )
        dims = [self._together(column) for column in zip(*known, strict=True)]
        split = frozenset.intersection(*(each[place].split for each in known))
        dims[place] = Dim(split, rows=dims[place].rows)
        terms = [
            pair for pair in inputs[0].terms if all(pair[0] in dict(each.terms) for each in inputs)
        ]
        return Spread(tuple(dims), tuple(terms))

    def _looked_up(self, inputs: Sequence[Spread]) -> Spread:
        """Rows of a table: their dims are those of the numbers of the rows, and then those of a row."""
        numbers, taken = self.params["dimension_numbers"], self.params["slice_sizes"]
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        row = zip(self._dims(inputs[0]), self.avals[0].shape, taken, strict=True)
        of_row = iter(
            [
                dim if size == part else Dim()
                for i, (dim, size, part) in enumerate(row)
                if i not in gone
            ]
        )
        is_local = inputs[0].dims is None or any(
            dim.split for dim in inputs[0].dims
        )  # then by a device's own numbers
        by_row = iter(
            [dim._replace(counted=dim.counted and not is_local) for dim in self._dims(inputs[1], 1)]
        )
        return Spread(
            tuple(
                next(of_row if i in numbers.offset_dims else by_row)
                for i in range(len(self.shapes[0]))
            )
        )

    # Operations that join values

    def _together(self, dims: Sequence[Dim]) -> Dim:
        """A dim along which values are joined, element for element."""
        split = NO_AXES.union(*(dim.split for dim in dims))
        parts = frozenset().union(*(dim.parts for dim in dims))
        by_source = {part.source: part for part in parts}
        if others := [part for part in parts if part != by_source[part.source]]:
            self._mistake(
                mistakes.parts_of_a_split_dim, self.node, others[0].aval, others[0].source[2], split
            )
            parts = frozenset()
        within = NO_AXES.union(*(dim.within for dim in dims))
        rows, drawn, counted = (
            any(flags)
            for flags in zip(*((dim.rows, dim.drawn, dim.counted) for dim in dims), strict=True)
        )
        return Dim(split, within, rows, drawn, counted, parts)

    def _joined(self, inputs: Sequence[Spread]) -> Spread:
        """An elementwise operation."""
        rank = len(self.shapes[0])
        given = [each for each in inputs if each.dims is not None and len(each.dims) == rank]
        if not given:  # a scalar chose between constants
            return _unknown(self.shapes[0])
        dims = tuple(
            self._together(column)
            for column in zip(*(each.dims or () for each in given), strict=True)
        )
        for each in given:
            met = [
                (dim.split - each.differs, one)
                for dim, one in zip(dims, each.dims or (), strict=True)
            ]
            for kind, axes in (
                (
                    "one-key-for-split-units",
                    NO_AXES.union(*(axes for axes, one in met if one.drawn)),
                ),
                ("counted-on-a-device", NO_AXES.union(*(axes for axes, one in met if one.counted))),
            ):
                if axes:
                    aval = self.program.types[self.node.outputs[0]]
                    self._mistake(mistakes.repeated_on_each_device, self.node, kind, aval, axes)
        # Of numbers that say which comes first, how far two are apart, or whether one is there, none is a place in the whole.
        if self.node.name in COMPARES or sum(dim.counted for dim in dims) > 1:
            dims = tuple(dim._replace(counted=False) for dim in dims)
        axes = sorted({axis for each in given for axis, _ in each.terms})
        terms = ((axis, self._term(axis, inputs)) for axis in axes)
        shared = frozenset.intersection(*(each.shared for each in given))
        return Spread(
            dims,
            tuple((axis, term) for axis, term in terms if term),
            shared=shared | self._divided_by(),
        )

    def _term(self, axis: str, inputs: Sequence[Spread]) -> Term | None:
        """What an elementwise operation makes of the terms along an axis; None if they are followed no further."""
        name, known = (
            self.node.name,
            [each for each in inputs if each.dims is not None and not each.is_count],
        )
        terms = [term for each in known for of, term in each.terms if of == axis]
        others = [each for each in known if axis not in dict(each.terms)]
        term = next((term for term in terms if not term.is_linear), terms[0])
        with_term = [each.dims or () for each in known if axis in dict(each.terms)]
        if any(_spreads_again(axis, each.dims or (), with_term) for each in others):
            if name in ARITHMETIC and not (
                term.is_peak and name == "sub"
            ):  # a softmax may be shifted by any number
                self._mistake(
                    mistakes.reduced_over_a_split_dim,
                    term.node,
                    term.node.name,
                    term.aval,
                    frozenset({axis}),
                )
            return None
        if name in LINEAR or (name == "select_n" and not others):
            return term
        if name in ("add", "sub", "add_any") and not term.is_peak:
            whole = [each for each in others if axis not in each.differs | each.shared]
            if whole and term.is_linear and not term.added and name != "add_any":
                return term._replace(added=self.node)
            return term if len(whole) == len(others) else None
        if any(axis in each.differs for each in others):
            return None
        is_factor = len(terms) == 1 and (
            name == "mul" or (name == "div" and axis in dict(inputs[0].terms))
        )
        return term if is_factor else term._replace(is_linear=False)

    def _divided_by(self) -> frozenset[str]:
        """The axes by whose size a product or quotient is scaled."""
        if self.node.name not in ("mul", "div"):
            return NO_AXES
        factors = [
            number for value in self.node.inputs if (number := self._number(value)) is not None
        ]
        is_factor = lambda size: any(
            np.isclose(factor, (size, 1 / size)).any() for factor in factors
        )
        return frozenset(axis for axis, size in self.sizes.items() if is_factor(size))

    def _number(self, value: int) -> Any:
        """The number that is written into the program for a value."""
        while value not in self.program.literals:
            node = self.program.made.get(value)
            if node is None or node.name not in LINEAR | {"broadcast_in_dim"}:
                return None
            value = node.inputs[0]
        return self.program.literals[value]

    # Operations that reduce dims

    def _reduced(self, inputs: Sequence[Spread]) -> Spread:
        value, dims = inputs[0], self._dims(inputs[0])
        gone, is_sum = self.params["axes"], self.node.name == "reduce_sum"
        left = tuple(dim for i, dim in enumerate(dims) if i not in gone)
        axes = NO_AXES.union(*(dims[i].split for i in gone))
        # Of an inner part of a split dim that has one element, a sum is no sum: the groups are those of the whole.
        axes |= NO_AXES.union(*(dims[i].within for i in gone if self.avals[0].shape[i] == 1))
        terms = dict(value.terms) if is_sum else {}
        if any(dim.rows for dim in left):
            terms |= dict.fromkeys(
                axes, Term(self.node, self.avals[0], is_linear=is_sum, is_peak=not is_sum)
            )
        return Spread(left, tuple(terms.items()), shared=value.shared)

    def _product(self, inputs: Sequence[Spread]) -> Spread:
        one, other = inputs
        (contracted, contracted_too), (batch, batch_too) = self.params["dimension_numbers"]
        left, right = self._dims(one), self._dims(other, 1)
        together = [
            self._together((left[i], right[j])) for i, j in zip(batch, batch_too, strict=True)
        ]
        free = [dim for i, dim in enumerate(left) if i not in (*contracted, *batch)]
        free += [dim for j, dim in enumerate(right) if j not in (*contracted_too, *batch_too)]
        dims = (*together, *free)
        of_one, of_other = dict(one.terms), dict(other.terms)
        terms = {axis: term for axis, term in of_one.items() if axis not in other.differs}
        terms |= {axis: term for axis, term in of_other.items() if axis not in one.differs}
        summed = [
            left[i].split | right[j].split for i, j in zip(contracted, contracted_too, strict=True)
        ]
        if any(dim.rows for dim in dims):
            terms |= dict.fromkeys(NO_AXES.union(*summed), Term(self.node, self.avals[0]))
        return Spread(dims, tuple(terms.items()))

    # Collectives

    def _sent(self, sent: Sent, inputs: Sequence[Spread], differs: frozenset[str]) -> list[Spread]:
        axes = frozenset(sent.axes)
        for each in inputs:
            for axis, term in each.terms:
                if (
                    term.added
                    and term.is_linear
                    and axis in axes
                    and sent.kind in ("sum", "scatter")
                ):
                    aval = jaxprs.types(term.added.eqn.outvars)[0]
                    self._mistake(
                        mistakes.added_before_the_sum, term.added, aval, frozenset({axis})
                    )
        same = sent.kind in ("sum", "maximum", "gather")
        differs = differs - axes if same else differs | axes
        if len(inputs) != len(self.shapes):
            return [_unknown(shape)._replace(differs=differs) for shape in self.shapes]
        found = []
        for value, aval, shape in zip(inputs, self.avals, self.shapes, strict=True):
            same = value.dims is not None and len(value.dims) == len(shape)
            dims = [
                Dim(dim.split - axes, rows=dim.rows, drawn=dim.drawn) for dim in value.dims or ()
            ]
            if (
                same and sent.kind == "exchange"
            ):  # an all-to-all from blocks of one dim to blocks of another
                sizes = zip(aval.shape, shape, strict=True)
                shrunk = [before > after for before, after in sizes]
                dims = [
                    dim._replace(split=dim.split | axes) if less else dim
                    for dim, less in zip(dims, shrunk, strict=True)
                ]
            terms = tuple(pair for pair in value.terms if pair[0] not in axes)
            found.append(
                Spread(tuple(dims), terms, differs)
                if same
                else _unknown(shape)._replace(differs=differs)
            )
        return found

    def _mistake(self, mistake: Callable[..., Any], node: Node, *facts: Any) -> None:
        devices = math.prod(self.sizes[axis] for axis in facts[-1])
        self.mistakes.append((mistake, node, *facts, devices))


RULES: dict[str, Callable[[_Operation, Sequence[Spread]], Spread | list[Spread]]] = {
    CHOSEN: _Operation._chosen,
    "broadcast_in_dim": _Operation._broadcast,
    "concatenate": _Operation._concatenated,
    "dot_general": _Operation._product,
    "gather": _Operation._looked_up,
    "iota": _Operation._counted,
    "random_bits": _Operation._drawn,
    "reshape": _Operation._relaid,
    "slice": _Operation._sliced,
    "split": _Operation._divided,
    "squeeze": _Operation._squeezed,
    "stack": _Operation._stacked,
    "transpose": _Operation._turned,
    "unstack": _Operation._unstacked,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), _Operation._reduced),
    **dict.fromkeys(
        ("rev", "pad", "dynamic_slice", "cumsum", "cumlogsumexp", "cummax"),
        _Operation._same_but_resized,
    ),
}


def _spreads_again(axis: str, dims: tuple[Dim, ...], with_term: Sequence[tuple[Dim, ...]]) -> bool:
    """Whether one of `dims` is of a dim split over `axis`, and the same dim of no value with a term is: there it was reduced."""
    is_split = lambda dim: axis in dim.split | dim.within
    return any(
        is_split(dim) and not any(is_split(own[i]) for own in with_term if i < len(own))
        for i, dim in enumerate(dims)
    )


def _unknown(shape: tuple[int, ...]) -> Spread:
    return Spread((Dim(),) * len(shape))


def _reshaped(
    dims: tuple[Dim, ...], before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[Dim, ...]:
    """Dims after a reshape: the outermost of those that come of a split dim is split, the others lie within."""
    found: list[Dim] = []
    i = 0
    while len(found) < len(after):
        if i == len(before):  # ones at the end
            within = found[-1].split | found[-1].within if found else NO_AXES
            found.append(Dim(within=within))
            continue
        first, i, j = i, i + 1, len(found) + 1
        while math.prod(before[first:i]) != math.prod(after[len(found) : j]):
            if math.prod(before[first:i]) < math.prod(after[len(found) : j]):
                i += 1
            else:
                j += 1
        found += _group(dims[first:i], j - len(found))
    return tuple(found)


def _group(dims: Sequence[Dim], count: int) -> list[Dim]:
    """`count` dims in the place of `dims`, whose sizes have the same product."""
    if len(dims) == count == 1:
        return [dims[0]]
    first, rows, drawn = dims[0], any(dim.rows for dim in dims), any(dim.drawn for dim in dims)
    inner = any(dim.split for dim in dims[1:])  # no longer in blocks
    counted = any(dim.counted for dim in dims)
    outer = Dim() if inner else Dim(first.split, first.within, parts=first.parts)
    others = [Dim(within=outer.split | outer.within, rows=rows, drawn=drawn)] * (count - 1)
    return [outer._replace(rows=rows, drawn=drawn, counted=counted), *others]
