"""A compiled program in one screen: does it fit, what it holds and sends, its estimated time, and what is exposed where."""

from collections.abc import Mapping

from parallax.compiled import certificate, links
from parallax.compiled.targets import Program
from parallax.compiled.timeline import Timeline

LINES = 5  # of a source that the table tells of


def table(
    program: Program, *, operations: float | None = None, timeline: Timeline | None = None
) -> str:
    """The program as text.

    Args:
        program: of `targets.compile`.
        operations: floating-point operations of a whole step, as papers count them, for the share of peak.
        timeline: `program.timeline()`, where it is at hand already.
    """
    timeline = program.timeline() if timeline is None else timeline
    target = program.target
    peak = (
        None
        if operations is None
        else operations / (target.hardware.rate / target.cores * program.mesh.size)
    )
    machine = target.machine(program.mesh)
    hops = links.of_a_hop(machine, dict(program.mesh.shape)) if machine.sizes else {}
    shape = (
        ", ".join(f"{name}={size}" for name, size in program.mesh.shape.items() if size > 1)
        or "one device"
    )
    parts = [
        f"{target.name}: {program.mesh.size} devices of {target.hardware.name}, {shape}",
        held(program.memory, target.memory),
        certificate.table(program.certificate()),
        *(
            [f"links a hop: {', '.join(f'{name} {count:.3g}' for name, count in hops.items())}"]
            if hops
            else []
        ),
        *(
            [f"over the network: {far / 1e6:,.1f} MB of all devices"]
            if (far := program.by_link().get("network"))
            else []
        ),
        estimate(timeline, peak),
    ]
    return "\n\n".join(parts)


def held(memory: Mapping[str, int], limit: float) -> str:
    """The bytes on a device, and whether they fit."""
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
    """The seconds of a replay, what is exposed along which axes, and the lines that wait; `peak`: the seconds at full rate."""
    share = lambda seconds: seconds / timeline.seconds if timeline.seconds else 0.0
    ms = lambda seconds: f"{1e3 * seconds:.4g} ms"
    lines = [
        f"estimated: {ms(timeline.seconds)}, of which compute {ms(timeline.compute)}, exposed {ms(timeline.exposed)}"
    ]
    lines[0] += f" ({share(timeline.exposed):.1%})" + (
        f"; {share(peak):.1%} of peak" if peak is not None else ""
    )
    for speed, seconds in timeline.at_speed.items():
        if speed != 1.0:
            exposed = seconds - timeline.compute
            lines.append(
                f"  links {speed:g} x: {ms(seconds)}, exposed {ms(exposed)} ({exposed / seconds:.1%})"
            )
    lines += [
        f"  exposed along {axes}: {ms(seconds)}" for axes, seconds in timeline.exposed_along.items()
    ]
    lines += [
        f"  waits {ms(seconds)} for {line}"
        for line, seconds in list(timeline.waits.items())[:LINES]
    ]
    if timeline.unbounded:
        lines.append(f"  {timeline.unbounded} loops of unknown length count as one trip")
    return "\n".join(
        [*lines, "an estimate of the compiler's numbers and stated rates, no measurement"]
    )
