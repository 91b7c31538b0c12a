"""Reports a compiled program on one screen: its memory, its collectives, its estimated time and its
waits for messages."""

from collections.abc import Mapping

from parallax.compiled import certificate, links
from parallax.compiled.targets import Program
from parallax.compiled.timeline import Timeline

LINES = 5  # the table lists at most so many source lines


def table(
    program: Program, *, operations: float | None = None, timeline: Timeline | None = None
) -> str:
    """Returns a report of the program as text: the devices, the memory, the collectives, and the
    estimate of the time. On a torus the report also has the mean number of links that a message to
    the next device of a ring uses. If messages go over a network, between slices of TPUs or servers
    of GPUs, the report has the bytes that all devices together send over it.

    Args:
        program: the result of `targets.compile`.
        operations: the floating-point operations of a whole step on all devices. If this number is
            given, the report has the share of the chips' peak rate that the program reaches.
        timeline: the result of `program.timeline()`, if the caller has it. By default `table`
            computes it.
    """
    timeline = program.timeline() if timeline is None else timeline
    target = program.target
    axes = [f"{name}={size}" for name, size in program.mesh.shape.items() if size > 1]
    shape = ", ".join(axes) or "one device"
    parts = [
        f"{target.name}: {program.mesh.size} devices of {target.hardware.name}, {shape}",
        held(program.memory, target.memory),
        certificate.table(program.certificate()),
    ]
    machine = target.machine(program.mesh)
    if machine.sizes:  # a torus; `sizes` is empty for GPUs, which are linked by switches
        hops = links.of_a_hop(machine, dict(program.mesh.shape))
        counts = ", ".join(f"{name} {count:.3g}" for name, count in hops.items())
        parts += [f"links a hop: {counts}"] if hops else []
    over_network = program.by_link().get("network")
    if over_network:
        parts.append(
            f"over the network: {over_network / 1e6:,.1f} MB, sent by all devices together"
        )
    # The seconds of the step at the chips' full rate. The devices (cores) of a chip share its rate.
    seconds_at_peak = None
    if operations is not None:
        seconds_at_peak = operations / (target.hardware.rate / target.cores * program.mesh.size)
    return "\n\n".join([*parts, estimate(timeline, seconds_at_peak)])


def held(memory: Mapping[str, int], limit: float) -> str:
    """Returns the bytes on one device as text, a line for each kind, and whether they fit into
    `limit` bytes. `memory` is a result of `compiled.memory.of`. Its entry "peak", the sum of its
    other entries, is compared with `limit`."""
    lines = [f"  {name:<12} {size / 1e6:>12,.1f} MB" for name, size in memory.items()]
    fits = "fits" if memory["peak"] <= limit else "does not fit"
    return "\n".join(
        [
            "on each device",
            *lines,
            f"  {'of':<12} {limit / 1e6:>12,.1f} MB  {fits} ({memory['peak'] / limit:.1%})",
        ]
    )


def estimate(timeline: Timeline, peak: float | None = None) -> str:
    """Returns the estimate of a program's time as text. The first line has the seconds, and the
    seconds that messages add (*exposed*); the next lines have these two numbers for other speeds of
    the links. Then come the exposed seconds along each set of mesh axes, and the source lines with
    the longest waits for messages.

    Args:
        timeline: the estimated times, as `timeline.of` returns them.
        peak: the seconds that the step would take at the chips' peak rate. The first line then also
            has the share of the peak rate that the program reaches. If `peak` is None, the first
            line does not have this share.
    """

    def share(seconds: float, total: float = timeline.seconds) -> str:
        """Returns seconds as a share of `total`, by default the program's estimated time."""
        return f"{seconds / total if total else 0.0:.1%}"

    first = (
        f"estimated: {_ms(timeline.seconds)}, of which compute {_ms(timeline.compute)}, exposed "
        f"{_ms(timeline.exposed)} ({share(timeline.exposed)})"
    )
    # The seconds at the full rate, divided by the estimated seconds, are the share of the peak rate
    # that the program reaches.
    lines = [first if peak is None else f"{first}; {share(peak)} of peak"]
    for speed, seconds in timeline.at_speed.items():
        if speed != 1.0:
            exposed = seconds - timeline.compute
            lines.append(
                f"  links {speed:g} x: {_ms(seconds)}, exposed {_ms(exposed)} "
                f"({share(exposed, seconds)})"
            )
    lines += [
        f"  exposed along {axes}: {_ms(seconds)}"
        for axes, seconds in timeline.exposed_along.items()
    ]
    lines += [
        f"  waits {_ms(seconds)} for {line}"
        for line, seconds in list(timeline.waits.items())[:LINES]
    ]
    if timeline.unbounded:
        lines.append(f"  {timeline.unbounded} loops of unknown length count as one trip")
    return "\n".join(
        [*lines, "an estimate of the compiler's numbers and stated rates, no measurement"]
    )


def _ms(seconds: float) -> str:
    """Returns seconds as text in milliseconds."""
    return f"{1e3 * seconds:.4g} ms"
