"""Reads the memory, messages, arithmetic and time of any step from the traced program of the step.
Nothing is compiled, and the devices need not exist.

    mesh = AbstractMesh((256,), ("data",), axis_types=(AxisType.Auto,))
    print(plan.trace(step, (state_shapes, batch_shape), mesh, hardware=hardware.TPU_V5E))

The program is read once. The counted operations of matmuls are the same as in the compiled program,
and so are the bytes of messages. The module `liveness` computes the memory. It assumes that the
compiler fuses elementwise operations, and writes a result over an operand that is read for the last
time. A `Value` is an array of the program. The `root` of a value is the value before reshapes, and
`root.reads` has the buffers from which the root is computed. A `Buffer` is the memory of a `Value`.
A `Message` stands for all calls of a collective that agree in kind, axes, result bytes and source
line. A `Reading` reads the program: `emit` adds an operation, `hold` gives a value its buffer, and
the fields sum up the operations and messages so far.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh

from parallax import jaxprs, source_lines
from parallax.hardware import Hardware
from parallax.plan import compiler_copies, liveness
from parallax.plan.jaxpr_cost import Message, Reading, Value
from parallax.plan.liveness import Buffer, Held, Operation
from parallax.plan.primitives import nbytes
from parallax.plan.seconds import Seconds, seconds
from parallax.plan.units import quantity


class Trace(NamedTuple):
    """The memory, messages and work of one device in one step. `str(trace)` is a report.

    Attributes:
        mesh: the size of each axis.
        operations: floating-point operations of matmuls and convolutions, by the type of their
            operands.
        lines: the same operations, by the line of the caller's source.
        read: bytes that operations read from memory, after fusion.
        written: bytes that operations write to memory.
        messages: the number of calls of each kind of collective.
        arguments: bytes of the step's arguments.
        donated: bytes of those arguments that the step may write over.
        results: bytes of the results that are not written over a donated argument.
        temporaries: bytes of all other arrays at the moment when these arrays have the most bytes.
        at_peak: the arrays of `temporaries` at this moment, the largest first.
        unbounded: the lines of loops whose number of iterations is not known; one iteration of each
            is counted.
        uncounted: the lines of kernels that do not state their operations, such as a `pallas_call`
            without `cost_estimate`, and of other operations of which only the operands and results
            are counted.
        outside: the lines outside of `mesh.spmd` that read or make an array of which `mesh.spmd`
            gives each device a block. There the whole array and all its operations are counted, for
            each device. Move these lines into the function that `mesh.spmd` maps.
        seconds: the time of a step; None if no `hardware` was given.
    """

    mesh: dict[str, int]
    operations: dict[str, int]
    lines: dict[str, int]
    read: int
    written: int
    messages: dict[Message, int]
    arguments: int
    donated: int
    results: int
    temporaries: int
    at_peak: list[Held]
    unbounded: list[str]
    uncounted: list[str]
    outside: list[str]
    seconds: Seconds | None = None

    @property
    def peak(self) -> int:
        """The most bytes of memory that a device uses at any moment of a step. Arrays that the step
        reads by closure, and does not take as arguments, are not counted."""
        return self.arguments + self.results + self.temporaries

    @property
    def sent(self) -> dict[tuple[str, ...], int]:
        """Bytes of the collectives' results, by axes, counted as in `compiled.certificate`. The
        bytes that really leave a device depend on the algorithm."""
        found: Counter[tuple[str, ...]] = Counter()
        for message, times in self.messages.items():
            found[message.axes] += times * message.bytes
        return dict(found)

    def __str__(self) -> str:
        return report(self)


def trace(
    step: Callable[..., Any],
    shapes: Sequence[Any],
    mesh: Mesh | AbstractMesh,
    *,
    hardware: Hardware | None = None,
    platform: str = "",
) -> Trace:
    """Returns the trace of `step(*shapes)`: its memory, messages and operations on each device of
    `mesh`. The step is neither compiled nor run.

    Args:
        step: the result of `mesh.spmd`, or a function that calls it, jitted or not. Arguments that
            `jax.jit` donates count as donated.
        shapes: the arguments of the step; arrays may be `jax.ShapeDtypeStruct`s. For an argument
            that `mesh.spmd` splits, only the bytes of one device's block are counted.
        mesh: the mesh of the step. Its devices need not exist.
        hardware: the kind of device, such as `hardware.TPU_V5E`. It decides the time of the step,
            and which copies XLA would make.
        platform: the platform ("cpu", "tpu" or "cuda") whose branch of `lax.platform_dependent`
            counts. By default this is the platform of `hardware`. Without hardware, the default
            branch counts.

    Raises:
        ValueError: the step is not mapped over `mesh`; or it has a collective with
            `axis_index_groups`, or a `lax.platform_dependent` without a branch for `platform`.
    """
    plain = jax.tree.map(  # without shardings, which may have devices of another mesh
        _unplaced, tuple(shapes), is_leaf=lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    )
    closed = eqx.filter_make_jaxpr(step)(*plain)[0]
    jaxpr = jaxprs.opened(closed)
    _check(jaxpr, dict(mesh.shape))
    platform = platform or (hardware.platform if hardware is not None else "other")
    # The copies that the platform's compiler makes.
    habits = compiler_copies.backend(platform, hardware.name if hardware is not None else "")
    reading = Reading(platform, habits)
    arguments = [_argument(var) for var in jaxpr.invars]
    # All results are needed, and each has one reader: the caller.
    results = reading.run(jaxpr, arguments, [True] * len(jaxpr.outvars), [1] * len(jaxpr.outvars))
    donated = _donated(jaxpr)
    # Whether each argument is read; `jax.jit` drops those that are not.
    is_read = reading.needed(jaxpr, [True] * len(jaxpr.outvars))[0]
    kept = [
        (var, value.buffer)
        for var, value, needed in zip(jaxpr.invars, arguments, is_read, strict=True)
        if needed
    ]
    buffer_of = {var: buffer for var, buffer in kept if buffer is not None}
    # Results with the donated buffers that they are written over, and the other results.
    pairs, left = _placed(results, [buffer for var, buffer in buffer_of.items() if var in donated])
    # Some backends copy a donated argument before a result overwrites it, if another result reads
    # it (`root.reads`). The copies live from here until all results are written: the first `emit`
    # makes them, and the second, after the results, reads them.
    copied = compiler_copies.of_arguments(
        [(under, set(value.root.reads)) for value, under in pairs], habits
    )
    reading.emit(Operation((), copied))
    buffers = [reading.hold(value) for value in results]
    reading.emit(Operation(copied))
    # A result that is an argument itself has no buffer of its own. The others are `fixed`: they do
    # not count as temporaries.
    given = set(buffer_of.values())
    outputs = [buffer for buffer in buffers if buffer is not None and buffer not in given]
    for buffer in outputs:
        buffer.fixed = True
    # `early`: on some backends a loop's results have memory from the start of the program on.
    peak = liveness.peak(reading.frames[0].operations, outputs, early=habits.early)
    found = Trace(
        mesh=dict(mesh.shape),
        operations=dict(reading.products),
        lines=dict(reading.lines.most_common()),
        read=reading.read,
        written=reading.written,
        messages=dict(reading.messages),
        arguments=sum(buffer.bytes for buffer in buffer_of.values()),
        donated=sum(buffer.bytes for var, buffer in buffer_of.items() if var in donated),
        results=sum(value.bytes for value in left),
        temporaries=peak.bytes,
        at_peak=_by_line(peak.held),
        unbounded=list(dict.fromkeys(reading.unbounded)),
        uncounted=list(dict.fromkeys(reading.uncounted)),
        outside=list(
            dict.fromkeys(
                line for line, roots in reading.outside if not reading.split.isdisjoint(roots)
            )
        ),
    )
    return found if hardware is None else found._replace(seconds=seconds(found, hardware))


def _unplaced(leaf: Any) -> Any:
    """Returns a `ShapeDtypeStruct` without its sharding, since the sharding may have devices of
    another mesh. Returns any other argument unchanged."""
    return (
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if isinstance(leaf, jax.ShapeDtypeStruct)
        else leaf
    )


def _argument(var: Any) -> Value:
    """Returns the `Value` that stands for `var`, an argument of the step. The buffer of this
    `Value` does not count as a temporary."""
    buffer = Buffer(nbytes(var.aval), what=f"argument {var.aval.str_short()}", fixed=True)
    return Value(var.aval, {buffer: buffer.bytes}, buffer=buffer)


def _donated(jaxpr: Jaxpr) -> set[Any]:
    """Returns the variables of the arrays that are donated to a jitted function of the program.
    Such a function may write over the arrays."""
    marked = [
        (eqn.invars, eqn.params["donated_invars"])
        for eqn in jaxpr.eqns
        if "donated_invars" in eqn.params
    ]
    return {
        var
        for variables, flags in marked
        for var, flag in zip(variables, flags, strict=True)
        if flag and not jaxprs.is_literal(var)  # a Python number has no buffer
    }


def _placed(
    results: Sequence[Value], free: Sequence[Buffer]
) -> tuple[list[tuple[Value, Buffer]], list[Value]]:
    """Returns two lists. The first has a pair (result, buffer) for each result that is written over
    a donated argument. The buffer is that of the argument, and has the size of the result. The
    second list has the results that are written over no argument.

    `free` has the buffers of the donated arguments. As in XLA, each result takes the first free
    donated buffer of its own size.
    """
    places: dict[int, list[Buffer]] = {}
    for buffer in free:
        places.setdefault(buffer.bytes, []).append(buffer)
    pairs, left = [], []
    # Each array once, also if the step returns it twice or in two shapes.
    for value in dict.fromkeys(value.root for value in results):
        if places.get(value.bytes):
            pairs.append((value, places[value.bytes].pop(0)))
        else:
            left.append(value)
    return pairs, left


def _check(jaxpr: Jaxpr, sizes: dict[str, int]) -> None:
    """Raises `ValueError` unless the program has a `shard_map`, and each `shard_map` in it is over
    a mesh of these `sizes`, in the same order of axes."""
    maps = [eqn for eqn in jaxprs.every(jaxpr) if eqn.primitive.name == "shard_map"]
    if not maps:
        raise ValueError(
            "plan.trace needs a step that runs under mesh.spmd, whose specs say what each device "
            "has; this step contains no shard_map. Wrap it: mesh.spmd(step, mesh=mesh, "
            "in_specs=..., out_specs=...)."
        )
    for eqn in maps:
        over = dict(eqn.params["mesh"].shape)
        # The order of the axes decides which devices are near each other.
        if list(over.items()) != list(sizes.items()):
            raise ValueError(
                f"plan.trace was given the mesh {sizes}, and the step is mapped over {over}. Pass "
                "the mesh of the step."
            )


def _by_line(held: Sequence[tuple[int, Buffer]]) -> list[Held]:
    """Returns the buffers `held`, the largest first, as `Held` entries. Buffers of the same
    operation on the same source line are added up into one `Held`. Each entry of `held` is a pair:
    the bytes to count, and a buffer in memory at the peak. If the buffer stands for several copies,
    the bytes are those of all copies."""
    sums: Counter[tuple[str, str]] = Counter()
    for nbytes_, buffer in held:
        eqn = buffer.eqn
        what = eqn.primitive.name if eqn is not None else buffer.what
        sums[what, source_lines.source(eqn) if eqn is not None else source_lines.UNKNOWN] += nbytes_
    return [Held(size, what, line) for (what, line), size in sums.most_common() if size]


# As text


def report(trace: Trace, *, rows: int = 8) -> str:
    """Returns the trace as text: a line for each number, and at most `rows` lines for each list.
    The "products" are matmuls and convolutions, by the type of their operands."""
    devices = " x ".join(f"{name}={size}" for name, size in trace.mesh.items())
    of_memory = {
        "arguments": trace.arguments,
        "of which donated": trace.donated,
        "results": trace.results,
        "temporaries": trace.temporaries,
        "peak": trace.peak,
    }
    lines = [
        devices,
        "",
        "on each device             bytes",
        *(f"  {name:<20} {quantity(size, 'B'):>9}" for name, size in of_memory.items()),
        "",
        "temporaries at the peak    bytes",
        *(
            f"  {quantity(held.bytes, 'B'):>30}  {held.what}, {_short(held.line)}"
            for held in trace.at_peak[:rows]
        ),
        "",
        "collectives                bytes     times  result",
        *_of_messages(trace.messages, rows),
        "",
        "products                      operations",
        *(
            f"  {name:<20} {quantity(count, 'FLOP'):>15}"
            for name, count in trace.operations.items()
        ),
        *(
            f"    {quantity(count, 'FLOP'):>33}  {_short(line)}"
            for line, count in list(trace.lines.items())[:rows]
        ),
        f"memory: {quantity(trace.read, 'B')} read, {quantity(trace.written, 'B')} written",
    ]
    if trace.unbounded:
        lines.append(
            f"loops of unknown length, counted once: {', '.join(map(_short, trace.unbounded))}"
        )
    if trace.uncounted:
        lines.append(f"operations inside not counted: {', '.join(map(_short, trace.uncounted))}")
    if trace.outside:
        lines.append(
            f"outside of mesh.spmd, whole arrays counted: {', '.join(map(_short, trace.outside))}"
        )
    if trace.seconds is not None:
        lines += ["", *_of_time(trace.seconds)]
    return "\n".join(lines)


def _of_messages(messages: Mapping[Message, int], rows: int) -> list[str]:
    """Returns lines for the collectives that move the most bytes, at most `rows` lines. Collectives
    with the same axes, kind and source line share a line, which has their total bytes, their calls,
    and the bytes of the largest result."""
    kinds: dict[tuple[tuple[str, ...], str, str], list[int]] = {}
    for message, times in messages.items():
        total = kinds.setdefault((message.axes, message.kind, message.line), [0, 0, 0])
        total[0], total[1], total[2] = (
            total[0] + times * message.bytes,
            total[1] + times,
            max(total[2], message.bytes),
        )
    largest = sorted(kinds.items(), key=lambda item: -item[1][0])
    return [
        f"  {' x '.join(axes):<20} {quantity(total, 'B'):>9} {times:>9,}  {quantity(most, 'B')} "
        f"{kind}, {_short(line)}"
        for (axes, kind, line), (total, times, most) in largest[:rows]
    ]


def _of_time(found: Seconds) -> list[str]:
    """Returns two lines on the time of a step. The first has the time without overlap, and the
    share of the peak rate that the matmuls reach in this time. The second has the time with full
    overlap: the time of whichever takes longest, the matmuls, the memory or the messages. The
    second line also has the seconds of messages by axes, in brackets."""
    bounds = found.bounds
    longest = max(bounds, key=bounds.__getitem__)
    parts = ", ".join(f"{name} {taken:.3g}" for name, taken in bounds.items())
    along = ", ".join(f"{' x '.join(axes)} {taken:.3g}" for axes, taken in found.messages.items())
    return [
        f"{found.total:.4g} s a step, one thing after another: {parts}; {found.share:.1%} of peak",
        f"at least {found.least:.4g} s, where all else hides behind it: bound by {longest}"
        + (f" ({along})" if along else ""),
    ]


def _short(line: str) -> str:
    """Returns a source line with only the last two parts of its path."""
    return "/".join(line.split("/")[-2:])
