"""Finds mistakes in a model's forward pass: operations that use a split dim as if it were whole,
and operations that use a reduction over a split dim before a collective completes the reduction.

The rows of a batch are its first dim. A dim of an argument is split if the argument's spec splits
the dim over an axis that does not split the rows. A matrix product passes on the split dims of its
operands, such as hidden units and heads, except the dims that it sums over. A reduction over a
split dim gives each device its own term, and the next operation should be a collective over the
axis that splits the dim. Two kinds of operations before this collective are mistakes. One kind
combines the term with an array that has the split dim, as in a norm or a softmax. The other kind
adds to the term a value that is the same on all devices, such as a bias. An operation is checked
only if an operand or a result has a dim of rows. Gradients and updates, which have the dims of
weights, are not checked.

A *fact* is one thing that the lint knows about a value (an array), such as "its first dim is split
over 'tensor'". A rule for one kind of operation takes the facts about the operands (`inputs`) and
returns the facts about the results. A `Dim` has the facts about one dim. `split` are the axes that
split the dim. If a reshape turns a split dim into an outer dim and inner dims, each inner dim gets
the axes of the split dim as its `within`. `rows` says whether the dim runs over the rows of the
batch. `drawn` says whether each index of the dim has random numbers of its own. `counted` says
whether the elements were computed from an `iota` along the dim; the `iota` begins at 0 on each
device. `parts` are the slices of split dims, such as `x[:k]`, from which the dim's elements were
computed. A *term* is the result of a reduction over a split dim on one device. The `Term` of a
value says whether the value is still a linear function of the term (`is_linear`), and whether the
reduction is a maximum or minimum (`is_peak`). If a value that is the same on all devices was added
to the term, `added` is the operation that did so. If a value was divided by the number of devices
along an axis, this axis is in `shared`.
"""

import functools
import inspect
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from parallax import jaxprs
from parallax.lint import mistakes
from parallax.lint.flat import CHOSEN, Flat, Node
from parallax.lint.values import NO_AXES, Dim, Part, Sent, Term, Value, either

# The folder of JAX's activation functions
_ACTIVATIONS = os.path.dirname(inspect.getfile(inspect.unwrap(jax.nn.gelu))) + os.sep

# Operations whose result is a linear function of their operand, with a factor of 1 or -1
_LINEAR = frozenset(
    {
        *("neg", "convert_element_type", "copy", "copy_p", "pbroadcast", "pcast", "pvary"),
        *("real", "reduce_precision", "reshard", "stop_gradient", "replicated"),
    }
)
_ELEMENTWISE = jaxprs.ELEMENTWISE | _LINEAR
# Operations whose result is divided by a number if all operands are
_KEEP_A_SHARE = _LINEAR | {"add", "sub", "add_any", "select_n", "max", "min", "abs"}
_COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "max", "min", "pow", "atan2", "rem"})


def dims_after(
    program: Flat,
    node: Node,
    inputs: Sequence[Value],
    sizes: Mapping[str, int],
    note: Callable[..., None],
) -> list[Value]:
    """Returns a `Value` for each result of an operation, with the facts `dims`, `terms` and
    `shared`.

    `note(mistake, node, *details)` is called for each mistake, if a dim of an operand or of a
    result runs over the rows of the batch. Operations without such a dim may belong to gradients or
    updates, which are not checked. `sizes` are the sizes of the mesh axes that have several
    devices, by name.
    """
    operation = _Operation(program, node, sizes)
    results = operation.results(inputs)
    # Values without rows, such as gradients and updates, are not checked.
    if any(value.has_rows for value in (*inputs, *results)):
        for mistake in operation.mistakes:
            note(*mistake)
    return results


class _Operation:
    """One operation, and the mistakes in it. Each method in `_RULES` is the rule for one kind of
    operation."""

    def __init__(self, program: Flat, node: Node, sizes: Mapping[str, int]):
        """Takes the operation `node` of `program`, on a mesh of the `sizes`. `params` are the
        parameters of the operation's primitive, `avals` the types of the operands, and `shapes` the
        shapes of the results."""
        self.program, self.node, self.sizes = program, node, sizes
        self.params, self.mistakes = node.eqn.params, []
        self.avals = [program.types[value] for value in node.inputs]
        self.shapes = [program.shape(value) for value in node.outputs]

    def results(self, inputs: Sequence[Value]) -> list[Value]:
        """Returns the facts about the operation's results, given the facts about its operands."""
        name = self.node.name
        if self.node.sent:
            return self._sent(self.node.sent, inputs)
        if name == "optimization_barrier":
            return list(inputs)
        if name == "axis_index":
            return [Value(dims=())]  # a scalar; `Reading` adds the fact that it differs
        # Numbers written into the program have no `dims` (None). The same holds for results that
        # are made only of such numbers, except random numbers and counts.
        if name not in ("random_bits", "iota") and all(value.dims is None for value in inputs):
            return [Value() for _ in self.shapes]
        # The rule for this primitive. Without one, the rule for elementwise or for unknown
        # operations.
        default = _Operation._joined if name in _ELEMENTWISE else _Operation._unknown
        results = _RULES.get(name, default)(self, inputs)
        return results if isinstance(results, list) else [results]

    def _unknown(self, inputs: Sequence[Value]) -> list[Value]:
        """Returns a `Value` without facts for each result of an operation that has no rule."""
        return [_new_dims(shape) for shape in self.shapes]

    def _chosen(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about one result of a conditional, whichever branch runs: `either`
        joins the facts of all branches. `inputs` has the facts about the predicate, and then those
        about the value that each branch returns for this result.
        """
        return functools.reduce(either, inputs[1:])

    def _drawn(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about new random numbers. Each element has a random number of its own,
        so all dims are `drawn`."""
        return Value(dims=(Dim(drawn=True),) * len(self.shapes[0]))

    def _counted(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about an `iota`, which counts 0, 1, 2, ... along one dim."""
        counted = self.params["dimension"]
        return Value(dims=tuple(Dim(counted=i == counted) for i in range(len(self.shapes[0]))))

    def _dims(self, value: Value, place: int = 0) -> tuple[Dim, ...]:
        """Returns the dims of the operand `value`, which stands at `place` among the operands.
        Nothing is known about the dims of a constant."""
        return (Dim(),) * self.avals[place].ndim if value.dims is None else value.dims

    # Operations that lay elements out

    def _broadcast(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about the result of `broadcast_in_dim`. Nothing is known about new
        dims, or about dims of size 1 that grow."""
        (value, *_), before, after = inputs, self.avals[0].shape, self.shapes[0]
        dims = [Dim()] * len(after)
        # Dim i of the operand becomes dim j of the result.
        for i, j in enumerate(self.params["broadcast_dimensions"]):
            if before[i] == after[j]:
                dims[j] = self._dims(value)[i]
        return value._replace(dims=tuple(dims))

    def _reshaped(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about the result of a reshape. If the reshape turns a split dim into
        several dims, the outermost of them is split."""
        dims = _regrouped(self._dims(inputs[0]), self.avals[0].shape, self.shapes[0])
        return inputs[0]._replace(dims=dims)

    def _transposed(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about the result of a transpose: the dims in another order."""
        dims = self._dims(inputs[0])
        return inputs[0]._replace(dims=tuple(dims[i] for i in self.params["permutation"]))

    def _without(self, value: Value, removed: Sequence[Any]) -> Value:
        """Returns the facts about `value` after the removal of the dims at the places `removed`."""
        dims = (dim for i, dim in enumerate(self._dims(value)) if i not in removed)
        return value._replace(dims=tuple(dims))

    def _squeezed(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about the result of `squeeze`, which removes dims of size 1."""
        return self._without(inputs[0], self.params["dimensions"])

    def _unstacked(self, inputs: Sequence[Value]) -> list[Value]:
        """Returns the facts about the results of `unstack`: one array for each index along a dim.
        The arrays do not have this dim."""
        return [self._without(inputs[0], (self.params["axis"],))] * len(self.shapes)

    def _sliced(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about a slice. For a dim that is sliced with a stride above 1, no
        `Part` is kept, since the slice's elements are not neighbours in the dim."""
        strides = self.params["strides"] or itertools.repeat(1)
        # `starts` becomes a dict: for each dim with stride 1, the index of the slice's first
        # element along it. `shapes[0]` is the shape of the result, the slice.
        starts = enumerate(zip(self.params["start_indices"], strides, strict=False))
        starts = {i: start for i, (start, stride) in starts if stride == 1}
        return self._part(inputs[0], starts, self.shapes[0])

    def _divided(self, inputs: Sequence[Value]) -> list[Value]:
        """Returns the facts about the results of the operation `split`. The results are consecutive
        slices of the operand along one dim."""
        # A part begins where the sizes of the parts before it end.
        starts = itertools.accumulate(map(int, (0, *self.params["sizes"][:-1])))
        dim = self.params["axis"]
        pairs = zip(starts, self.shapes, strict=True)
        return [self._part(inputs[0], {dim: start}, shape) for start, shape in pairs]

    def _part(self, value: Value, starts: Mapping[int, int], shape: tuple[int, ...]) -> Value:
        """Returns the facts about a slice of the operand `value`. The slice has this `shape`, and
        `starts` maps a dim to the index of the slice's first element along it.

        If a sliced dim is split, the slice is recorded: the set `parts` of the result's dim gets
        this slice as its only element. Different slices of one split dim must not be combined with
        each other, since a device cuts both from its own block of the dim. For example, a gate and
        the units that the gate multiplies may be stacked along the split dim. The first device's
        block has only elements of the gate: its two slices are two parts of the gate.
        """
        dims = list(self._dims(value))
        for i, start in starts.items():
            # A slice of all elements is no part.
            if self.avals[0].shape[i] != shape[i] and dims[i].split:
                source = (id(self.program), self.node.inputs[0], i)
                part = Part(source, self.avals[0], int(start))
                dims[i] = dims[i]._replace(parts=frozenset({part}))
        return value._replace(dims=tuple(dims))

    def _resized(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about the result of an operation that works along some dims and may
        change their sizes, such as `pad`. For a dim whose size changes, only the fact `rows` is
        kept. The operand's `terms` are dropped, since some of these operations, such as `cummax`,
        are not linear.
        """
        # Elements that `pad` adds are neither drawn nor counted, nor in any block of a split dim.
        sizes = zip(self._dims(inputs[0]), self.avals[0].shape, self.shapes[0], strict=True)
        dims = (dim if before == after else Dim(rows=dim.rows) for dim, before, after in sizes)
        return Value(dims=tuple(dims))

    def _side_by_side(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about an array made by placing arrays of the same rank side by side. If
        all these arrays are terms of sums over an axis, so is the new array. The callers change the
        facts about the dim along which the arrays are joined."""
        # Without numbers written into the program, whose `dims` are None. If all arrays were such
        # numbers, `results` would not call this rule, so `known` is not empty.
        known = [value.dims for value in inputs if value.dims is not None]
        dims = tuple(map(self._together, zip(*known, strict=True)))
        axes = set.intersection(*({axis for axis, _ in value.terms} for value in inputs))
        # The `Term` of the first array stands for all. If `is_linear` or `added` differ, a mistake
        # with another of the arrays may be missed.
        terms = tuple(pair for pair in inputs[0].terms if pair[0] in axes)
        shared = frozenset.intersection(*(value.shared for value in inputs))
        return Value(dims=dims, terms=terms, shared=shared)

    def _stacked(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about the result of `stack`: arrays side by side along a new dim."""
        value, place = self._side_by_side(inputs), self.params["axis"]
        dims = value.dims or ()
        return value._replace(dims=(*dims[:place], Dim(), *dims[place:]))

    def _concatenated(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about a concatenation. The concatenated dim is split along those axes
        that split it in every operand.
        """
        value, place = self._side_by_side(inputs), self.params["dimension"]
        # Numbers written into the program (`dims` is None) do not count: they may pad each
        # device's part of the dim. `known` is not empty, as in `_side_by_side`.
        known = [value.dims for value in inputs if value.dims is not None]
        # `_side_by_side` gives the axes that split the dim in any of the operands, and notes a
        # mistake if operands are different slices of a split dim. If one operand is whole along an
        # axis, the joined dim is neither split along this axis nor whole. Of the other facts only
        # `rows` holds for the joined dim.
        split = frozenset.intersection(*(dims[place].split for dims in known))
        dims = list(value.dims or ())
        dims[place] = Dim(split, rows=dims[place].rows)
        return value._replace(dims=tuple(dims))

    def _looked_up(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about the result of a `gather`, a lookup of rows in a table. The last
        dim of the array of indices holds the indices of one lookup. The result has the dims of a
        row, and all dims of the array of indices except the last.
        """
        table, indices = inputs
        # `slice_sizes` has the number of elements that a lookup takes of each dim of the table.
        numbers, taken = self.params["dimension_numbers"], self.params["slice_sizes"]
        removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        # A row has the dims of the table, except the dims `removed`. Nothing is known about a dim
        # if a lookup takes only a part of it.
        row = zip(self._dims(table), self.avals[0].shape, taken, strict=True)
        of_row = [dim if size == part else Dim() for dim, size, part in row]
        in_row = iter([dim for i, dim in enumerate(of_row) if i not in removed])
        # In its shard of the rows of a table, a device looks up rows by their indices in the shard:
        # counting these indices on the device is no mistake. A table of numbers written into the
        # program (`dims` is None) may be made for such indices too. `start_index_map` has the dims
        # of the table that the indices are about.
        is_local = table.dims is None or any(table.dims[i].split for i in numbers.start_index_map)
        dims_of_indices = (
            dim._replace(counted=dim.counted and not is_local)
            for dim in self._dims(indices, place=1)
        )
        # The result's dims `offset_dims` are those of a row, and the others those of the indices.
        rank = range(len(self.shapes[0]))
        dims = (next(in_row if i in numbers.offset_dims else dims_of_indices) for i in rank)
        return Value(dims=tuple(dims), shared=table.shared)

    # Operations that join values

    def _together(self, dims: Sequence[Dim]) -> Dim:
        """Returns the facts about a dim whose element i is computed from element i of each of the
        `dims`.

        Notes a mistake if different slices of one split dim are combined.
        """
        split = NO_AXES.union(*(dim.split for dim in dims))
        parts = frozenset().union(*(dim.parts for dim in dims))
        # The dict keeps one slice of each split dim; any other slice of that dim differs from it.
        by_source = {part.source: part for part in parts}
        if different := [part for part in parts if part != by_source[part.source]]:
            part = different[0]
            _, _, dim = part.source  # id(program), the id of the value, and the dim's index
            self._mistake(mistakes.parts_of_a_split_dim, self.node, part.aval, dim, split)
            parts = frozenset()  # so that the next operation does not note the mistake again
        within = NO_AXES.union(*(dim.within for dim in dims))
        rows = any(dim.rows for dim in dims)
        drawn = any(dim.drawn for dim in dims)
        return Dim(split, within, rows, drawn, any(dim.counted for dim in dims), parts)

    def _joined(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about the result of an elementwise operation. `_together` computes the
        facts about dim i of the result from the facts about dim i of each operand. If an operand is
        a term of a sum that no collective has completed, the result may be a term of this sum too.
        """
        rank = len(self.shapes[0])
        # Leaves out numbers written into the program, whose `dims` are None, and scalar predicates.
        given = [value for value in inputs if value.dims is not None and len(value.dims) == rank]
        # A `select_n` with a scalar predicate, which chooses between numbers without `dims`.
        if not given:
            return _new_dims(self.shapes[0])
        dims = tuple(map(self._together, zip(*(value.dims or () for value in given), strict=True)))
        for value in given:
            self._check_same_on_each_device(value, dims)
        # A dim is `counted` if its elements are computed from their indices on this device. A
        # comparison of counts, or their difference, as in a causal mask, is accepted: it does not
        # change if both counts are shifted. Any value with counts along two dims is taken for such
        # a difference.
        if self.node.name in _COMPARES or sum(dim.counted for dim in dims) > 1:
            dims = tuple(dim._replace(counted=False) for dim in dims)
        axes = sorted({axis for value in given for axis, _ in value.terms})
        # `_term` gets all operands, since it looks at the first operand of a quotient.
        terms = [(axis, term) for axis in axes if (term := self._term(axis, inputs))]
        return Value(dims=dims, terms=tuple(terms), shared=self._shared(inputs, given))

    def _shared(self, inputs: Sequence[Value], given: Sequence[Value]) -> frozenset[str]:
        """Returns the axes for which the result of an elementwise operation was divided by the
        number of devices along the axis. The operation itself may divide (`_divided_by`). The
        result also keeps axes of the operands: a product keeps the axes of each factor, a quotient
        keeps the axes of its numerator, and a linear operation keeps the axes that all operands
        have. `given` are the operands that are not numbers written into the program.
        """
        of_operands = [value.shared for value in given]
        if self.node.name == "mul":
            return NO_AXES.union(*of_operands) | self._divided_by()
        if self.node.name == "div":
            return inputs[0].shared | self._divided_by()
        if self.node.name not in _KEEP_A_SHARE:
            return NO_AXES  # exp(x / n) is no share of exp(x)
        return frozenset.intersection(*of_operands)

    def _check_same_on_each_device(self, value: Value, dims: Sequence[Dim]) -> None:
        """Notes a mistake if a dim of the result is split, but all devices have the same numbers
        along this dim of an operand. Only random numbers, and numbers computed from the indices 0,
        1, 2, ... of an `iota`, are checked. `value` has the facts about the operand, and `dims` has
        the facts about the result's dims.
        """
        drawn, counted = NO_AXES, NO_AXES  # the axes along which each mistake is made
        # The caller leaves out operands whose `dims` are None; `or ()` is for the type checker.
        for dim, of_value in zip(dims, value.dims or (), strict=True):
            axes = dim.split - value.differs
            drawn |= axes if of_value.drawn else NO_AXES
            counted |= axes if of_value.counted else NO_AXES
        aval = self.program.types[self.node.outputs[0]]
        kinds = (("one-key-for-split-units", drawn), ("counted-on-a-device", counted))
        for kind, axes in kinds:
            if axes:
                self._mistake(mistakes.repeated_on_each_device, self.node, kind, aval, axes)

    def _term(self, axis: str, inputs: Sequence[Value]) -> Term | None:
        """Returns the `Term` of an elementwise operation's result, for a reduction over a dim that
        `axis` splits. The `Term` says how the result depends on this device's term of the
        reduction. At least one operand has a `Term` for `axis`. Returns None if the lint stops
        following the term, as after a sum with an operand that differs between devices.

        Notes a mistake if a term is combined with an array that has a dim split over `axis`.
        """
        name = self.node.name
        # Numbers written into the program, and `iota`s, are `constant`. They are left out: an
        # epsilon, for example, may be meant for each term.
        known = [value for value in inputs if value.dims is not None and not value.constant]
        with_term = [value for value in known if axis in dict(value.terms)]
        without = [value for value in known if axis not in dict(value.terms)]
        terms = [dict(value.terms)[axis] for value in with_term]
        # If one operand is no longer a linear function of its term, neither is the result. If a
        # value such as a bias was added to one of the terms, it is in the result too.
        term = min(terms, key=_rank)
        # Case 1: a norm or a softmax. An operand without a term still has the dim split over
        # `axis`, and the dim is not split in the operands with a term.
        if any(_meets_split_dim(axis, value, with_term) for value in without):
            # It is no mistake to subtract a device's own maximum: a softmax may be shifted by any
            # number.
            if name in _ARITHMETIC and not (term.is_peak and name == "sub"):
                details = term.node.name, term.aval, frozenset({axis})
                self._mistake(mistakes.reduced_over_a_split_dim, term.node, *details)
            return None
        # Case 2: a cast, a change of sign, or a choice between terms.
        if name in _LINEAR or (name == "select_n" and not without):
            return term
        # Case 3: a sum of terms, or of terms and other operands (`without`).
        if name in ("add", "sub", "add_any") and not term.is_peak:
            # `whole` are the other operands that are the same on all devices, and were not divided
            # by the number of devices. A later sum over the devices would count them several times,
            # so the first operation that adds such an operand is kept. (JAX's transposes make
            # `add_any`, not the user.)
            whole = [value for value in without if axis not in value.differs | value.shared]
            if whole and term.is_linear and not term.added and name != "add_any":
                return term._replace(added=self.node)
            # If another operand differs between devices, or was divided by their number, the sum
            # may be right, and the lint stops following the term.
            return term if len(whole) == len(without) else None
        # Case 4: a product, a quotient or any other function. If each device multiplies its term
        # by another number, the result is no term of one sum.
        if any(axis in value.differs for value in without):
            return None
        # A product with a number that is the same on all devices, or a quotient by it, is still a
        # linear function of the term. Any other function, such as a square, is not.
        is_numerator = name == "div" and axis in dict(inputs[0].terms)
        is_factor = len(terms) == 1 and (name == "mul" or is_numerator)
        return term if is_factor else term._replace(is_linear=False)

    def _divided_by(self) -> frozenset[str]:
        """Returns the axes whose size, or 1 over the size, is a literal operand of this product or
        quotient; no axes for any other operation. A program with such an operation scales a value
        by the number of devices on purpose, mostly so that a later sum over the devices counts the
        value once. The literals of activation functions, such as the 0.5 of `jax.nn.gelu`, do not
        count."""
        if self.node.name not in ("mul", "div") or any(
            frame.file_name.startswith(_ACTIVATIONS) for frame in jaxprs.frames(self.node.eqn)
        ):
            return NO_AXES
        numbers = [self._literal(value) for value in self.node.inputs]
        factors = [number for number in numbers if number is not None]

        def is_factor(size):
            """Returns whether `size` or 1 / `size` is one of the `factors`. `size` is the number of
            devices along an axis."""
            return any(np.isclose(factor, (size, 1 / size)).any() for factor in factors)

        return frozenset(axis for axis, size in self.sizes.items() if is_factor(size))

    def _literal(self, value: int) -> Any:
        """Returns the literal number that becomes `value` by casts, broadcasts and changes of sign
        only. Returns None if there is no such number."""
        # `literals` has the numbers that are written in the program, and `made` the operation that
        # makes each other value.
        while value not in self.program.literals:
            node = self.program.made.get(value)
            if node is None or node.name not in _LINEAR | {"broadcast_in_dim"}:
                return None
            value = node.inputs[0]
        return self.program.literals[value]

    # Operations that reduce dims

    def _reduced(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about a sum, a maximum or a minimum over some dims. If such a dim is
        split, each device's result is only one term of the reduction."""
        value, dims = inputs[0], self._dims(inputs[0])
        removed, is_sum = self.params["axes"], self.node.name == "reduce_sum"
        result = self._without(value, removed)
        axes = NO_AXES.union(*(dims[i].split for i in removed))
        # A reshape may cut a split dim into groups, whose inner dim has the split dim's axes as its
        # `within`. If a device's groups have one element each, as after `x.reshape(2, -1)` of 2
        # units, they are no whole groups, so their reduction is not complete either. Groups of
        # several elements may be whole, such as heads.
        ones = (i for i in removed if self.avals[0].shape[i] == 1)
        axes |= NO_AXES.union(*(dims[i].within for i in ones))
        # A sum of terms is a term of the same sum over devices; a maximum of terms is none.
        terms = dict(value.terms) if is_sum else {}
        if result.has_rows:  # else it is no value of the forward pass
            term = Term(self.node, self.avals[0], is_linear=is_sum, is_peak=not is_sum)
            terms |= dict.fromkeys(axes, term)
        return result._replace(terms=tuple(terms.items()))

    def _product(self, inputs: Sequence[Value]) -> Value:
        """Returns the facts about the result of `dot_general`. The result has the batch dims, then
        the left operand's other dims that are not summed over, then those of the right operand. If
        a dim that is summed over is split, each device's result is only its own term of the whole
        product."""
        first, second = inputs  # the left and the right operand
        (left_summed, right_summed), (left_batch, right_batch) = self.params["dimension_numbers"]
        left, right = self._dims(first), self._dims(second, place=1)
        batch = zip(left_batch, right_batch, strict=True)
        dims = [self._together((left[i], right[j])) for i, j in batch]
        dims += [dim for i, dim in enumerate(left) if i not in (*left_summed, *left_batch)]
        dims += [dim for j, dim in enumerate(right) if j not in (*right_summed, *right_batch)]
        # A term times a factor that differs between the devices is no term of one sum any more.
        terms = {axis: term for axis, term in first.terms if axis not in second.differs}
        terms |= {axis: term for axis, term in second.terms if axis not in first.differs}
        if any(dim.rows for dim in dims):  # a value of the forward pass
            summed = NO_AXES.union(
                *(left[i].split for i in left_summed), *(right[j].split for j in right_summed)
            )
            terms |= dict.fromkeys(summed, Term(self.node, self.avals[0]))  # the left one's type
        # Each element is a sum of products, and a product is shared if one of its factors is.
        shared = first.shared | second.shared
        return Value(dims=tuple(dims), terms=tuple(terms.items()), shared=shared)

    # Collectives

    def _sent(self, sent: Sent, inputs: Sequence[Value]) -> list[Value]:
        """Returns the facts about a collective's results. If the collective is a sum, notes a
        value, such as a bias, that is the same on all devices and was added to each device's term
        of this sum."""
        # Axes of one device split nothing.
        axes = frozenset(axis for axis in sent.axes if axis in self.sizes)
        if sent.kind in ("sum", "scatter"):
            for axis, term in (pair for value in inputs for pair in value.terms):
                # `added` is the operation that added a value which is the same on all devices.
                if term.added and term.is_linear and axis in axes:
                    aval = jaxprs.types(term.added.eqn.outvars)[0]
                    details = aval, frozenset({axis})
                    self._mistake(mistakes.added_before_the_sum, term.added, *details)
        # A ragged all-to-all, for example, has more operands than results: it also takes sizes.
        # Which operand has the data is not known here.
        if len(inputs) != len(self.shapes):
            return [_new_dims(shape) for shape in self.shapes]
        # `self.avals` are the types of the operands, and `self.shapes` the shapes of the results.
        avals = zip(inputs, self.avals, self.shapes, strict=True)
        return [
            _sent_value(sent.kind, axes, value, aval.shape, shape) for value, aval, shape in avals
        ]

    def _mistake(self, mistake: Callable[..., Any], node: Node, *details: Any) -> None:
        """Adds a mistake at `node` to `self.mistakes`. The last item of `details` is the set of the
        mistake's axes. The number of devices along these axes is added after it, since `mistake`,
        a function in the module `mistakes`, needs this number."""
        devices = math.prod(self.sizes[axis] for axis in details[-1])
        self.mistakes.append((mistake, node, *details, devices))


_RULES: dict[str, Callable[[_Operation, Sequence[Value]], Value | list[Value]]] = {
    CHOSEN: _Operation._chosen,
    "broadcast_in_dim": _Operation._broadcast,
    "concatenate": _Operation._concatenated,
    "dot_general": _Operation._product,
    "gather": _Operation._looked_up,
    "iota": _Operation._counted,
    "random_bits": _Operation._drawn,
    "reshape": _Operation._reshaped,
    "slice": _Operation._sliced,
    "split": _Operation._divided,
    "squeeze": _Operation._squeezed,
    "stack": _Operation._stacked,
    "transpose": _Operation._transposed,
    "unstack": _Operation._unstacked,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), _Operation._reduced),
    **dict.fromkeys(
        ("rev", "pad", "dynamic_slice", "cumsum", "cumlogsumexp", "cummax"), _Operation._resized
    ),
}


def _sent_value(
    kind: str,
    axes: frozenset[str],
    value: Value,
    before: tuple[int, ...],
    after: tuple[int, ...],
) -> Value:
    """Returns the `Value` of a collective's result, with its `dims` and `terms`, from the `Value`
    of the operand, `value`. A term is a device's part of a reduction over devices. The collective
    completes reductions along its own axes, so the result has no terms along them.

    `kind` is the kind of the collective, and `axes` are those of its axes that have several
    devices. `before` is the shape of the operand, and `after` is the shape of the result.
    """
    # Nothing is known after a collective that adds or drops a dim.
    if value.dims is None or len(value.dims) != len(after):
        return _new_dims(after)
    dims = []
    for dim, size, new_size in zip(value.dims, before, after, strict=True):
        # After a sum, a maximum or a gather, the result is the same along the axes, so they split
        # no dim. After a permute or a reduce-scatter, a split along them is not tracked.
        split = dim.split - axes
        # An all-to-all cuts one dim into blocks, so this dim is split after it. It joins the blocks
        # of another dim, which is then whole.
        if kind == "exchange" and size > new_size:
            split |= axes
        # Rows stay rows, and random numbers stay random. `within`, `counted` and `parts` are about
        # elements of one device, and are dropped.
        dims.append(Dim(split, rows=dim.rows, drawn=dim.drawn))
    return Value(dims=tuple(dims), terms=tuple(pair for pair in value.terms if pair[0] not in axes))


def _rank(term: Term) -> int:
    """Returns a sort key for the terms of one operation's operands. First come terms whose operand
    is no longer a linear function of the term. Then come terms to which a value that is the same on
    all devices was added."""
    return 0 if not term.is_linear else 1 if term.added else 2


def _meets_split_dim(axis: str, value: Value, with_term: Sequence[Value]) -> bool:
    """Returns whether some dim i of `value` is split over `axis`, although dim i is not split over
    `axis` in any of the values `with_term`.

    One elementwise operation combines `value` with the values `with_term`, which were computed from
    a reduction over a dim that is split over `axis`.
    """

    def split_dims(value):
        """Returns the indices of the dims of `value` that have `axis` in `split` or `within`."""
        dims = enumerate(value.dims or ())
        return {i for i, dim in dims if axis in dim.split | dim.within}

    return bool(split_dims(value) - set().union(*map(split_dims, with_term)))


def _new_dims(shape: tuple[int, ...]) -> Value:
    """Returns the `Value` of an array of this shape, without facts about its dims."""
    return Value(dims=(Dim(),) * len(shape))


def _regrouped(
    dims: tuple[Dim, ...], before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[Dim, ...]:
    """Returns the facts about the dims after a reshape from the shape `before` to `after`. The
    facts about the dims before the reshape are `dims`.

    If the reshape turns a split dim into several dims, the outermost of them is split, and the
    others get the axes of the split dim as their `within`. On a device, the outermost may have
    size 1: then the device has only one index of this dim. The last dims of `before`, if they have
    size 1 and `after` lacks them, are dropped with their facts, as by a squeeze.
    """
    if 0 in before:  # an array without elements: products of its sizes do not tell dims apart
        return (Dim(),) * len(after)
    regrouped: list[Dim] = []
    i = 0  # the dims of `before` that are done
    while len(regrouped) < len(after):
        if i == len(before):  # only dims of size 1 are left
            within = regrouped[-1].split | regrouped[-1].within if regrouped else NO_AXES
            regrouped.append(Dim(within=within))
            continue
        # Find the fewest next dims of `before`, and the fewest of `after`, whose sizes have the
        # same product. They are the dims `first` to i - 1 of `before`, and len(regrouped) to j - 1
        # of `after`.
        first, i, j = i, i + 1, len(regrouped) + 1
        while (size := math.prod(before[first:i])) != math.prod(after[len(regrouped) : j]):
            if size < math.prod(after[len(regrouped) : j]):
                i += 1
            else:
                j += 1
        regrouped += _group(dims[first:i], before[first:i], j - len(regrouped))
    return tuple(regrouped)


def _group(dims: Sequence[Dim], sizes: Sequence[int], count: int) -> list[Dim]:
    """Returns the facts about the `count` new dims that a reshape puts in place of old dims. `dims`
    has the facts about the old dims, and `sizes` their sizes. The sizes of the new dims have the
    same product.
    """
    if len(dims) == count == 1:  # a dim that stays as it is
        return [dims[0]]
    rows, drawn = any(dim.rows for dim in dims), any(dim.drawn for dim in dims)
    # An old dim of size 1 that is not split does not change where the elements of the others are.
    longer = [dim for dim, size in zip(dims, sizes, strict=True) if size > 1 or dim.split]
    first, *others = longer or dims
    # Blocks and slices of the first old dim are blocks and slices of the outer new dim too.
    outer = Dim(first.split, first.within, parts=first.parts)
    # If another old dim is split, a device's elements are no block of the outer new dim, so this
    # dim does not count as split.
    if any(dim.split for dim in others):
        outer = Dim()
    # If any old dim is `counted`, only the outer new dim is. For example, `arange(6).reshape(2, 3)`
    # counts 0, 1, 2 along the inner dim in each row. A device's rows have the same counts along it
    # as the whole array's rows, and only differ in where they begin.
    counted = any(dim.counted for dim in dims)
    inner = Dim(within=outer.split | outer.within, rows=rows, drawn=drawn)
    return [outer._replace(rows=rows, drawn=drawn, counted=counted), *[inner] * (count - 1)]
