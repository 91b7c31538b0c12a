"""Reads a program operation by operation, finds what the lint knows about each value, and notes
mistakes.

A *fact* is one thing that the lint knows about a value (an array), such as "it differs along
'data'". The facts about an operation's results are computed from the facts about its operands. A
`Value` has the facts about one value. `differs` are the axes along which the value differs between
devices. `trip` is the depth of the innermost loop that changes the value. `parts` are the carries
of the innermost loop, and the sums over devices in its body, on which the value depends linearly.
`shard` is the argument from which the value was made by elementwise operations, reshapes,
transposes and all-gathers. `constant` says that the value was made only of numbers written into the
program, and `narrow` is the 16-bit type that the value was cast from.

A `Flat` program is a list of operations (`Node`s), whose values have ids. `sent` has the kind and
the axes of a collective; `sent` is None if the node is no collective. A collective of this library
is one equation; the function `ours` returns the equation's jaxpr. `map` is the `shard_map` around
the current operation; outside any `shard_map` it is None. While `silent` is true, mistakes are not
noted.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from parallax import arithmetic, jaxprs
from parallax.collectives import types
from parallax.lint import flat, mistakes, values
from parallax.lint.finding import Finding
from parallax.lint.flat import CHOSEN, COND, LOOPS, Flat, Node, Scope
from parallax.lint.loops import Loop
from parallax.lint.shards import ShardMap
from parallax.lint.split_dims import dims_after
from parallax.lint.values import NO_AXES, Dim, Dims, Value, either, in_tuple, joined


class Reading:
    """One reading of a program: the findings, and the `shard_map` and loops around the current
    operation.

    Attributes:
        narrow: whether all products should be in 16 bits.
        findings: the mistakes so far.
        silent: whether mistakes are ignored, for example while a loop's body is read again and
            again until the facts about its carries no longer change.
        map: the `shard_map` around the current operation; None if there is none.
        loops: the loops around the current operation, the outermost first.
        predicates: the conditionals and `while` loops around the current operation, each with the
            axes along which its predicate differs between devices.
        known: the facts about all values of a `Flat` (the program, or a body inside it), by the
            `id` of the `Flat`. While `silent` is true, no facts are stored.
    """

    def __init__(self, *, narrow: bool):
        """Begins to read a program; there are no findings yet. `narrow` says whether all products
        should be in 16 bits. The keys of `known`, `_flats`, `_ours` and `_settled` are made of
        `id(x)`, where `x` is a program, a jaxpr, an equation or an operation."""
        self.narrow = narrow
        self.findings: dict[Finding, Finding] = {}
        self.silent = False  # whether mistakes are not noted
        self.map: ShardMap | None = None  # around the current operation
        self.loops: list[Loop] = []
        # "cond" or "while", and the axes along which the predicate differs between devices.
        self.predicates: list[tuple[str, frozenset[str]]] = []
        # A program -> the facts about all its values, in the order of their ids.
        self.known: dict[int, list[Value]] = {}
        # A jaxpr and the operation that contains it -> the list of its operations.
        self._flats: dict[tuple[int, int], Flat] = {}
        # The equation of a collective of this library -> its jaxpr.
        self._ours: dict[int, Jaxpr] = {}
        # A mutable array -> the facts about its elements, so far.
        self._refs: dict[int, Value] = {}
        # A program and the facts about its arguments -> the facts about its results.
        self._settled: dict[tuple, list[Value]] = {}

    def flat(self, jaxpr: Jaxpr, node: Node | None = None) -> Flat:
        """Returns a jaxpr as a list of operations. `node` is the operation that contains the jaxpr;
        None for the whole program.

        A later call with the same `jaxpr` and `node` returns the same list. This saves time, since
        a loop's body is read several times.
        """
        # One jaxpr may stand in several operations. Each has a scope of its own: the calls,
        # conditionals and loops around it. The program keeps the jaxprs, and `_flats` keeps the
        # operations, so no `id` is used for two of them.
        key = id(jaxpr), id(node)
        if key not in self._flats:
            # The ids of the values that decide whether `node` runs mean nothing in this jaxpr,
            # whose values get ids of their own.
            scope = node.scope._replace(predicates=()) if node else Scope()
            self._flats[key] = Flat(jaxpr, self.ours, scope)
        return self._flats[key]

    def body(self, loop: Node) -> Flat:
        """Returns the body of a loop as a list of operations."""
        return self.flat(flat.body(loop.eqn), loop)

    def ours(self, eqn: JaxprEqn) -> Jaxpr:
        """Returns the jaxpr of a collective of this library. The first call for an equation traces
        the jaxpr, and later calls return the same jaxpr."""
        if id(eqn) not in self._ours:
            mesh, checked = (self.map.mesh, self.map.checked) if self.map else (None, True)
            self._ours[id(eqn)] = types.linear_jaxpr(eqn, mesh, check_vma=checked)
        return self._ours[id(eqn)]

    def note(self, finding: Finding | None) -> None:
        """Notes a mistake. Notes nothing while `silent` is true, or if `finding` is None."""
        if finding and not self.silent:
            self.findings.setdefault(finding, finding)

    def _of_several_devices(self, axes: Iterable[str]) -> frozenset[str]:
        """Returns those of `axes` that have several devices."""
        sizes = self.map.sizes if self.map else {}  # only axes that have several devices
        return frozenset(axis for axis in axes if axis in sizes)

    def _devices(self, axes: Iterable[str]) -> int:
        """Returns the number of devices along these axes together."""
        return self.map.devices(axes) if self.map else 1

    # Programs

    def read(
        self, program: Flat, arguments: Sequence[Value], results: Sequence[Dims | None] = ()
    ) -> list[Value]:
        """Returns the facts about a program's results, and notes all mistakes in the program: the
        mistakes that `propagate` notes, those in updates of arguments, and gradients that are
        clipped before they are summed over devices.

        `arguments` are the facts about the program's arguments. `results` has, for each result, the
        axes that split each of its dims, or None if these axes are not known.
        """
        returned = self.propagate(program, arguments)
        # Mistakes in clipped sums and in updates need the facts about all values, so they come
        # after `propagate`.
        if self.map and not self.silent:
            self.map.note_clipped_sums(program)
            self.map.note_updates(program, arguments, results)
        return returned

    def propagate(self, program: Flat, arguments: Sequence[Value]) -> list[Value]:
        """Returns the facts about a program's results, given the facts about its arguments. The
        method goes through the operations in order, and notes those mistakes that a single
        operation shows.
        """
        # While silent, nothing is noted, so a program with the same facts is not read again. The
        # key leaves out `summed`, whose source lines only go into the messages of findings.
        key = (id(program), *(value._replace(summed=()) for value in arguments))
        # (A program with mutable arrays is, since it changes the facts about them.)
        if self.silent and key in self._settled and not self._refs:
            return self._settled[key]
        known = [Value()] * len(program.types)  # the facts about each value, by its id
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
        """Adds `predicates` to `self.predicates` until the `with` block ends. Each predicate is a
        pair: "cond" or "while", and the axes along which the predicate differs between devices."""
        outside = self.predicates
        self.predicates = [*outside, *predicates]
        yield
        self.predicates = outside

    def _operation(self, program: Flat, node: Node, inputs: list[Value]) -> list[Value]:
        """Returns the facts about the results of one operation, given the facts about its operands
        (`inputs`), and notes mistakes in the operation."""
        if node.name == "shard_map":
            return self._shard_map(node, inputs)
        if node.name in LOOPS:
            return self._loop(node, inputs)
        # A `COND` only marks the place of a conditional: the operations of the branches, and those
        # that make the results (`CHOSEN`), come after it in the list.
        if node.name == COND:
            self._note_lost_mark(node, inputs)
            return []
        results = self._collective(node, inputs) if node.sent else self._plain(node, inputs)
        if self.map is None:
            return results
        note = _ignore if self.silent else self.map.note  # `_ignore` does nothing
        # Mistakes with dims are noted only in the forward pass, for whose values the rules of
        # `dims_after` are made. JAX names the operations of the backward pass "transpose(...)".
        note_in_forward = _ignore if node.is_within("transpose(") else note
        # `dims` have the facts about each result's dims, `origins` have a dict of the facts about
        # what it was computed from, and `results` have all other facts about it. `origin_facts`
        # notes gathers that put blocks in a wrong order, in the backward pass too.
        dims = dims_after(program, node, inputs, self.map.sizes, note_in_forward)
        origins = self.map.origin_facts(program, node, inputs, note)
        return [
            whole.with_dims_and_origin_of(of_dims._replace(**fields))
            for whole, of_dims, fields in zip(results, dims, origins, strict=True)
        ]

    def _plain(self, node: Node, inputs: list[Value]) -> list[Value]:
        """Returns the facts about each result of an operation that does not communicate, given the
        facts about its operands (`inputs`). The facts about dims are left to `dims_after`."""
        if node.name in arithmetic.PRODUCTS and not self.silent:
            # A matmul in 32 bits or more is a mistake if an operand is, or was, in 16 bits.
            self.note(mistakes.wide_product(node.eqn, inputs, node.where, self.narrow))
        if node.name == "new_ref" or (inputs and inputs[0].ref in self._refs):
            return self._of_ref(node, inputs)
        if node.name == "axis_index":
            # Along an axis of one device nothing differs.
            axes = in_tuple(node.eqn.params["axis_name"])
            return [Value(differs=self._of_several_devices(axes))]
        # A `CHOSEN` operation makes a result of a conditional, whose branches were read as part of
        # this program.
        if node.name != CHOSEN:
            self._read_inner_jaxprs(node, inputs)
        # The sums and carries of the innermost loop that the result is a linear function of. They
        # are found only in the last reading of a loop's body, which is not silent.
        parts = frozenset()
        if self.loops and not self.silent:
            parts = self.loops[-1].through(node.eqn, inputs)
        # Each result of a barrier is one operand, so it keeps only those `parts` that this operand
        # has.
        if node.name == "optimization_barrier":
            return [
                joined([value], narrow=value.narrow, parts=parts & value.parts) for value in inputs
            ]
        result = joined(inputs, narrow=values.narrow(node.eqn, inputs), parts=parts)
        if node.name == "replicated":  # declares that its operand is equal along these axes
            result = result._replace(differs=result.differs - set(node.eqn.params["axes"]))
        return [result] * len(node.outputs)

    def _of_ref(self, node: Node, inputs: list[Value]) -> list[Value]:
        """Returns the facts about the results of an operation that makes a mutable array
        (`new_ref`), or whose first operand is one. `_refs` has the facts about the elements of each
        mutable array; a write to the array changes these facts."""
        if self.loops:
            self.loops[-1].spoil(inputs)  # the `parts` of elements are not kept
        if node.name == "new_ref":
            self._refs[id(node)] = joined(inputs)
            return [Value(ref=id(node))]
        array, *others = inputs
        assert array.ref is not None
        elements = self._refs[array.ref]
        if node.name in ("swap", "addupdate"):
            aval, written = jaxprs.types(node.eqn.invars)[:2]
            # Other elements keep their numbers, and a branch may not run.
            is_whole = node.name == "swap" and written.shape == aval.shape
            is_certain = is_whole and not any(name == "cond" for name, _ in self.predicates)
            after = joined(others if is_certain else [elements, *others])
            # Only some devices may write, and each iteration of a loop may write other numbers.
            differs = after.differs.union(*(along for _, along in self.predicates))
            trip = max(after.trip, len(self.loops))
            self._refs[array.ref] = after._replace(differs=differs, trip=trip, summed=())
        return [joined([elements, *inputs])] * len(node.outputs)

    def _read_inner_jaxprs(self, node: Node, inputs: list[Value]) -> None:
        """Notes the mistakes in the jaxprs inside an operation: for example, in the body of a
        Pallas kernel, or in the function by which a reduction combines two numbers. It is not known
        which operand of the operation becomes which argument of a jaxpr, so each argument gets the
        facts about a value that is computed from all operands.
        """
        outside, self.map = self.map, None  # inside, nothing is known of dims and shards
        for jaxpr in jaxprs.inner(node.eqn):
            program = self.flat(jaxpr, node)
            self.propagate(program, [joined(inputs)] * len(program.arguments))
        self.map = outside

    # Control flow

    def _shard_map(self, node: Node, inputs: list[Value]) -> list[Value]:
        """Reads the body of a `shard_map`, and returns the facts about its results that hold
        outside of the `shard_map`."""
        params, outside = node.eqn.params, self.map
        # `self.known` has the facts about all values, and `self.body` is a function that returns
        # the body of a loop: `shard_map` looks for mistakes there too.
        shard_map = ShardMap(params["mesh"], params["check_vma"], self.known, self.body)
        self.map = shard_map
        (jaxpr,) = jaxprs.inner(node.eqn)
        # `enter` reads the specs in `params`. They give the facts about the body's arguments, and
        # for each result of the body the axes that split its dims (`result_dims`). `self.ours` is
        # for the permutes and all-to-alls inside the collectives of this library.
        arguments, result_dims = shard_map.enter(jaxpr, params, inputs, self.ours)
        returned = self.read(self.flat(jaxpr, node), arguments, result_dims)
        self.map = outside
        for finding in shard_map.findings.values():
            self.note(finding)
        if self.loops:  # the `parts` of the results are not kept
            self.loops[-1].spoil(returned)
        # Outside, the arrays are whole, and nothing differs between devices. Only facts that are
        # about neither devices nor dims are kept. Inside another `shard_map`, a device still has
        # its own array along the axes that this other one handles.
        handled = frozenset(params["newly_manual_axes"] if outside else shard_map.sizes)
        return [
            Value(
                differs=value.differs - handled,
                trip=value.trip,
                constant=value.constant,
                narrow=value.narrow,
                dims=(Dim(),) * aval.ndim if outside and not value.constant else None,
                chosen=value.chosen - handled,
            )
            for value, aval in zip(returned, jaxprs.types(node.eqn.outvars), strict=True)
        ]

    def _loop(self, node: Node, inputs: list[Value]) -> list[Value]:
        """Reads a loop, and returns the facts about its results.

        Facts are propagated through the body, in silence, until the facts about its carries no
        longer change. Then the body is read once more, to note its mistakes. A loop of one
        iteration is read like a call of its body. The operands of a `while` begin with the
        constants of its condition. The body does not take these constants, so they are skipped.
        """
        eqn, program = node.eqn, self.body(node)
        skipped = 0 if node.name == "scan" else eqn.params["cond_nconsts"]
        # `carried` gives the places of each carry among the operands and among the results.
        carries = [i - skipped for i, _ in flat.carried(eqn)]  # its places among `arguments`
        arguments = inputs[skipped:]
        trips = eqn.params.get("length")  # None for a `while`
        depth = len(self.loops) + 1  # with this loop
        if trips != 1:
            # In this loop, `parts` are only this loop's own carries and sums. Those of the outer
            # loop are not followed through this loop, so the ones among its operands are spoiled.
            if self.loops and not self.silent:
                self.loops[-1].spoil(inputs)
            arguments = [value._replace(parts=frozenset()) for value in arguments]
        # `sliced` drops the facts about the first dim, and `stacked` below adds a first dim of
        # which nothing is known. Only a `scan` slices operands. Its `skipped` is 0, so an operand
        # has the same place among `inputs` and `arguments`.
        for i in flat.sliced(eqn):
            arguments[i] = arguments[i].sliced()
        if trips == 1:  # a call: no value changes from one iteration to the next
            shards_of = [arguments[i].shard for i in carries]
            returned = self.read(program, arguments, _dims_of(shards_of, program))
            self._note_layers(node, inputs)
            return [*returned[: len(carries)], *(v.stacked() for v in returned[len(carries) :])]
        # Each iteration has other carries and other slices.
        for i in (*carries, *flat.sliced(eqn)):
            arguments[i] = arguments[i]._replace(trip=depth)
        # `_settle` also replaces the facts about the carries in `arguments` by those that hold in
        # each iteration.
        returned = self._settle(program, arguments, carries, Loop(depth, trips))
        predicate, loop = Value(constant=True), Loop(depth, trips)
        if node.name == "while":
            condition = self.flat(jaxprs.opened(eqn.params["cond_jaxpr"]), node)
            first = eqn.params["body_nconsts"]
            # The condition takes its constants and the carries. It has no updates and no gradients,
            # so `propagate` is enough. Its collectives do not count as inside this loop, but as
            # under the predicate, since they run once per iteration. The predicate is itself the
            # condition's result. So a first reading, in silence, finds the facts about the
            # predicate, and a second reading notes the mistakes.
            operands = [*inputs[:skipped], *arguments[first:]]
            was_silent, self.silent = self.silent, True
            predicate = self.propagate(condition, operands)[0]
            self.silent = was_silent
            with self._under([("while", predicate.differs)]):
                self.propagate(condition, operands)
            # The condition needs the carries that it reads in each iteration.
            of_carries = enumerate(condition.arguments[skipped:])
            loop.spoiled |= {("carry", i) for i, value in of_carries if condition.reads(value)}
        if not self.silent:
            # The second reading notes mistakes, with the facts that hold in every iteration.
            with self._under([("while", predicate.differs)] if node.name == "while" else []):
                returned = self._read_body(program, arguments, carries, loop)
            self._note_layers(node, inputs)
        return _after_loop(returned, [arguments[i] for i in carries], predicate, depth - 1)

    def _note_layers(self, loop: Node, inputs: list[Value]) -> None:
        """Notes a scan over layers of which each device runs only some; see
        `ShardMap.note_layers`."""
        if self.map and not self.silent:
            self.map.note_layers(loop, inputs)

    def _settle(
        self, program: Flat, arguments: list[Value], carries: list[int], loop: Loop
    ) -> list[Value]:
        """Returns those facts about the results of a loop's body that hold in every iteration of
        the loop. No mistakes are noted.

        Facts are propagated through the body until the facts about its carries no longer change.
        `arguments` has the facts about the body's arguments. `carries` has the indices of the
        carries in `arguments`. The facts at these indices are replaced by those that hold in every
        iteration.
        """
        was_silent, self.silent = self.silent, True
        self.loops.append(loop)  # loops inside count it for their depth
        # The loop ends, since `either` changes each fact in one direction only: `differs`, for
        # example, only grows.
        while True:
            before = dict(self._refs)
            returned = self.propagate(program, arguments)
            # The elements of a mutable array are like a carry.
            for ref, elements in before.items():
                self._refs[ref] = joined([elements, self._refs[ref]], summed=())
            changed = before != self._refs
            for j, i in enumerate(carries):
                # A carry is its initial value, or the result of an earlier iteration.
                steady = either(arguments[i], returned[j])._replace(trip=loop.depth)
                # `summed` is left out: its source lines only go into the messages of findings.
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
        """Returns the facts about the results of a loop's body, and notes the mistakes in the body.
        One kind of mistake is a sum over devices that could be taken once, after the loop.
        `arguments` has, for each argument of the body, the facts that hold in every iteration.
        `carries` has the indices of the carries in `arguments`.
        """
        inside = list(arguments)  # with each carry as a part of its own, for `Loop.only_added`
        for i, carry in zip(carries, loop.carried([arguments[i] for i in carries]), strict=True):
            inside[i] = carry
        self.loops.append(loop)
        # `read` looks for mistakes in results that may be updates of arguments, and needs the
        # results' dims for that. A new carry is split like the old carry, whose `shard` has the
        # dims. The dims of stacked outputs are not known.
        dims = _dims_of([arguments[i].shard for i in carries], program)
        returned = self.read(program, inside, dims)
        self.loops.pop()
        for total in loop.only_added(returned[: len(carries)], returned[len(carries) :]):
            details = total.axes, self._devices(total.axes), loop.trips, total.where
            self.note(mistakes.sum_in_a_loop(total.aval, *details))
        return returned

    # Collectives and conditionals

    def _collective(self, node: Node, inputs: list[Value]) -> list[Value]:
        """Returns the facts about the results of a collective, without the facts about their dims,
        and notes mistakes with the collective.

        The mistakes are a collective that some devices may not reach, a sum of numbers that are
        equal on all devices, and a collective that sends the same numbers in every iteration of a
        loop.
        """
        sent, where = node.sent, node.where
        assert sent is not None
        axes = self._of_several_devices(sent.axes)
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
            elif loop and value.trip < loop.depth:  # no iteration of this loop changes the operand
                # `zero.gathered`, for example, gathers again in each iteration on purpose.
                if not node.scope.on_purpose:
                    self.note(mistakes.same_every_trip(sent, aval, axes, loop.trips, where))
            elif loop and sent.kind == "sum" and jaxprs.is_float(aval):
                results[i] = results[i]._replace(parts=loop.summed(value, aval, axes, where))
            # Only sums can be a `sum_in_a_loop`. A value that another collective takes counts as
            # used in another way than by adding it up.
            elif loop:
                loop.spoil([value])
        return results

    def _note_lost_mark(self, node: Node, inputs: list[Value]) -> None:
        """Notes a conditional whose predicate differs along an axis, if a floating-point operand,
        or any result, is typed as the same on all devices of this axis. The axis is ignored if the
        predicate itself is typed so: then an earlier operation, not the conditional, dropped the
        axis from the type.
        """
        predicate, *operands = inputs
        # Without `check_vma` the types do not say along which axes they vary.
        if self.map is None or not self.map.checked or not predicate.differs:
            return
        aval, *avals = jaxprs.types(node.eqn.invars)
        # `axes_of_type` gives the axes along which a type varies. If the predicate differs along an
        # axis that its own type lacks, an earlier operation lost this axis, not the conditional.
        along = predicate.differs & set(types.axes_of_type(aval))
        pairs = zip(avals, operands, strict=True)
        # If an operand's type lacks an axis, JAX computes wrong gradients. Integers, and numbers
        # written into the program, have no gradients. Results of any type count: JAX takes a result
        # whose type lacks the axis for equal copies, although the devices' results differ.
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
    """Returns the `Dims` of each result of a loop's body (`program`): for each dim, the axes that
    split the dim.

    The carries come first. A carry is split in the same way before and after an iteration. `shards`
    has a `Shard` or None for each carry. The field `dims` of a `Shard` has the carry's `Dims`. If
    the `Shard` is None, the carry's `Dims` are not known, and its entry is None. The entries of the
    stacked outputs are None too.
    """
    dims = [shard.dims if shard else None for shard in shards]
    return [*dims, *[None] * (len(program.results) - len(dims))]


def _after_loop(
    returned: list[Value], carries: list[Value], predicate: Value, depth: int
) -> list[Value]:
    """Returns the facts about a loop's results, outside of the loop.

    Args:
        returned: the facts about the body's results, first the carries and then the outputs that
            the loop stacks. The facts hold in every iteration.
        carries: the facts about the carries that hold at the beginning of every iteration.
        predicate: the facts about a `while` loop's predicate; for a `scan`, which has no predicate,
            the facts that any constant has.
        depth: the number of loops around this one.
    """
    outside = [value.stacked() for value in returned[len(carries) :]]
    # `carries` join the initial values and the body's results, so their facts about dims and about
    # what a carry was computed from always hold. The other facts are those of the body's results: a
    # loop is taken to run at least once.
    outside = [
        value.with_dims_and_origin_of(carry)
        for value, carry in zip(returned, carries, strict=False)
    ] + outside
    return [
        value._replace(
            # If the predicate differs, some devices run more iterations than others.
            differs=value.differs | predicate.differs,
            # The `trip` in `returned` and in the predicate is often the depth of this loop itself,
            # which says nothing outside of it. So that no collective is accused wrongly, the result
            # counts as changed by each iteration of the innermost loop around this one.
            trip=depth,
            constant=value.constant and predicate.constant,
            parts=frozenset(),  # the sums and carries of this loop, which mean nothing outside
        )
        for value in outside
    ]
