"""One walk through a traced program: arithmetic, bytes moved, messages, and the operations that
`liveness` lays out in memory.

Elementwise results are fused (`fusion.Value`) until a product, a message or a loop needs them as an
array; a costly one that several read is held from the start.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from parallax import jaxprs, source_lines
from parallax.collectives import types
from parallax.plan import compiler_copies, liveness, primitives
from parallax.plan.dead_code import Needed
from parallax.plan.fusion import Frame, Message, Value
from parallax.plan.liveness import Buffer, Operation
from parallax.plan.primitives import nbytes


class Reading:
    """One walk: what it has counted, and where it stands."""

    def __init__(self, platform: str, habits: compiler_copies.Backend):
        self.platform, self.habits = platform, habits
        self.products: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()
        self.read, self.written = 0, 0
        self.messages: Counter[Message] = Counter()
        self.unbounded: list[str] = []  # lines of loops whose trips are not known
        self.frames = [Frame()]
        self.times = 1
        self.sizes: dict[str, int] = {}
        self.mesh: Any = None
        self.checked = True
        self.at: JaxprEqn | None = (
            None  # the caller's equation, where inner ones have no line of the caller's
        )
        self.needed = Needed()
        self.literals: dict[Any, Value] = {}
        self.opened: dict[int, tuple[JaxprEqn, Jaxpr]] = {}

    # Values

    def line(self, eqn: Any) -> str:
        """Returns the caller's line of an equation."""
        return source_lines.source(self.at or eqn)

    def emit(self, operation: Operation, *, read: int = 0, written: int = 0) -> None:
        """Notes an operation of the frame at hand, and the bytes that it reads and writes."""
        self.frames[-1].operations.append(operation)
        self.read += self.times * read
        self.written += self.times * written

    def hold(self, value: Value) -> Buffer | None:
        """Returns the buffer of a value, from now on; None for one that is made of literals alone
        and is small."""
        root = value.root
        if root.buffer is None:
            if not root.reads and root.bytes <= 64:
                return None
            made = Buffer(root.bytes, self.at or root.eqn)
            over = tuple((made, under) for under in root.near if under.bytes == made.bytes)
            self.emit(
                Operation(tuple(root.reads), (made,), over),
                read=sum(root.reads.values()),
                written=made.bytes,
            )
            root.buffer, root.reads, root.near = made, {made: made.bytes}, frozenset([made])
        return root.buffer

    def made(
        self,
        eqn: JaxprEqn,
        k: int,
        reads: Sequence[Value],
        *,
        over: Sequence[Value] = (),
        part: int | None = None,
    ) -> Value:
        """Returns the k-th result of an equation, in a buffer of its own or in that of one of
        `over`, of which `part` bytes change."""
        aval = jaxprs.types(eqn.outvars)[k]
        buffer = Buffer(nbytes(aval), self.at or eqn)
        bases = {base: size for value in reads for base, size in value.root.reads.items()}
        pairs = tuple(
            (buffer, value.root.buffer) for value in over if value.root.buffer is not None
        )
        read, written = (sum(bases.values()), buffer.bytes) if part is None else (part, part)
        self.emit(Operation(tuple(bases), (buffer,), pairs), read=read, written=written)
        return Value(aval, {buffer: buffer.bytes}, buffer=buffer, eqn=eqn)

    def _fused(self, eqn: JaxprEqn, operands: Sequence[Value]) -> Value:
        """Returns a result that is computed where it is read."""
        value = Value(jaxprs.types(eqn.outvars)[0], {}, eqn=eqn)
        part = eqn.primitive.name in primitives.PARTS
        reads: dict[Buffer, int] = {}
        near: set[Buffer] = set()
        for operand in operands:
            for base, size in operand.root.reads.items():
                reads[base] = max(reads.get(base, 0), min(size, value.bytes) if part else size)
            if eqn.primitive.name not in primitives.VIEWS and operand.bytes == value.bytes:
                near |= operand.root.near
        value.reads, value.near = reads, frozenset(near)
        return value

    # The walk

    def run(
        self, jaxpr: Jaxpr, arguments: Sequence[Value], used: Sequence[bool], readers: Sequence[int]
    ) -> list[Value]:
        """Returns the results of a jaxpr, in the frame at hand.

        Args:
            jaxpr: what to walk through.
            arguments: its operands.
            used: which results are needed.
            readers: how many read each.
        """
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= {var: self._constant(var) for var in jaxpr.constvars}
        _, counts = self.needed(jaxpr, used)
        uses = Counter(
            atom
            for eqn, each in zip(jaxpr.eqns, counts, strict=True)
            if each
            for atom in eqn.invars
            if not jaxprs.is_literal(atom)
        )
        for atom, many in zip(jaxpr.outvars, readers, strict=True):
            if not jaxprs.is_literal(atom):
                uses[atom] += many
        for eqn, each in zip(jaxpr.eqns, counts, strict=True):
            if each is not None:
                operands = [self._read(atom, known) for atom in eqn.invars]
                results = self._once(eqn, operands, each, [uses[var] for var in eqn.outvars])
                known |= zip(eqn.outvars, results, strict=True)
        return [
            self._read(atom, known) if each else self._read(None, known)
            for atom, each in zip(jaxpr.outvars, used, strict=True)
        ]

    def _constant(self, var: Any) -> Value:
        buffer = Buffer(nbytes(var.aval), what="constant", fixed=True)
        return Value(var.aval, {buffer: buffer.bytes}, buffer=buffer)

    def _read(self, atom: Any, known: Mapping[Any, Value]) -> Value:
        if atom is not None and not jaxprs.is_literal(atom):
            return known.get(atom) or self._read(None, known)
        key = (str(atom.aval), str(atom.val)) if atom is not None else None
        if key not in self.literals:
            self.literals[key] = Value(getattr(atom, "aval", None), {})
        return self.literals[key]

    def _once(
        self, eqn: JaxprEqn, operands: list[Value], used: tuple[bool, ...], readers: Sequence[int]
    ) -> list[Value]:
        """Returns the results of an equation; those of one that was met before, of the same
        operands, are the same."""
        plain = not jaxprs.inner(eqn) and eqn.primitive.name != types.linear_p.name
        if not plain or eqn.primitive.name == "optimization_barrier" or eqn.effects:
            return self._equation(eqn, operands, used, readers)
        roots = tuple((id(value.root), str(value.aval)) for value in operands)
        key = (
            eqn.primitive.name,
            roots,
            str(sorted((name, str(value)) for name, value in eqn.params.items())),
        )
        known = self.frames[-1].known
        if key not in known:
            known[key] = (
                [value.root for value in operands],
                self._equation(eqn, operands, used, readers),
            )
        return known[key][1]

    def _equation(
        self, eqn: JaxprEqn, operands: list[Value], used: tuple[bool, ...], readers: Sequence[int]
    ) -> list[Value]:
        name = eqn.primitive.name
        control = {
            "shard_map": self._shard_map,
            "cond": self._cond,
            "scan": self._scan,
            "while": self._while,
        }
        if name in control:
            return control[name](eqn, operands, used, readers)
        if name == types.linear_p.name:
            return self._linear(eqn, operands, used, readers)
        if (inner := jaxprs.called(eqn)) is not None:
            if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
                operands = [self._apart(value) for value in operands]
            return self._inlined(
                eqn, inner, operands, used, readers, hidden=source_lines.is_jax_function(inner)
            )
        return self._plain(eqn, operands, readers)

    def _inlined(self, eqn, inner, operands, used, readers, *, hidden: bool) -> list[Value]:
        outside, self.at = self.at, self.at or (eqn if hidden else None)
        results = self.run(inner, operands, used, readers)
        self.at = outside
        return results

    def _linear(self, eqn, operands, used, readers) -> list[Value]:
        if id(eqn) not in self.opened:
            self.opened[id(eqn)] = (eqn, types.linear_jaxpr(eqn, self.mesh, check_vma=self.checked))
        return self._inlined(eqn, self.opened[id(eqn)][1], operands, used, readers, hidden=True)

    def _apart(self, value: Value) -> Value:
        """Returns a value behind a barrier: an array, and another than before it."""
        buffer = self.hold(value) if value.root.reads else None
        return (
            value
            if buffer is None
            else Value(value.aval, {buffer: buffer.bytes}, buffer=buffer, eqn=value.eqn)
        )

    def _plain(self, eqn: JaxprEqn, operands: list[Value], readers: Sequence[int]) -> list[Value]:
        name = eqn.primitive.name
        if name in primitives.FUSED or primitives.only_multiplies(eqn):
            return [self._fused_or_held(eqn, operands, readers[0])]
        if name in ("platform_index", "axis_index"):
            return [self._index(eqn)]
        if name == "optimization_barrier":
            return [self._apart(value) for value in operands]
        if name in primitives.UPDATES:
            return [self._update(eqn, operands)]
        reads = name in primitives.READERS or (
            name in primitives.PRODUCTS and not primitives.is_product(eqn)
        )
        for value in () if reads else operands:
            self.hold(value)
        results = [self.made(eqn, k, operands) for k in range(len(eqn.outvars))]
        if primitives.is_product(eqn):
            count = self.times * primitives.operations(eqn)
            self.products[str(jaxprs.types(eqn.invars)[0].dtype)] += count
            self.lines[self.line(eqn)] += count
        if name in primitives.COLLECTIVES:
            along = primitives.axes(eqn, self.sizes)
            for value in results if along else ():
                if not value.bytes:  # half of one number: XLA drops the message
                    continue
                self.messages[
                    Message(primitives.COLLECTIVES[name], along, value.bytes, self.line(eqn))
                ] += self.times
        return results

    def _fused_or_held(self, eqn: JaxprEqn, operands: list[Value], readers: int) -> Value:
        value = self._fused(eqn, operands)
        if eqn.primitive.name in primitives.SAME:
            value.source = operands[0].root
        elif eqn.primitive.name in jaxprs.DEAR and readers > 1 and value.reads:
            self.hold(value)
        return value

    def _index(self, eqn: JaxprEqn) -> Value:
        """Returns where the program runs: the platform's branch, or the device's place on an
        axis."""
        value = Value(jaxprs.types(eqn.outvars)[0], {})
        if eqn.primitive.name == "platform_index":
            names = eqn.params["platforms"]
            value.branch = next(
                k for k, each in enumerate(names) if each is None or self.platform in each
            )
        return value

    def _update(self, eqn: JaxprEqn, operands: list[Value]) -> Value:
        """Returns an array of which a part is written anew, where it lies if nobody else needs what
        was there."""
        self.hold(operands[0])
        part = nbytes(
            jaxprs.types(eqn.invars)[1 if eqn.primitive.name == "dynamic_update_slice" else 2]
        )
        return self.made(eqn, 0, operands, over=operands[:1], part=part)

    # Control flow

    def _shard_map(self, eqn, operands, used, readers) -> list[Value]:
        outside = self.mesh, self.sizes, self.checked
        self.mesh, self.checked = eqn.params["mesh"], eqn.params["check_vma"]
        self.sizes = dict(self.mesh.shape)
        (body,) = jaxprs.inner(eqn)
        arguments = []
        for value, var in zip(operands, body.invars, strict=True):
            root = value.root
            if root.buffer is not None:
                root.buffer.bytes = nbytes(var.aval)
            inside = Value(
                var.aval,
                {base: min(size, base.bytes) for base, size in root.reads.items()},
                buffer=root.buffer,
            )
            inside.eqn = root.eqn
            arguments.append(inside)
        results = self.run(body, arguments, used, readers)
        self.mesh, self.sizes, self.checked = outside
        return results

    def _cond(self, eqn, operands, used, readers) -> list[Value]:
        index, *operands = operands
        branches = [jaxprs.opened(branch) for branch in eqn.params["branches"]]
        if index.branch is not None:
            return self._inlined(
                eqn, branches[index.branch], operands, used, readers, hidden=self.at is not None
            )
        for value in operands:
            self.hold(value)
        before, most = self._counted(), None
        for branch in branches:
            self._count(before)
            self.frames.append(Frame())
            for value in self.run(branch, operands, used, readers):
                self.hold(value)
            peak = liveness.peak(self.frames.pop().operations, ())
            key = (self.products.total(), self.messages.total(), peak.bytes)
            if most is None or key > most[0]:
                most = key, self._counted(), peak
        assert most is not None
        self._count(most[1])
        results = [Buffer(nbytes(aval), self.at or eqn) for aval in jaxprs.types(eqn.outvars)]
        reads = tuple({base for value in (index, *operands) for base in value.root.reads})
        self.emit(Operation(reads, tuple(results), (), most[2].bytes, most[2].held))
        return [
            Value(aval, {buffer: buffer.bytes}, buffer=buffer, eqn=eqn)
            for aval, buffer in zip(jaxprs.types(eqn.outvars), results, strict=True)
        ]

    def _counted(self):
        return (
            Counter(self.products),
            Counter(self.lines),
            self.read,
            self.written,
            Counter(self.messages),
        )

    def _count(self, counted) -> None:
        products, lines, self.read, self.written, messages = counted
        self.products, self.lines, self.messages = (
            Counter(products),
            Counter(lines),
            Counter(messages),
        )

    def _scan(self, eqn, operands, used, readers) -> list[Value]:
        body, length = jaxprs.inner(eqn)[0], eqn.params["length"]
        constants, carries = jaxprs.scan_parts(eqn)
        split = constants + carries
        if length == 1:  # no loop
            pairs = zip(operands[split:], body.invars[split:], strict=True)
            arguments = operands[:split] + [self._reshaped(*pair) for pair in pairs]
            results = self.run(body, arguments, used, readers)
            stacked = zip(results[carries:], eqn.outvars[carries:], strict=True)
            return results[:carries] + [self._reshaped(*pair) for pair in stacked]
        counts = self.needed.of_scan(eqn, used)
        wanted = self.needed(body, counts)[0]
        sliced = [
            self._slice(*each)
            for each in zip(operands[split:], body.invars[split:], wanted[split:], strict=True)
        ]
        return self._loop(
            eqn, body, (operands[:constants], operands[constants:split], sliced), counts, length
        )

    def _while(self, eqn, operands, used, readers) -> list[Value]:
        first, second = (
            eqn.params["cond_nconsts"],
            eqn.params["cond_nconsts"] + eqn.params["body_nconsts"],
        )
        self.unbounded.append(self.line(eqn))
        body = jaxprs.opened(eqn.params["body_jaxpr"])
        return self._loop(
            eqn, body, (operands[first:second], operands[second:], []), [True] * len(eqn.outvars), 1
        )

    def _loop(
        self, eqn, body: Jaxpr, parts: Sequence[list[Value]], counts: Sequence[bool], trips: int
    ) -> list[Value]:
        """Returns a loop: each carry has a buffer, and the buffers of its stacked results are there
        before it begins."""
        constants, starts, sliced = parts
        wanted = self.needed(body, counts)[0]
        for value, each in zip(constants, wanted, strict=False):
            if each and value.root.reads:  # what is made of literals alone is made in the loop
                self.hold(value)
        carried = [
            self._start(eqn, value, var.aval, each)
            for value, var, each in self._carries(body, constants, starts, counts)
        ]
        stacked = [
            Buffer(nbytes(var.aval) if each else 0, self.at or eqn)
            for var, each in zip(eqn.outvars[len(starts) :], counts[len(starts) :], strict=True)
        ]
        reads = {
            base for value in (*constants, *carried, *sliced) for base in value.root.reads
        }  # before the body holds any
        self.frames.append(Frame())
        self.times *= trips
        results = self.run(body, [*constants, *carried, *sliced], counts, [1] * len(counts))
        ends = [
            self.hold(value) if each else None
            for value, each in zip(results, counts[: len(starts)], strict=False)
        ]
        for value, each in list(zip(results, counts, strict=True))[len(starts) :]:
            if each:
                bases = value.root.reads
                self.emit(Operation(tuple(bases)), read=sum(bases.values()), written=value.bytes)
        self.times //= trips
        operations = self.frames.pop().operations
        pairs = [
            (end, start.root.buffer)
            for end, start in zip(ends, carried, strict=True)
            if end and start.root.buffer
        ]
        given = [start for _, start in pairs]
        peak = liveness.peak(operations, [end for end, _ in pairs], given, pairs)
        twice = compiler_copies.beside(eqn, stacked, self.habits)
        cut = self._slices_of_further_layers(eqn, sliced, wanted[len(wanted) - len(sliced) :])
        innermost = not any(operation.inner for operation in operations)
        # Loops around this one have a share of the memory on the chip.
        near = self.habits.near // len(self.frames) if innermost else 0
        inner = max(0, peak.bytes - near) + sum(size for size, _ in cut)
        self.emit(Operation(tuple(reads), (*stacked, *twice), (), inner, (*peak.held, *cut)))
        return carried + [
            Value(var.aval, {buffer: buffer.bytes}, buffer=buffer, eqn=eqn)
            for var, buffer in zip(eqn.outvars[len(starts) :], stacked, strict=True)
        ]

    def _slices_of_further_layers(self, eqn, sliced, wanted) -> list[tuple[int, Buffer]]:
        """Returns the copies of a backward loop's slices where its body has several layers."""
        if not eqn.params.get("reverse", False):
            return []
        count = self.habits.slices * (eqn.params.get("unroll", 1) - 1)
        return [
            (count * value.bytes, Buffer(value.bytes, self.at or eqn, what="slice of a stack"))
            for value, needed in zip(sliced, wanted, strict=True)
            if needed and count
        ]

    @staticmethod
    def _carries(body, constants, starts, counts):
        return zip(starts, body.invars[len(constants) :], counts, strict=False)

    def _start(self, eqn, value: Value, aval: Any, counts: bool) -> Value:
        """Returns a loop's carry, which begins as `value`, in whose place it is if nobody else
        reads that."""
        if not counts:
            return Value(aval, {})
        root = value.root
        buffer = Buffer(nbytes(aval), self.at or eqn, carry=True)
        near = [root.buffer] if root.buffer else root.near
        over = tuple((buffer, under) for under in near if under.bytes == buffer.bytes)
        self.emit(
            Operation(tuple(root.reads), (buffer,), over),
            written=0 if root.buffer else buffer.bytes,
        )
        return Value(aval, {buffer: buffer.bytes}, buffer=buffer, eqn=eqn)

    def _slice(self, value: Value, var: Any, wanted: bool) -> Value:
        if wanted:
            self.hold(value)
        inside = Value(var.aval, {})
        inside.reads = {base: min(size, inside.bytes) for base, size in value.root.reads.items()}
        inside.eqn = value.root.eqn
        return inside

    @staticmethod
    def _reshaped(value: Value, var: Any) -> Value:
        inside = Value(var.aval, value.root.reads, eqn=value.root.eqn)
        inside.source = value.root
        return inside
