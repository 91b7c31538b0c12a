"""One reading of a program: values are followed through it, loops until nothing changes, and
mistakes are noted.
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
    """One reading of a program: its place, and the findings.

    Attributes:
        narrow: whether all products should be in 16 bits.
        findings: the mistakes so far.
        silent: whether nothing is noted, while a loop's carries are followed until they settle.
        map: the `shard_map` round the place.
        loops: the loops round it.
        predicates: the conditionals and `while` loops round it, each with the axes along which its
            predicate differs.
        known: the facts of all values of a program, as they were last read aloud.
    """

    def __init__(self, *, narrow: bool):
        self.narrow = narrow
        self.findings: dict[Finding, Finding] = {}
        self.silent = False
        self.map: ShardMap | None = None
        self.loops: list[Loop] = []
        self.predicates: list[tuple[str, frozenset[str]]] = []
        self.known: dict[int, list[Value]] = {}
        self._flats: dict[tuple[int, int], Flat] = {}
        self._ours: dict[int, Jaxpr] = {}
        self._settled: dict[tuple, list[Value]] = {}

    def flat(self, jaxpr: Jaxpr, node: Node | None = None) -> Flat:
        """Returns a jaxpr as a list of operations; `node` is the operation that it is part of."""
        key = id(jaxpr), id(node)
        if key not in self._flats:
            # Its predicates are values of another program.
            scope = node.scope._replace(predicates=()) if node else Scope()
            self._flats[key] = Flat(jaxpr, self.ours, scope)
        return self._flats[key]

    def body(self, loop: Node) -> Flat:
        """Returns the body of a loop."""
        return self.flat(flat.body(loop.eqn), loop)

    def ours(self, eqn: JaxprEqn) -> Jaxpr:
        """Returns the program of a collective of this library."""
        if id(eqn) not in self._ours:
            mesh, checked = (self.map.mesh, self.map.checked) if self.map else (None, True)
            self._ours[id(eqn)] = types.linear_jaxpr(eqn, mesh, check_vma=checked)
        return self._ours[id(eqn)]

    def note(self, finding: Finding | None) -> None:
        """Notes a mistake."""
        if finding and not self.silent:
            self.findings.setdefault(finding, finding)

    def _large(self, axes: Iterable[str]) -> frozenset[str]:
        """Returns those of these axes that have several devices."""
        sizes = self.map.sizes if self.map else {}
        return frozenset(axis for axis in axes if axis in sizes)

    def _devices(self, axes: Iterable[str]) -> int:
        return self.map.devices(axes) if self.map else 1

    # Programs

    def read(
        self, program: Flat, arguments: Sequence[Value], results: Sequence[Dims | None] = ()
    ) -> list[Value]:
        """Returns the facts of a program's results, and notes the mistakes in it.

        `results` are the axes that split each dim of the results, where they are known.
        """
        returned = self.follow(program, arguments)
        if self.map and not self.silent:
            self.map.note_clipped_sums(program)
            self.map.note_updates(program, arguments, results)
        return returned

    def follow(self, program: Flat, arguments: Sequence[Value]) -> list[Value]:
        """Returns the facts of a program's results."""
        key = (id(program), *(value._replace(summed=()) for value in arguments))
        if self.silent and key in self._settled:
            return self._settled[key]
        known = [Value()] * len(program.types)
        for value in program.literals:
            known[value] = Value(constant=True)
        for value, facts in zip(program.arguments, arguments, strict=True):
            known[value] = facts
        for node in program.nodes:
            inputs = [known[value] for value in node.inputs]
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
        outside = self.predicates
        self.predicates = [*outside, *predicates]
        yield
        self.predicates = outside

    def _operation(self, program: Flat, node: Node, inputs: list[Value]) -> list[Value]:
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
        note = _ignore if self.silent else self.map.note
        in_forward = _ignore if node.is_within("transpose(") else note
        spreads = after(program, node, inputs, self.map.sizes, in_forward)
        places = self.map.places(program, node, inputs, note)
        return [
            numbers.with_dims_of(dims._replace(**place))
            for numbers, dims, place in zip(results, spreads, places, strict=True)
        ]

    def _plain(self, node: Node, inputs: list[Value]) -> list[Value]:
        """Returns the facts of the numbers of an operation that is no collective."""
        if node.name in mistakes.PRODUCTS and not self.silent:
            self.note(mistakes.wide_product(node.eqn, inputs, node.where, self.narrow))
        if node.name == "axis_index":
            return [Value(differs=self._large(in_tuple(node.eqn.params["axis_name"])))]
        if node.name != CHOSEN:
            self._read_kernels(node, inputs)
        parts = frozenset()
        if self.loops and not self.silent:
            parts = self.loops[-1].through(node.eqn, inputs)
        if node.name == "optimization_barrier":
            return [
                joined([value], narrow=value.narrow, parts=parts & value.parts) for value in inputs
            ]
        result = joined(inputs, narrow=values.narrow(node.eqn, inputs), parts=parts)
        if node.name == "replicated":
            result = result._replace(differs=result.differs - set(node.eqn.params["axes"]))
        return [result] * len(node.outputs)

    def _read_kernels(self, node: Node, inputs: list[Value]) -> None:
        """Reads a reducer, or a kernel, whose arguments are not known one by one."""
        outside, self.map = self.map, None
        for jaxpr in jaxprs.inner(node.eqn):
            program = self.flat(jaxpr, node)
            self.follow(program, [joined(inputs)] * len(program.arguments))
        self.map = outside

    # Control flow

    def _shard_map(self, node: Node, inputs: list[Value]) -> list[Value]:
        params, outside = node.eqn.params, self.map
        shard_map = ShardMap(params["mesh"], params["check_vma"], self.known, self.body)
        self.map = shard_map
        (jaxpr,) = jaxprs.inner(node.eqn)
        arguments, results = shard_map.enter(jaxpr, params, inputs, self.ours)
        returned = self.read(self.flat(jaxpr, node), arguments, results)
        self.map = outside
        for finding in shard_map.findings.values():
            self.note(finding)
        # Whole again: nothing differs between devices.
        return [
            Value(trip=value.trip, constant=value.constant, narrow=value.narrow)
            for value in returned
        ]

    def _loop(self, node: Node, inputs: list[Value]) -> list[Value]:
        eqn, program = node.eqn, self.body(node)
        skipped = 0 if node.name == "scan" else eqn.params["cond_nconsts"]
        carries = [i - skipped for i, _ in flat.carried(eqn)]
        arguments = inputs[skipped:]
        trips = eqn.params.get("length")
        depth = len(self.loops) + 1
        if trips != 1:
            # The sums of the loop round this one go into it, and are no longer followed.
            if self.loops and not self.silent:
                self.loops[-1].spoil(inputs)
            arguments = [value._replace(parts=frozenset()) for value in arguments]
        for i in flat.sliced(eqn):
            arguments[i] = arguments[i].sliced()
        if trips == 1:  # no loop
            shards_of = [arguments[i].shard for i in carries]
            returned = self.read(program, arguments, _dims_of(shards_of, program))
            return [*returned[: len(carries)], *(v.stacked() for v in returned[len(carries) :])]
        for i in (*carries, *flat.sliced(eqn)):
            arguments[i] = arguments[i]._replace(trip=depth)
        returned = self._settle(program, arguments, carries, Loop(depth, trips))
        predicate = Value(constant=True)
        if node.name == "while":
            condition = self.flat(jaxprs.opened(eqn.params["cond_jaxpr"]), node)
            first = eqn.params["body_nconsts"]
            conditions = [*inputs[:skipped], *arguments[first:]]
            predicate = self.follow(condition, conditions)[0]
        if not self.silent:
            with self._under([("while", predicate.differs)] if node.name == "while" else []):
                returned = self._read_body(program, arguments, carries, Loop(depth, trips))
            if self.map:
                self.map.note_layers(node, inputs)
        return _left(returned, [arguments[i] for i in carries], predicate, depth - 1)

    def _settle(
        self, program: Flat, arguments: list[Value], carries: list[int], loop: Loop
    ) -> list[Value]:
        """Follows a loop's body until its carries are those of any trip; they are replaced."""
        was_silent, self.silent = self.silent, True
        self.loops.append(loop)
        while True:
            returned = self.follow(program, arguments)
            changed = False
            for j, i in enumerate(carries):
                steady = either(arguments[i], returned[j])._replace(trip=loop.depth)
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
        """Reads the body of a loop whose carries have settled."""
        inside = list(arguments)
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
        """Returns the facts of the numbers of a collective's results."""
        sent, where = node.sent, node.where
        assert sent is not None
        axes = self._large(sent.axes)
        results = [values.after_collective(sent, value, axes, where) for value in inputs]
        if len(results) != len(node.outputs):
            results = [joined(results)] * len(node.outputs)
        if self.silent or not axes:
            return results
        for name, along in self.predicates:
            # A permute waits for every device of the program; the others for those of their group.
            if along and (sent.permutes or along & axes):
                count = self._devices(along)
                self.note(mistakes.under_a_predicate(sent, axes, name, along, count, where))
        loop = self.loops[-1] if self.loops else None
        avals = jaxprs.types(node.eqn.invars)
        for i, (value, aval) in enumerate(zip(inputs, avals, strict=True)):
            if value.constant:
                continue
            same = axes - value.differs
            if same and sent.kind in ("sum", "scatter"):
                self.note(mistakes.summed_twice(value, aval, same, self._devices(same), where))
            elif loop and value.trip < loop.depth:
                if not node.scope.on_purpose:
                    self.note(mistakes.same_every_trip(sent, aval, axes, loop.trips, where))
            elif loop and sent.kind == "sum" and jaxprs.is_float(aval):
                results[i] = results[i]._replace(parts=loop.summed(value, aval, axes, where))
            elif loop:
                loop.spoil([value])
        return results

    def _note_lost_mark(self, node: Node, inputs: list[Value]) -> None:
        """Notes a conditional whose operands or results are typed as the same on all devices."""
        predicate, *operands = inputs
        if self.map is None or not self.map.checked or not predicate.differs:
            return
        aval, *avals = jaxprs.types(node.eqn.invars)
        along = predicate.differs & set(types.axes_of_type(aval))
        pairs = zip(avals, operands, strict=True)
        floats = [aval for aval, value in pairs if jaxprs.is_float(aval) and not value.constant]
        inputs_lost, outputs_lost = (
            [axes for aval in avals if (axes := along - set(types.axes_of_type(aval)))]
            for avals in (floats, jaxprs.types(node.eqn.outvars))
        )
        axes = NO_AXES.union(*inputs_lost, *outputs_lost)
        if axes:
            counts = len(inputs_lost), len(outputs_lost)
            self.note(mistakes.lost_mark(axes, self._devices(axes), *counts, node.where))


def _ignore(*mistake: Any) -> None:
    pass


def _dims_of(carries: Sequence[Any], program: Flat) -> list[Dims | None]:
    """Returns the dims of a body's results, as far as those of its carries are known."""
    dims = [shard.dims if shard else None for shard in carries]
    return [*dims, *[None] * (len(program.results) - len(dims))]


def _left(returned: list[Value], carries: list[Value], predicate: Value, depth: int) -> list[Value]:
    """Returns the results of a loop as they are outside of it, where `depth` loops are."""
    outside = [value.stacked() for value in returned[len(carries) :]]
    # A carry's numbers are those after a trip, its dims those before any trip.
    outside = [
        value.with_dims_of(carry) for value, carry in zip(returned, carries, strict=False)
    ] + outside
    return [
        value._replace(
            differs=value.differs | predicate.differs,
            trip=max(depth, predicate.trip),
            constant=value.constant and predicate.constant,
            parts=frozenset(),
        )
        for value in outside
    ]
