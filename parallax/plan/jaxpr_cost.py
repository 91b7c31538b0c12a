"""Reads a traced program once. Counts the program's arithmetic, its messages and the bytes that it
moves, and lists its operations, from which `liveness` computes the peak of memory.

A `Value` is one array. The array is either *held* in a `Buffer`, or *fused*: then each operation
that reads the array computes it again. A value is computed from buffers, and `reads` has for each
of these buffers the number of bytes that are read. A value is held as soon as a matmul, a message
or a loop needs it as an array. An expensive value that several operations read is held as soon as
it is computed. The result of a reshape has the `root` of its operand; any other value is its own
`root`. `near` are the buffers that the value reads element by element; the value may be written
over one of these buffers. `is_zeros` marks an array of zeros: some compilers keep all arrays of
zeros of the same size and dtype in one buffer.

A *frame* has operations in order. The program has a frame, and so has each branch and each loop's
body. The methods for equations take the operands, whether each result is needed (`used`), and how
many operations read each result (`readers`). `self.times` is how often the equation that is being
read runs: the iterations of all loops around it, multiplied. Inside a function of JAX or a
collective of this library, `self.at` is the equation in the caller's code that makes the call. The
equations inside get the source line of this call. Elsewhere `self.at` is None. `self.needed` tells
which operands and results of a jaxpr are needed. `hold` gives a value a buffer. `habits` says which
copies the platform's compiler makes. `linear_p` is the primitive of this library's collectives.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from parallax import arithmetic, jaxprs, source_lines
from parallax.collectives import types
from parallax.plan import compiler_copies, liveness, primitives
from parallax.plan.dead_code import Needed
from parallax.plan.fusion import Frame, Message, Value
from parallax.plan.liveness import Buffer, Operation
from parallax.plan.primitives import nbytes


class Reading:
    """The state while a program is read once: the counts so far, and the position in the
    program."""

    def __init__(self, platform: str, habits: compiler_copies.Backend):
        """Begins to read a program for `platform`, such as "cpu". `habits` says how the platform's
        compiler assigns memory."""
        self.platform, self.habits = platform, habits
        # The floating-point operations of matmuls, by the type of their operands.
        self.products: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()  # the same operations, by the caller's line
        self.read, self.written = 0, 0  # bytes
        self.messages: Counter[Message] = Counter()  # the number of calls of each collective
        self.unbounded: list[str] = []  # lines of loops whose number of trips is not known
        self.uncounted: list[str] = []  # lines of kernels whose operations are not known
        # Arrays that a `shard_map` takes or returns in blocks, and the plain equations outside of
        # any `shard_map`: their lines, and the roots of their operands and results.
        self.split: set[Value] = set()
        self.outside: list[tuple[str, list[Value]]] = []
        self.frames = [Frame()]  # the innermost is last
        self.times = 1  # trips of all loops around, multiplied
        self.sizes: dict[str, int] = {}  # devices on each axis of the mesh
        self.mesh: Any = None  # that of the shard_map around
        self.checked = True  # `check_vma` of the shard_map around
        # The caller's equation, if the equations inside it have no line of the caller's.
        self.at: JaxprEqn | None = None
        self.needed = Needed()
        self.literals: dict[Any, Value] = {}  # by type and value; arrays by identity
        self.blocks: dict[Buffer, int] = {}  # the bytes of an argument's largest block so far
        # The programs of the library's collectives, by the id of the equation. The equation is
        # kept, so that no other equation gets its id.
        self.opened: dict[int, tuple[JaxprEqn, Jaxpr]] = {}

    # Values

    def line(self, eqn: Any) -> str:
        """Returns the line of the user's source from which an equation comes."""
        return source_lines.source(self.at or eqn)

    def emit(self, operation: Operation, *, read: int = 0, written: int = 0) -> None:
        """Adds an operation to the innermost frame (the program, the branch or the loop's body that
        is being read). `read` and `written` are the bytes that one run of the operation reads and
        writes; the method adds the bytes of all its runs to the counts."""
        self.frames[-1].operations.append(operation)
        self.read += self.times * read
        self.written += self.times * written

    def hold(self, value: Value) -> Buffer | None:
        """Gives the root of a value (the value before all reshapes) a buffer, unless the root has
        one, and returns the buffer. A value of at most 64 bytes that is made only of literals is
        taken as a constant inside the operation that reads it; for such a value the method returns
        None. A larger value, such as an array of zeros, must be written to memory."""
        root = value.root
        if root.buffer is None:
            if not root.reads and root.bytes <= 64:
                return None
            if root.is_zeros and self.habits.zeros:
                buffer = self.shared_zeros(root.aval)
                root.buffer, root.reads = buffer, {buffer: buffer.bytes}
                root.near = frozenset([buffer])
                return buffer
            buffer = Buffer(root.bytes, self.at or root.eqn)
            # It may be written over a buffer of its size that it reads element by element.
            over = tuple((buffer, under) for under in root.near if under.bytes == buffer.bytes)
            self.emit(
                Operation(tuple(root.reads), (buffer,), over),
                read=sum(root.reads.values()),
                written=buffer.bytes,
            )
            # Later readers read this buffer and nothing below it.
            root.buffer, root.reads, root.near = buffer, {buffer: buffer.bytes}, frozenset([buffer])
        return root.buffer

    def shared_zeros(self, aval: Any) -> Buffer:
        """Returns the buffer of zeros with the number of elements and the dtype of `aval`. All such
        arrays in the innermost frame (the program, the branch or the loop's body that is being
        read) share this buffer, whatever their shapes. The first call in a frame makes the buffer,
        and inserts the operation that writes it before all other operations of the frame."""
        known = self.frames[-1].zeros
        key = (aval.size, aval.dtype)
        if key not in known:
            known[key] = Buffer(nbytes(aval), self.at, what="zeros")
            self.frames[-1].operations.insert(0, Operation((), (known[key],)))
            self.written += self.times * known[key].bytes
        return known[key]

    def made(
        self,
        eqn: JaxprEqn,
        k: int,
        reads: Sequence[Value],
        *,
        over: Sequence[Value] = (),
        part: int | None = None,
    ) -> Value:
        """Returns the k-th result of an equation, held in a new `Buffer`. The equation reads the
        values `reads`.

        The new buffer may be written over the buffer of one of the values `over`, if no later
        operation reads that value (`liveness.peak` decides). If `part` is given, the operation
        reads and writes only `part` bytes, as in an update of a slice.
        """
        aval = jaxprs.types(eqn.outvars)[k]
        buffer = Buffer(nbytes(aval), self.at or eqn)
        bases: dict[Buffer, int] = {}
        for value in reads:
            for base, size in value.root.reads.items():
                # Operands may be parts of one buffer, which is read once at most.
                bases[base] = min(bases.get(base, 0) + size, base.bytes)
        pairs = tuple(
            (buffer, value.root.buffer) for value in over if value.root.buffer is not None
        )
        read, written = (sum(bases.values()), buffer.bytes) if part is None else (part, part)
        self.emit(Operation(tuple(bases), (buffer,), pairs), read=read, written=written)
        return Value(aval, {buffer: buffer.bytes}, buffer=buffer, eqn=eqn)

    def _fused(self, eqn: JaxprEqn, operands: Sequence[Value]) -> Value:
        """Returns the first result of an equation as a value without a buffer (fused). An operation
        that uses the value reads the buffers of the equation's operands instead. If the equation is
        a slice, that operation reads from each buffer at most as many bytes as the slice has."""
        value = Value(jaxprs.types(eqn.outvars)[0], {}, eqn=eqn)
        is_slice = eqn.primitive.name in primitives.PARTS
        reads: dict[Buffer, int] = {}
        near: set[Buffer] = set()
        for operand in operands:
            for base, size in operand.root.reads.items():
                # Operands from one buffer mostly need the same elements, which a fused loop reads
                # once, so the largest of their reads counts.
                reads[base] = max(reads.get(base, 0), min(size, value.bytes) if is_slice else size)
            # An elementwise operation reads an operand of its size element by element. A view, such
            # as a broadcast or a `rev`, may move elements.
            if eqn.primitive.name not in primitives.VIEWS and operand.bytes == value.bytes:
                near |= operand.root.near
        value.reads, value.near = reads, frozenset(near)
        return value

    # Reading a program

    def run(
        self, jaxpr: Jaxpr, arguments: Sequence[Value], used: Sequence[bool], readers: Sequence[int]
    ) -> list[Value]:
        """Returns the results of a jaxpr, and adds the operations of the jaxpr to the innermost
        frame (the program, the branch or the loop's body that is being read).

        Equations that no needed result depends on are left out.

        Args:
            jaxpr: the program to read.
            arguments: the values of its operands.
            used: whether each result is needed.
            readers: for each result, how many operations outside the jaxpr read it.
        """
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= {var: self._constant(var) for var in jaxpr.constvars}
        # For each equation, whether each of its results is needed; None if the equation is not.
        _, needed_results = self.needed(jaxpr, used)
        # How many operations read each variable. Two kinds of equations are not counted: those that
        # are not needed (None), and those without results (the empty tuple), such as a print, which
        # puts its operands into buffers anyway.
        uses = Counter(
            atom
            for eqn, needed in zip(jaxpr.eqns, needed_results, strict=True)
            if needed
            for atom in _variables(eqn)
        )
        for atom, outside in zip(jaxpr.outvars, readers, strict=True):
            if not jaxprs.is_literal(atom):
                uses[atom] += outside
        for eqn, needed in zip(jaxpr.eqns, needed_results, strict=True):
            if needed is not None:
                operands = [self._read(atom, known) for atom in eqn.invars]
                # `_once` adds the equation's operation, unless an equal equation was added before.
                results = self._once(eqn, operands, needed, [uses[var] for var in eqn.outvars])
                known |= zip(eqn.outvars, results, strict=True)
        # A result that nobody needs is an empty value.
        return [
            self._read(atom, known) if is_used else self._read(None, known)
            for atom, is_used in zip(jaxpr.outvars, used, strict=True)
        ]

    def _constant(self, var: Any) -> Value:
        """Returns a constant of the program, in a buffer that is no temporary."""
        buffer = Buffer(nbytes(var.aval), what="constant", fixed=True)
        return Value(var.aval, {buffer: buffer.bytes}, buffer=buffer)

    def _read(self, atom: Any, known: Mapping[Any, Value]) -> Value:
        """Returns the value of a variable or a literal. Equal literals share one value, so that
        `_once` finds equal equations: it compares operands by identity.

        If `atom` is None, the value is empty: its `reads` has no buffer, and it has no bytes. A
        variable that was not computed, because no result needs it, gives this empty value too.
        """
        if atom is not None and not jaxprs.is_literal(atom):
            return known.get(atom) or self._read(None, known)
        # With `jax_use_simplified_jaxpr_constants`, JAX writes whole arrays as literals. The text
        # of an array may leave out numbers.
        is_array = atom is not None and bool(atom.aval.shape)
        aval, number = getattr(atom, "aval", None), getattr(atom, "val", None)
        key = str(aval), id(number) if is_array else str(number)
        if key not in self.literals:
            self.literals[key] = self._constant(atom) if is_array else Value(aval, {})
        return self.literals[key]

    def _once(
        self, eqn: JaxprEqn, operands: list[Value], used: tuple[bool, ...], readers: Sequence[int]
    ) -> list[Value]:
        """Returns the results of an equation. If the innermost frame (see `run`) already has an
        equal equation with the same operands, returns the results of that equation, and adds no
        operation: XLA computes equal equations only once.

        Three kinds of equations are added each time, even if they are equal: equations with an
        inner program or an effect, optimization barriers, and collectives of this library.
        """
        # A collective of this library (`linear_p`) gets its inner program only in `_linear`.
        plain = not jaxprs.inner(eqn) and eqn.primitive.name != types.linear_p.name
        if not plain or eqn.primitive.name == "optimization_barrier" or eqn.effects:
            return self._equation(eqn, operands, used, readers)
        # A reshape has the same root as its operand, so the key has each operand's type too.
        roots = tuple((id(value.root), str(value.aval)) for value in operands)
        key = (
            eqn.primitive.name,
            roots,
            str(sorted((name, str(value)) for name, value in eqn.params.items())),
        )
        known = self.frames[-1].known
        if key not in known:
            # The operands are kept so that no other value gets the id of one of them.
            known[key] = (
                [value.root for value in operands],
                self._equation(eqn, operands, used, readers),
            )
        return known[key][1]

    def _equation(
        self, eqn: JaxprEqn, operands: list[Value], used: tuple[bool, ...], readers: Sequence[int]
    ) -> list[Value]:
        """Returns the results of an equation. Control flow and the library's collectives have
        methods of their own. For a call, such as a `jit`, the operations of the inner jaxpr are
        added to those around the call. If the called function is JAX's own, such as `jnp.where`,
        these operations get the source line of the call. Every other equation is a plain
        operation."""
        name = eqn.primitive.name
        control = {
            "shard_map": self._shard_map,
            "cond": self._cond,
            "scan": self._scan,
            "while": self._while,
            "custom_linear_solve": self._solve,
        }
        if name in control:
            return control[name](eqn, operands, used, readers)
        if name == types.linear_p.name:
            return self._linear(eqn, operands, used, readers)
        if (inner := jaxprs.called(eqn)) is not None:
            # The backward pass of `jax.checkpoint`, which computes values again. Its barrier keeps
            # XLA from using the values of the forward pass, so its operands become new values.
            if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
                operands = [self._apart(value) for value in operands]
            return self._inlined(
                eqn, inner, operands, used, readers, hidden=source_lines.is_jax_function(inner)
            )
        results = self._plain(eqn, operands, readers)
        if self.mesh is None and name not in primitives.SAME:
            roots = [value.root for value in (*operands, *results) if value.root.reads]
            self.outside.append((self.line(eqn), roots))
        return results

    def _inlined(self, eqn, inner, operands, used, readers, *, hidden: bool) -> list[Value]:
        """Returns the results of a call's inner jaxpr, whose operations are added to those around
        the call. If `hidden`, the inner equations get the line of the call, since their own lines
        are not in the caller's code."""
        outside, self.at = self.at, self.at or (eqn if hidden else None)
        results = self.run(inner, operands, used, readers)
        self.at = outside
        return results

    def _linear(self, eqn, operands, used, readers) -> list[Value]:
        """Returns the results of a collective of this library. The first call for an equation
        traces the collective's program, and later calls use this program again. The source lines of
        that program are in this library, so its equations get the line of the caller."""
        # The equation itself is kept too, so that no other equation gets its id.
        if id(eqn) not in self.opened:
            self.opened[id(eqn)] = (eqn, types.linear_jaxpr(eqn, self.mesh, check_vma=self.checked))
        _, program = self.opened[id(eqn)]
        return self._inlined(eqn, program, operands, used, readers, hidden=True)

    def _apart(self, value: Value) -> Value:
        """Returns the result of an optimization barrier for its operand `value`: a new value in the
        buffer of `value`. A `value` without a buffer first gets one. The new value is its own
        `root`, and the method `_once` compares operands by the ids of their roots. So `_once` never
        merges an equation that reads the new value with an equation that reads the old value. A
        value that is made only of literals is returned unchanged."""
        # `hold` gives the buffer to the root, and updates only the root's `reads`.
        buffer = self.hold(value) if value.root.reads else None
        return (
            value
            if buffer is None
            else Value(value.aval, {buffer: buffer.bytes}, buffer=buffer, eqn=value.eqn)
        )

    def _plain(self, eqn: JaxprEqn, operands: list[Value], readers: Sequence[int]) -> list[Value]:
        """Returns the results of an operation without an inner program, and counts its arithmetic
        and messages.

        The result of an elementwise operation, or of an operation that makes a view, gets no buffer
        (it is fused). The operations that return the index of a device (`axis_index`) or of a
        platform (`platform_index`) read no memory. An optimization barrier (`_apart`) and an
        operation that rewrites a part of an array (`_update`) have methods of their own. All other
        operations first put their operands into buffers, and then their results. Only the operands
        of a reduction may stay without buffers: the reduction computes its operands as it reads
        them.
        """
        name = eqn.primitive.name
        if name in primitives.FUSED or arithmetic.only_multiplies(eqn):
            return [self._fused_or_held(eqn, operands, readers[0])]
        if name in ("platform_index", "axis_index"):
            return [self._index(eqn)]
        # `lax.empty`, with which a ring's all-gather begins. A compiler that shares the buffers of
        # zeros (`habits.zeros`) makes zeros of it.
        if name == "empty" and self.habits.zeros:
            return [self._zeros(eqn)]
        if name == "optimization_barrier":
            return [self._apart(value) for value in operands]
        if name in primitives.UPDATES:
            return [self._update(eqn, operands)]
        # Reductions, and products of vectors, which compilers run as a multiplication and a sum.
        fuses_operands = name in primitives.READERS or (
            name in arithmetic.PRODUCTS and not arithmetic.is_product(eqn)
        )
        for value in () if fuses_operands else operands:
            self.hold(value)
        results = [self.made(eqn, k, operands) for k in range(len(eqn.outvars))]
        if arithmetic.is_product(eqn):
            count = self.times * arithmetic.operations(eqn)
            self.products[str(jaxprs.types(eqn.invars)[0].dtype)] += count
            self.lines[self.line(eqn)] += count
        elif primitives.is_unread(eqn):
            self.uncounted.append(self.line(eqn))
        if name in primitives.COLLECTIVES:
            self._check_groups(eqn)
            # Axes of one device, along which nothing is sent, are left out.
            along = primitives.axes(eqn, self.sizes)
            # A message has the bytes of the result, as in compiled programs; `plan.seconds`
            # computes the bytes of the operand from them.
            for value in results if along else ():
                if not value.bytes:  # such as half of one number; XLA drops an empty message
                    continue
                self.messages[
                    Message(primitives.COLLECTIVES[name], along, value.bytes, self.line(eqn))
                ] += self.times
        return results

    def _check_groups(self, eqn: JaxprEqn) -> None:
        """Raises `ValueError` if a collective has `axis_index_groups`: a `Message` counts all
        devices of its axes."""
        if eqn.params.get("axis_index_groups") is not None:
            raise ValueError(
                f"plan.trace has no rule for `{eqn.primitive.name}` with axis_index_groups "
                f"({self.line(eqn)}). Give the groups an axis of their own."
            )

    def _fused_or_held(self, eqn: JaxprEqn, operands: list[Value], readers: int) -> Value:
        """Returns the result of an elementwise operation, or of an operation that makes a view,
        such as a reshape. The `source` of a reshape's result is the `root` of the reshape's
        operand: the value before all reshapes. A broadcast of 0 is an array of zeros (`is_zeros`).
        The result of an expensive operation (`jaxprs.DEAR`) gets a buffer if several operations
        read the result. A result computed without reading memory, such as from literals, gets no
        buffer."""
        value = self._fused(eqn, operands)
        value.is_zeros = eqn.primitive.name == "broadcast_in_dim" and (
            operands[0].root.is_zeros or _is_literal_zero(eqn.invars[0])
        )
        if eqn.primitive.name in primitives.SAME:
            value.source = operands[0].root
        elif eqn.primitive.name in jaxprs.DEAR and readers > 1 and value.reads:
            self.hold(value)
        return value

    @staticmethod
    def _zeros(eqn: JaxprEqn) -> Value:
        """Returns the result of `lax.empty`, for a backend that fills such arrays with zeros."""
        value = Value(jaxprs.types(eqn.outvars)[0], {}, eqn=eqn)
        value.is_zeros = True
        return value

    def _index(self, eqn: JaxprEqn) -> Value:
        """Returns the result of `axis_index`, a device's index on a mesh axis, or of
        `platform_index`, by which a `cond` chooses the branch of a platform. For `platform_index`,
        the `branch` of the result is the number of the branch for `self.platform`. Neither of the
        two reads memory."""
        value = Value(jaxprs.types(eqn.outvars)[0], {})
        if eqn.primitive.name == "platform_index":
            platforms = eqn.params["platforms"]  # None stands for all others
            fits = [names is None or self.platform in names for names in platforms]
            if not any(fits):
                named = ", ".join(repr(name) for names in platforms for name in names)
                raise ValueError(
                    f"plan.trace: the lax.platform_dependent at {self.line(eqn)} has branches "
                    f"for {named} and no default, and the platform is {self.platform!r}. Pass "
                    "platform= with one of these names."
                )
            value.branch = fits.index(True)
        return value

    def _update(self, eqn: JaxprEqn, operands: list[Value]) -> Value:
        """Returns the first operand with a part of it rewritten. The operand is rewritten in place
        if no later operation reads its old numbers."""
        if eqn.primitive.name != "dynamic_update_slice":
            # An update of a slice may begin in the buffer that all zeros of its size share. A
            # scatter of zeros begins with an array of its own.
            operands[0].root.is_zeros = False
        self.hold(operands[0])
        # The bytes of the update: only these are read and written. The operands are (array, update,
        # ...) in a slice's update, and (array, indices, updates) in a scatter.
        part = nbytes(
            jaxprs.types(eqn.invars)[1 if eqn.primitive.name == "dynamic_update_slice" else 2]
        )
        return self.made(eqn, 0, operands, over=operands[:1], part=part)

    # Control flow

    def _shard_map(self, eqn, operands, used, readers) -> list[Value]:
        """Returns the results of a `shard_map`. Inside it, an argument has the bytes of its block.
        The argument's buffer has this size from then on, since the memory of one device is counted.
        If several arguments are the same array, its largest block counts."""
        outside = self.mesh, self.sizes, self.checked
        self.mesh, self.checked = eqn.params["mesh"], eqn.params["check_vma"]
        self.sizes = dict(self.mesh.shape)
        (body,) = jaxprs.inner(eqn)
        arguments = []
        for value, var in zip(operands, body.invars, strict=True):
            root, buffer = value.root, value.root.buffer
            if nbytes(var.aval) < root.bytes:
                self.split.add(root)
            # A fused argument reads at most the buffers' new sizes.
            reads = {base: min(size, base.bytes) for base, size in root.reads.items()}
            if buffer is not None:
                block = nbytes(var.aval)
                buffer.bytes = self.blocks[buffer] = max(block, self.blocks.get(buffer, 0))
                reads = {buffer: block}
            inside = Value(var.aval, reads, buffer=buffer)
            inside.eqn = root.eqn
            arguments.append(inside)
        results = self.run(body, arguments, used, readers)
        self.mesh, self.sizes, self.checked = outside
        self.split |= {
            value.root
            for value, aval in zip(results, jaxprs.types(eqn.outvars), strict=True)
            if value.root.bytes < nbytes(aval)
        }
        return results

    def _cond(self, eqn, operands, used, readers) -> list[Value]:
        """Returns the results of a conditional. Only one branch counts: the branch whose matmuls
        need the most floating-point operations. Among branches with equally many such operations,
        the branch with the most messages counts, and then the branch with the most memory.

        Each branch is read on its own, and its counts start from those before the conditional. If
        the platform chooses the branch, only this branch is read, as if there were no conditional.
        """
        index, *operands = operands
        branches = [jaxprs.opened(branch) for branch in eqn.params["branches"]]
        # The index is the result of `platform_index`. The branch's equations keep their own lines,
        # or get the line of the outer call `self.at`, if there is such a call.
        if index.branch is not None:
            return self._inlined(eqn, branches[index.branch], operands, used, readers, hidden=False)
        for value in operands:
            self.hold(value)
        # `largest` becomes the key, the counts and the peak of the largest branch so far.
        before, largest = self._copied_counts(), None
        for branch in branches:
            self._restore_counts(before)
            self.frames.append(Frame())
            for value in self.run(branch, operands, used, readers):
                self.hold(value)
            # No buffer of the branch lives to its end, `()`: the results live on in the
            # conditional's own buffers, `results` below.
            peak = liveness.peak(self.frames.pop().operations, ())
            key = (self.products.total(), self.messages.total(), peak.bytes)
            if largest is None or key > largest[0]:
                largest = key, self._copied_counts(), peak
        assert largest is not None
        _, counts, peak = largest
        self._restore_counts(counts)
        results = [Buffer(nbytes(aval), self.at or eqn) for aval in jaxprs.types(eqn.outvars)]
        reads = tuple({base for value in (index, *operands) for base in value.root.reads})
        # The conditional is one operation, with the bytes of the branch's peak as `inner`, and the
        # buffers of that peak as `held`.
        self.emit(Operation(reads, tuple(results), (), inner=peak.bytes, held=peak.held))
        return [
            Value(aval, {buffer: buffer.bytes}, buffer=buffer, eqn=eqn)
            for aval, buffer in zip(jaxprs.types(eqn.outvars), results, strict=True)
        ]

    def _copied_counts(self):
        """Returns copies of all counts so far: the operations of matmuls by dtype and by line, the
        bytes read and written, the messages, the lines of loops whose number of trips is not known,
        and the lines of kernels whose operations are not known. `_cond` gives these copies to
        `_restore_counts`, so that each branch starts from the same counts."""
        return (
            Counter(self.products),
            Counter(self.lines),
            self.read,
            self.written,
            Counter(self.messages),
            list(self.unbounded),
            list(self.uncounted),
        )

    def _restore_counts(self, counts) -> None:
        """Sets all counts back to `counts`, a result of `_copied_counts`. The counters and the
        lists in `counts` are copied, so that `counts` can be used again."""
        products, lines, self.read, self.written, messages, unbounded, uncounted = counts
        self.unbounded, self.uncounted = list(unbounded), list(uncounted)
        self.products, self.lines, self.messages = (
            Counter(products),
            Counter(lines),
            Counter(messages),
        )

    def _scan(self, eqn, operands, used, readers) -> list[Value]:
        """Returns the results of a scan: carries, then stacked arrays [length, ...]. The operands
        of a scan are constants, carries and stacked arrays.

        A scan of one iteration is no loop: the operations of its body are added to those around it.
        """
        body, length = jaxprs.inner(eqn)[0], eqn.params["length"]
        constants, carries = jaxprs.scan_parts(eqn)  # their numbers
        split = constants + carries  # the index of the first stacked operand
        if length == 1:
            pairs = zip(operands[split:], body.invars[split:], strict=True)
            arguments = operands[:split] + [self._reshaped(*pair) for pair in pairs]
            results = self.run(body, arguments, used, readers)
            stacked = zip(results[carries:], eqn.outvars[carries:], strict=True)
            return results[:carries] + [self._reshaped(*pair) for pair in stacked]
        # Whether each result of the body is needed, outside or by the next trip, and whether these
        # results need each operand of the body.
        needed_results = self.needed.of_scan(eqn, used)
        wanted = self.needed(body, needed_results)[0]
        sliced = [
            self._slice(*stack)
            for stack in zip(operands[split:], body.invars[split:], wanted[split:], strict=True)
        ]
        return self._loop(
            eqn,
            body,
            (operands[:constants], operands[constants:split], sliced),
            needed_results,
            length,
        )

    def _while(self, eqn, operands, used, readers) -> list[Value]:
        """Returns the results of a while loop. The number of iterations of the loop is unknown, so
        one iteration is counted, and then the condition once.

        The operands of the loop are the condition's constants, the body's constants, and the
        carries.
        """
        first_of_body, first_carry = (
            eqn.params["cond_nconsts"],
            eqn.params["cond_nconsts"] + eqn.params["body_nconsts"],
        )
        self.unbounded.append(self.line(eqn))
        body = jaxprs.opened(eqn.params["body_jaxpr"])
        # A while loop has no stacked arrays. Its condition may read any carry, so all are needed.
        results = self._loop(
            eqn,
            body,
            (operands[first_of_body:first_carry], operands[first_carry:], []),
            [True] * len(eqn.outvars),
            1,  # trip
        )
        condition = jaxprs.opened(eqn.params["cond_jaxpr"])
        self.run(condition, [*operands[:first_of_body], *results], [True], [1])
        return results

    def _solve(self, eqn, operands, used, readers) -> list[Value]:
        """Returns the results of a `custom_linear_solve`. The operations of the program that solves
        it are added to those around it."""
        body, taken = arithmetic.solve(eqn, operands)
        return self._inlined(
            eqn, body, taken, used, readers, hidden=source_lines.is_jax_function(body)
        )

    def _loop(
        self,
        eqn,
        body: Jaxpr,
        parts: Sequence[list[Value]],
        needed_results: Sequence[bool],
        trips: int,
    ) -> list[Value]:
        """Returns the results of a loop of `trips` iterations: carries, then stacked arrays.

        The body is read once, on its own. The loop becomes one operation among those around it,
        with the peak memory of the body as `inner`. A carry has one buffer: each iteration rewrites
        the buffer in place, and at the end the buffer has the loop's result. The buffers of the
        stacked results exist before the loop begins.

        Args:
            eqn: the loop.
            body: its jaxpr.
            parts: three lists of values: the constants, the starts of the carries, and the slices
                of the stacked operands.
            needed_results: whether each result of the body is needed. The results are the carries,
                then the slices of the stacked results.
            trips: the number of iterations, or 1 for a while loop. All operations, bytes and
                messages of the body are counted this many times.
        """
        constants, starts, sliced = parts
        # Whether each operand of the body is needed: constants first, then carries, then slices.
        wanted = self.needed(body, needed_results)[0]
        for value, is_wanted in zip(constants, wanted, strict=False):  # only the constants
            if is_wanted and value.root.reads:
                self.hold(value)
        # A constant that is made only of literals needs no buffer: the loop computes it.
        constants = self._of_the_body(constants)
        # `_carries` finds the variable of each carry behind those of the constants.
        carried = [
            self._start(eqn, value, var.aval, is_needed)
            for value, var, is_needed in self._carries(body, constants, starts, needed_results)
        ]
        stacked = [
            Buffer(nbytes(var.aval) if is_needed else 0, self.at or eqn, carry=True)
            for var, is_needed in zip(
                eqn.outvars[len(starts) :], needed_results[len(starts) :], strict=True
            )
        ]
        # XLA begins a stacked result as zeros, and each trip writes a part of it.
        begun = [
            (buffer, self.shared_zeros(var.aval))
            for buffer, var in zip(stacked, eqn.outvars[len(starts) :], strict=True)
            if buffer.bytes and self.habits.zeros
        ]
        # These are noted before the body is read, which may give a value a buffer and so change its
        # `reads`.
        reads = {base for value in (*constants, *carried, *sliced) for base in value.root.reads}
        self.frames.append(Frame())
        times_outside = self.times
        self.times *= trips  # 0 for a loop over an empty array
        # Each result has one reader, `[1] * ...`: the next trip, or the stacked array.
        results = self.run(
            body, [*constants, *carried, *sliced], needed_results, [1] * len(needed_results)
        )
        ends = [
            self.hold(value) if is_needed else None
            for value, is_needed in zip(results, needed_results[: len(starts)], strict=False)
        ]
        # A trip writes its slice of each stacked result into the buffer from before the loop.
        for value, is_needed in list(zip(results, needed_results, strict=True))[len(starts) :]:
            if is_needed:
                bases = value.root.reads
                self.emit(Operation(tuple(bases)), read=sum(bases.values()), written=value.bytes)
        self.times = times_outside
        operations = self.frames.pop().operations
        # For each carry, its buffer at the end of a trip and at the beginning (`given`). The
        # buffers at the end are the results of a trip. The buffers at the beginning belong to the
        # frame around the loop, and the body may write over them.
        pairs = [
            (end, start.root.buffer)
            for end, start in zip(ends, carried, strict=True)
            if end and start.root.buffer
        ]
        given = [start for _, start in pairs]
        peak = liveness.peak(operations, [end for end, _ in pairs], given, pairs)
        # The compiler puts several layers (`unroll`) into one body; the jaxpr that is read has one.
        # Some arrays are in memory for all these layers at once, so the other layers' are added:
        # copies of slices and, with `habits.together`, gathered weights and recomputed values.
        slice_copies = self._slices_of_further_layers(
            eqn, sliced, wanted[len(wanted) - len(sliced) :]
        )
        innermost = not any(operation.inner for operation in operations)
        # `peak` also counts the bytes that an innermost loop has in on-chip memory. They are
        # subtracted: `habits.near` bytes for a loop of the program itself (one frame), half of that
        # for a loop inside one other loop (two frames), and so on, as in compiled steps.
        on_chip = self.habits.near // len(self.frames) if innermost else 0
        # `_of_further_layers` takes only arrays that are computed from no carry (`given`).
        waiting = self._of_further_layers(eqn, operations, given) if self.habits.together else []
        inner = max(0, peak.bytes - on_chip) + sum(size for size, _ in (*slice_copies, *waiting))
        self.emit(
            Operation(
                (*reads, *(zeros for _, zeros in begun)),
                tuple(stacked),
                tuple(begun),
                inner,
                (*peak.held, *slice_copies, *waiting),
            )
        )
        return carried + [
            Value(var.aval, {buffer: buffer.bytes}, buffer=buffer, eqn=eqn)
            for var, buffer in zip(eqn.outvars[len(starts) :], stacked, strict=True)
        ]

    def _of_the_body(self, constants: Sequence[Value]) -> list[Value]:
        """Returns the constants of a loop, as its body reads them. For an array that is made only
        of literals the body gets a value of its own: if the body gives this value a buffer, the
        buffer is in the body's frame, and operations outside the loop cannot read it. Arrays that
        never get a buffer (`hold`) stay as they are."""
        own: dict[Value, Value] = {}  # by the root: operands of one root keep one root
        for root in (value.root for value in constants):
            if not root.reads and root.bytes > 64 and root not in own:
                own[root] = Value(root.aval, {}, eqn=root.eqn)
                own[root].is_zeros = root.is_zeros
        return [
            self._reshaped(own[value.root], value) if value.root in own else value
            for value in constants
        ]

    def _slices_of_further_layers(self, eqn, sliced, wanted) -> list[tuple[int, Buffer]]:
        """Returns the copies that a backend makes of the slices of stacked arrays, in a backward
        loop whose body has several layers. The result has a pair for each slice that the body
        needs: the bytes of all copies of the slice together, and a buffer. The buffer only tells,
        in the list of temporaries, where the copies come from, so all copies share one buffer.

        The scan's `unroll` is the number of layers in the loop's body. For each of these layers
        except the first, the backend makes `habits.slices` copies of a slice. A scan without
        `reverse=True` is taken as a forward loop, which has no such copies.

        Args:
            eqn: the loop.
            sliced: the loop's slices of the stacked operands.
            wanted: for each slice, whether the body needs the slice.
        """
        if not eqn.params.get("reverse", False):
            return []
        count = self.habits.slices * (eqn.params.get("unroll", 1) - 1)
        return [
            (count * value.bytes, Buffer(value.bytes, self.at or eqn, what="slice of a stack"))
            for value, needed in zip(sliced, wanted, strict=True)
            if needed and count
        ]

    @staticmethod
    def _of_further_layers(eqn, operations, carried) -> list[tuple[int, Buffer]]:
        """Returns the gathered weights and the recomputed values that XLA computes early in an
        unrolled backward loop, whose body has several layers. XLA computes these arrays for all
        layers of the body before it runs the first layer's backward pass. The arrays depend on no
        carry, only on the loop's constants and on slices of its stacked arrays.

        The result has a pair for each array: the array's bytes, summed over all layers of the body
        but the first, and its buffer. The first layer is left out, since `liveness.peak` has
        counted its bytes. `operations` are those of one layer, and `carried` are the buffers of the
        carries.
        """
        count = eqn.params.get("unroll", 1) - 1
        if not eqn.params.get("reverse", False) or not count:
            return []
        # `late` are the buffers that depend on a carry. `early` has the other buffers, and whether
        # an operation that depends on a carry reads them: only these are kept for that operation.
        late, early = set(carried), {}
        for operation in operations:
            if late.isdisjoint(operation.reads):
                early |= dict.fromkeys(operation.writes, False)
            else:
                late |= set(operation.writes)
                early |= dict.fromkeys((b for b in operation.reads if b in early), True)
        return [(count * buffer.bytes, buffer) for buffer, is_read in early.items() if is_read]

    @staticmethod
    def _carries(body, constants, starts, needed_results):
        """Yields for each carry its start, its variable in the body, and whether the carry is
        needed."""
        # The operands and the results of the body go on after the carries, so `strict` is False.
        return zip(starts, body.invars[len(constants) :], needed_results, strict=False)

    def _start(self, eqn, value: Value, aval: Any, is_needed: bool) -> Value:
        """Returns a loop's carry, which starts as `value`. If the carry is not needed, returns a
        value without a buffer and without bytes. The carry is written over `value` if no later
        operation reads `value`."""
        if not is_needed:
            return Value(aval, {})
        root = value.root
        # For zeros, `hold` sets `root.buffer` to the buffer that all zeros share, and `root.reads`
        # to this buffer alone. Any other fused start is written straight into the carry's buffer.
        if root.is_zeros and self.habits.zeros:
            self.hold(value)
        buffer = Buffer(nbytes(aval), self.at or eqn, carry=True)
        near = [root.buffer] if root.buffer else root.near  # those that it may overwrite
        over = tuple((buffer, under) for under in near if under.bytes == buffer.bytes)
        self.emit(
            Operation(tuple(root.reads), (buffer,), over),  # reads, writes, over
            # A held start is in memory already, and a fused start is written here. Not counted: the
            # bytes that a fused start reads, and the copy of a held start that a later operation
            # still reads.
            written=0 if root.buffer else buffer.bytes,
        )
        return Value(aval, {buffer: buffer.bytes}, buffer=buffer, eqn=eqn)

    def _slice(self, value: Value, var: Any, wanted: bool) -> Value:
        """Returns the slice of a scan's stacked operand `value` that one iteration takes as the
        body's variable `var`.

        If the body needs the slice (`wanted`), the whole stacked operand gets a buffer before the
        loop. The slice itself has no buffer. An operation that uses the slice is counted as reading
        the operand's buffer, and as reading at most as many bytes as the slice has.
        """
        if wanted:
            self.hold(value)  # from here on, `value.root.reads` has only the operand's buffer
        inside = Value(var.aval, {})
        inside.reads = {base: min(size, inside.bytes) for base, size in value.root.reads.items()}
        inside.eqn = value.root.eqn  # the equation that made the stacked operand
        return inside

    @staticmethod
    def _reshaped(value: Value, var: Any) -> Value:
        """Returns a view of `value`: the same numbers with the type of `var`."""
        inside = Value(var.aval, value.root.reads, eqn=value.root.eqn)
        inside.source = value.root
        return inside


def _variables(eqn: JaxprEqn) -> list[Any]:
    """Returns the variables that an equation reads. A variable that is two operands of one
    operation is in the list once. It is in the list twice if the equation has an inner program,
    since different operations of this program may read the two operands."""
    variables = [atom for atom in eqn.invars if not jaxprs.is_literal(atom)]
    return variables if jaxprs.inner(eqn) else list(dict.fromkeys(variables))


def _is_literal_zero(atom: Any) -> bool:
    """Returns whether an operand is the number 0, written into the program."""
    return jaxprs.is_literal(atom) and not np.any(atom.val)
