"""One reading of a program: the facts of values are followed from operation to operation, and
mistakes are noted. A loop's body is followed again until the facts of its carries no longer change.

A `Flat` program is a list of operations (`Node`s), whose values are numbered. A `Value` has the
facts of one value. `differs` are the axes along which it differs between devices. `trip` is the
depth of the innermost loop that changes it. `parts` are the sums and carries of a loop that it is a
linear function of. `shard` is the argument whose elements it has. `sent` is the collective of a
node, or None. A collective of this library is one equation, whose jaxpr `ours` returns. `map` is
the `shard_map` around the operation, or None. While a reading is `silent`, facts are followed and
no mistake is noted.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from parallax import jaxprs
from parallax.collectives import types
from parallax.lint import flat, mistakes, values
from parallax.lint.finding import Finding
from parallax.lint.flat import CHOSEN, COND, LOOPS, Flat, Node, Scope
from parallax.lint.loops import Loop
from parallax.lint.shards import ShardMap
from parallax.lint.spread import after
from parallax.lint.values import NO_AXES, Dims, Value, either, in_tuple, joined


class Reading:
    """One reading of a program: the findings, and the loops and maps around the current operation.

    Attributes:
        narrow: whether all products should be in 16 bits.
        findings: the mistakes so far.
        silent: whether mistakes are not noted, as while a loop's carries are followed until they no
            longer change.
        map: the `shard_map` around the operation, or None.
        loops: the loops around the operation, the outermost first.
        predicates: the conditionals and `while` loops around the operation, each with the axes
            along which its predicate differs.
        known: the facts of all values of each program, by the program's id, from the last reading
            that was not silent.
    """

    def __init__(self, *, narrow: bool):
        """Begins a reading without findings. The caches (`known` and below) go by the ids of
        jaxprs, equations and programs."""
        self.narrow = narrow
        self.findings: dict[Finding, Finding] = {}
        self.silent = False  # whether mistakes are not noted
        self.map: ShardMap | None = None  # around the current operation
        self.loops: list[Loop] = []
        # "cond" or "while", and the axes along which the predicate differs between devices.
        self.predicates: list[tuple[str, frozenset[str]]] = []
        # A program -> the facts of all its values, by their numbers.
        self.known: dict[int, list[Value]] = {}
        # A jaxpr and the operation that contains it -> the list of its operations.
        self._flats: dict[tuple[int, int], Flat] = {}
        # The equation of a collective of this library -> its jaxpr.
        self._ours: dict[int, Jaxpr] = {}
        # A program and the facts of its arguments -> the facts of its results.
        self._settled: dict[tuple, list[Value]] = {}

    def flat(self, jaxpr: Jaxpr, node: Node | None = None) -> Flat:
        """Returns a jaxpr as a list of operations; `node` is the operation that contains it.

        A later call returns the same list, since a loop's body is read several times.
        """
        key = id(jaxpr), id(node)
        if key not in self._flats:
            # Predicates are numbers of values in the outer program, and mean nothing in this one.
            scope = node.scope._replace(predicates=()) if node else Scope()
            self._flats[key] = Flat(jaxpr, self.ours, scope)
        return self._flats[key]

    def body(self, loop: Node) -> Flat:
        """Returns the body of a loop as a list of operations."""
        return self.flat(flat.body(loop.eqn), loop)

    def ours(self, eqn: JaxprEqn) -> Jaxpr:
        """Returns the jaxpr of a collective of this library. The first call for an equation traces
        it, and later calls return the same jaxpr."""
        if id(eqn) not in self._ours:
            mesh, checked = (self.map.mesh, self.map.checked) if self.map else (None, True)
            self._ours[id(eqn)] = types.linear_jaxpr(eqn, mesh, check_vma=checked)
        return self._ours[id(eqn)]

    def note(self, finding: Finding | None) -> None:
        """Notes a mistake, unless the reading is silent; None is no mistake."""
        if finding and not self.silent:
            self.findings.setdefault(finding, finding)

    def _large(self, axes: Iterable[str]) -> frozenset[str]:
        """Returns the axes that have several devices."""
        sizes = self.map.sizes if self.map else {}  # only axes that have several devices
        return frozenset(axis for axis in axes if axis in sizes)

    def _devices(self, axes: Iterable[str]) -> int:
        """Returns the number of devices along these axes together."""
        return self.map.devices(axes) if self.map else 1

    # Programs

    def read(
        self, program: Flat, arguments: Sequence[Value], results: Sequence[Dims | None] = ()
    ) -> list[Value]:
        """Returns the facts of a program's results, and notes the mistakes in the program.

        `results` has for each result the axes that split each of its dims, or None if they are not
        known.
        """
        returned = self.follow(program, arguments)
        # Two kinds of mistakes are found from the facts of all values, so only after `follow`.
        if self.map and not self.silent:
            self.map.note_clipped_sums(program)
            self.map.note_updates(program, arguments, results)
        return returned

    def follow(self, program: Flat, arguments: Sequence[Value]) -> list[Value]:
        """Returns the facts of a program's results, given those of its arguments, operation by
        operation.
        """
        # While silent, nothing is noted, so a program with the same facts is not followed again.
        # `summed` is only for messages.
        key = (id(program), *(value._replace(summed=()) for value in arguments))
        if self.silent and key in self._settled:
            return self._settled[key]
        known = [Value()] * len(program.types)  # the facts of each value, by its number
        for value in program.literals:
            known[value] = Value(constant=True)
        for value, facts in zip(program.arguments, arguments, strict=True):
            known[value] = facts
        for node in program.nodes:
            inputs = [known[value] for value in node.inputs]
            # The conditionals of this program that the operation stands in.
            around = [("cond", known[value].differs) for value in node.scope.predicates]
            with self._under(around):
                results = self._operation(program, node, inputs)
            for value, facts in zip(node.outputs, results, strict=True):
                known[value] = facts
        returned = [known[value] for value in program.results]
        if self.silent:
            self._settled[key] = returned
        else:
            self.known[id(program)] = known
        return returned

    @contextlib.contextmanager
    def _under(self, predicates: list[tuple[str, frozenset[str]]]) -> Iterator[None]:
        """Adds `predicates` to those of the reading, for the operations that are read inside the
        `with`."""
        outside = self.predicates
        self.predicates = [*outside, *predicates]
        yield
        self.predicates = outside

    def _operation(self, program: Flat, node: Node, inputs: list[Value]) -> list[Value]:
        """Returns the facts of the results of one operation, given those of its operands
        (`inputs`), and notes mistakes in it."""
        if node.name == "shard_map":
            return self._shard_map(node, inputs)
        if node.name in LOOPS:
            return self._loop(node, inputs)
        if node.name == COND:
            self._note_lost_mark(node, inputs)
            return []
        results = self._collective(node, inputs) if node.sent else self._plain(node, inputs)
        if self.map is None:
            return results
        note = _ignore if self.silent else self.map.note  # `_ignore` does nothing
        # Mistakes with dims are noted only in the forward pass. JAX names the operations of the
        # backward pass "transpose(...)".
        note_in_forward = _ignore if node.is_within("transpose(") else note
        # Three records with parts of each result's facts: its numbers, its dims, and the argument
        # whose elements it has.
        spreads = after(program, node, inputs, self.map.sizes, note_in_forward)
        places = self.map.places(program, node, inputs, note)
        return [
            numbers.with_dims_of(dims._replace(**place))
            for numbers, dims, place in zip(results, spreads, places, strict=True)
        ]

    def _plain(self, node: Node, inputs: list[Value]) -> list[Value]:
        """Returns the facts of the results' numbers, for an operation that does not communicate."""
        if node.name in mistakes.PRODUCTS and not self.silent:
            self.note(mistakes.wide_product(node.eqn, inputs, node.where, self.narrow))
        if node.name == "axis_index":
            # `_large` leaves out axes of one device, along which nothing differs.
            return [Value(differs=self._large(in_tuple(node.eqn.params["axis_name"])))]
        if node.name != CHOSEN:  # the branches of a conditional were opened into this program
            self._read_kernels(node, inputs)
        # The sums and carries of the innermost loop that the result is a linear function of. They
        # are followed only in the last reading of a loop's body, which is not silent.
        parts = frozenset()
        if self.loops and not self.silent:
            parts = self.loops[-1].through(node.eqn, inputs)
        if node.name == "optimization_barrier":  # each result is its own operand
            return [
                joined([value], narrow=value.narrow, parts=parts & value.parts) for value in inputs
            ]
        result = joined(inputs, narrow=values.narrow(node.eqn, inputs), parts=parts)
        if node.name == "replicated":  # declares that its operand is equal along these axes
            result = result._replace(differs=result.differs - set(node.eqn.params["axes"]))
        return [result] * len(node.outputs)

    def _read_kernels(self, node: Node, inputs: list[Value]) -> None:
        """Notes mistakes in the jaxprs inside an operation, such as a reducer or a kernel. It is
        not known which operand gives which argument, so each argument gets the facts of all
        operands.
        """
        outside, self.map = self.map, None  # dims and shards are not followed inside
        for jaxpr in jaxprs.inner(node.eqn):
            program = self.flat(jaxpr, node)
            self.follow(program, [joined(inputs)] * len(program.arguments))
        self.map = outside

    # Control flow

    def _shard_map(self, node: Node, inputs: list[Value]) -> list[Value]:
        """Reads the body of a `shard_map`, and returns the facts of its results outside of it."""
        params, outside = node.eqn.params, self.map
        # A `ShardMap` looks up facts in `known`, and opens loops by `self.body`.
        shard_map = ShardMap(params["mesh"], params["check_vma"], self.known, self.body)
        self.map = shard_map
        (jaxpr,) = jaxprs.inner(node.eqn)
        # Its specs give the facts of the body's arguments, and how its results are split.
        arguments, result_dims = shard_map.enter(jaxpr, params, inputs, self.ours)
        returned = self.read(self.flat(jaxpr, node), arguments, result_dims)
        self.map = outside
        for finding in shard_map.findings.values():
            self.note(finding)
        # Outside, the arrays are whole, and nothing differs between devices.
        return [
            Value(trip=value.trip, constant=value.constant, narrow=value.narrow)
            for value in returned
        ]

    def _loop(self, node: Node, inputs: list[Value]) -> list[Value]:
        """Reads a loop, and returns the facts of its results.

        The body is followed in silence until its carries settle, and then read once more. A loop of
        one trip is read as a call. The operands of a `while` begin with `skipped` constants of its
        condition, which are no arguments of the body.
        """
        eqn, program = node.eqn, self.body(node)
        skipped = 0 if node.name == "scan" else eqn.params["cond_nconsts"]
        carries = [i - skipped for i, _ in flat.carried(eqn)]  # their places among `arguments`
        arguments = inputs[skipped:]
        trips = eqn.params.get("length")  # None for a `while`
        depth = len(self.loops) + 1  # with this loop
        if trips != 1:
            # Sums of the outer loop that enter this one are not followed further.
            if self.loops and not self.silent:
                self.loops[-1].spoil(inputs)
            arguments = [value._replace(parts=frozenset()) for value in arguments]
        for i in flat.sliced(eqn):
            arguments[i] = arguments[i].sliced()
        if trips == 1:  # a call: no value changes from one trip to the next
            shards_of = [arguments[i].shard for i in carries]
            returned = self.read(program, arguments, _dims_of(shards_of, program))
            return [*returned[: len(carries)], *(v.stacked() for v in returned[len(carries) :])]
        # Each trip has other carries and other slices.
        for i in (*carries, *flat.sliced(eqn)):
            arguments[i] = arguments[i]._replace(trip=depth)
        # `_settle` also replaces the carries' facts in `arguments` by those that hold in each trip.
        returned = self._settle(program, arguments, carries, Loop(depth, trips))
        predicate = Value(constant=True)
        if node.name == "while":
            condition = self.flat(jaxprs.opened(eqn.params["cond_jaxpr"]), node)
            first = eqn.params["body_nconsts"]
            # The condition takes its constants and the carries.
            operands = [*inputs[:skipped], *arguments[first:]]
            predicate = self.follow(condition, operands)[0]
        if not self.silent:
            # The second reading notes mistakes, with the facts that hold in every trip.
            with self._under([("while", predicate.differs)] if node.name == "while" else []):
                returned = self._read_body(program, arguments, carries, Loop(depth, trips))
            if self.map:
                self.map.note_layers(node, inputs)
        return _after_loop(returned, [arguments[i] for i in carries], predicate, depth - 1)

    def _settle(
        self, program: Flat, arguments: list[Value], carries: list[int], loop: Loop
    ) -> list[Value]:
        """Returns the facts of a body's results that hold in every trip. No mistakes are noted.

        The body is followed until the facts of its carries no longer change. The facts of the
        carries in `arguments`, at the places `carries`, are replaced by those that hold in every
        trip.
        """
        was_silent, self.silent = self.silent, True
        self.loops.append(loop)  # loops inside count it for their depth
        while True:
            returned = self.follow(program, arguments)
            changed = False
            for j, i in enumerate(carries):
                # A carry is its first value, or the result of an earlier trip.
                steady = either(arguments[i], returned[j])._replace(trip=loop.depth)
                # `summed` is only for messages.
                changed |= steady._replace(summed=()) != arguments[i]._replace(summed=())
                arguments[i] = steady
            if not changed:
                break
        self.loops.pop()
        self.silent = was_silent
        return returned

    def _read_body(
        self, program: Flat, arguments: list[Value], carries: list[int], loop: Loop
    ) -> list[Value]:
        """Returns the facts of the results of a loop's body, and notes its mistakes. One kind is a
        sum over devices that could be taken once, after the loop. The carries stand at the places
        `carries` of `arguments`, with the facts that hold in every trip.
        """
        inside = list(arguments)  # with each carry as a part of its own, for `Loop.only_added`
        for i, carry in zip(carries, loop.carried([arguments[i] for i in carries]), strict=True):
            inside[i] = carry
        self.loops.append(loop)
        dims = _dims_of([arguments[i].shard for i in carries], program)
        returned = self.read(program, inside, dims)
        self.loops.pop()
        for total in loop.only_added(returned[: len(carries)], returned[len(carries) :]):
            facts = total.axes, self._devices(total.axes), loop.trips, total.where
            self.note(mistakes.sum_in_a_loop(total.aval, *facts))
        return returned

    # Collectives and conditionals

    def _collective(self, node: Node, inputs: list[Value]) -> list[Value]:
        """Returns the facts of the numbers of a collective's results, and notes mistakes in it.

        The mistakes are a collective that some devices may not reach, a sum of equal numbers, and a
        collective that sends the same in every trip of a loop.
        """
        sent, where = node.sent, node.where
        assert sent is not None
        axes = self._large(sent.axes)
        results = [values.after_collective(sent, value, axes, where) for value in inputs]
        # A ragged all-to-all, for example, has more operands than results.
        if len(results) != len(node.outputs):
            results = [joined(results)] * len(node.outputs)
        if self.silent or not axes:
            return results
        for name, along in self.predicates:  # "cond" or "while", and the axes it differs along
            # A permute waits for all devices of the program, other collectives only for those along
            # their axes. If some of these devices do not come, it hangs.
            if along and (sent.permutes or along & axes):
                count = self._devices(along)
                self.note(mistakes.under_a_predicate(sent, axes, name, along, count, where))
        loop = self.loops[-1] if self.loops else None
        avals = jaxprs.types(node.eqn.invars)
        for i, (value, aval) in enumerate(zip(inputs, avals, strict=True)):
            # A sum of a literal, such as of 1, may count the devices on purpose.
            if value.constant:
                continue
            same = axes - value.differs  # the axes along which the devices send equal numbers
            if same and sent.kind in ("sum", "scatter"):
                self.note(mistakes.summed_twice(value, aval, same, self._devices(same), where))
            elif loop and value.trip < loop.depth:  # no trip of this loop changes the operand
                # `zero.gathered`, for example, gathers again in each trip on purpose.
                if not node.scope.on_purpose:
                    self.note(mistakes.same_every_trip(sent, aval, axes, loop.trips, where))
            elif loop and sent.kind == "sum" and jaxprs.is_float(aval):
                results[i] = results[i]._replace(parts=loop.summed(value, aval, axes, where))
            elif loop:  # of the collectives, only sums are followed as linear functions
                loop.spoil([value])
        return results

    def _note_lost_mark(self, node: Node, inputs: list[Value]) -> None:
        """Notes a conditional whose predicate differs between devices, if the types of some
        operands or results do not vary along the same axes.
        """
        predicate, *operands = inputs
        # Without `check_vma` the types do not say along which axes they vary.
        if self.map is None or not self.map.checked or not predicate.differs:
            return
        aval, *avals = jaxprs.types(node.eqn.invars)
        # `axes_of_type` gives the axes along which a type varies.
        along = predicate.differs & set(types.axes_of_type(aval))
        pairs = zip(avals, operands, strict=True)
        # If a type lacks an axis, JAX computes wrong gradients. Integers, and numbers written into
        # the program, have no gradients.
        floats = [aval for aval, value in pairs if jaxprs.is_float(aval) and not value.constant]
        # For each operand, and each result, whose type lacks some of these axes: those axes.
        inputs_lost, outputs_lost = (
            [axes for aval in avals if (axes := along - set(types.axes_of_type(aval)))]
            for avals in (floats, jaxprs.types(node.eqn.outvars))
        )
        axes = NO_AXES.union(*inputs_lost, *outputs_lost)
        if axes:
            counts = len(inputs_lost), len(outputs_lost)
            self.note(mistakes.lost_mark(axes, self._devices(axes), *counts, node.where))


def _ignore(*mistake: Any) -> None:
    """Notes nothing."""
    pass


def _dims_of(shards: Sequence[Any], program: Flat) -> list[Dims | None]:
    """Returns the axes that split the dims of each result of a loop's body (`program`).

    The carries come first, and are split like their first values, whose `shard`s are `shards`. The
    split of a carry without a shard is not known (None), nor is that of the stacked outputs.
    """
    dims = [shard.dims if shard else None for shard in shards]
    return [*dims, *[None] * (len(program.results) - len(dims))]


def _after_loop(
    returned: list[Value], carries: list[Value], predicate: Value, depth: int
) -> list[Value]:
    """Returns the facts of a loop's results, outside of the loop.

    Args:
        returned: the facts of the body's results, in any trip: the carries and the stacked outputs.
        carries: the facts of the carries that hold at the beginning of every trip.
        predicate: the facts of a `while` loop's predicate; those of a constant for a `scan`.
        depth: the number of loops around this one.
    """
    outside = [value.stacked() for value in returned[len(carries) :]]
    # The numbers of a carry come from the last trip; its dims are those of every trip.
    outside = [
        value.with_dims_of(carry) for value, carry in zip(returned, carries, strict=False)
    ] + outside
    return [
        value._replace(
            # If the predicate differs, some devices run more trips than others.
            differs=value.differs | predicate.differs,
            # The `trip` in `returned` and in the predicate is often this loop itself, which says
            # nothing outside. So that no collective is accused wrongly, the result counts as
            # changed by each trip of the innermost loop around.
            trip=depth,
            constant=value.constant and predicate.constant,
            parts=frozenset(),  # the sums and carries of this loop, which mean nothing outside
        )
        for value in outside
    ]
