"""The seconds that the messages of a planned layout take.

The plan does not know the algorithm by which XLA runs a collective of `jax.lax` (a function in the
table `LAX` of traffic.py). So the plan gives such a collective along one axis the time of the
fastest algorithm of `parallax.collectives` on a simulated network. The time of every other
collective comes from an alpha-beta formula: the latency of the collective's messages, plus its
bytes times the seconds per byte. A `Term` (of `traffic`) is one kind of collective in a step. It
has the collective's function and axes, the number `n` of devices on these axes, the bytes `nbytes`
of the array that the function takes, and the number of calls, `times`.
"""

from collections.abc import Sequence
from typing import NamedTuple

from parallax.collectives import cost
from parallax.hardware import Hardware
from parallax.layout import Layout
from parallax.plan import networks
from parallax.plan.seconds import hop
from parallax.plan.traffic import LAX, Term
from parallax.plan.units import Number

# The functions of `jax.lax`, with their names in `networks`.
KINDS = {"psum": "all_reduce", "psum_scatter": "reduce_scatter", "all_gather": "all_gather"}


class Chosen(NamedTuple):
    """The algorithm that the plan assumes for the collectives of `jax.lax` along one mesh axis.

    Attributes:
        axis: the name of the axis.
        algorithm: the name of the fastest algorithm, as in `parallax.collectives`.
        seconds: for each algorithm that was tried, the seconds of all these collectives in a step
            if they ran by this algorithm. The keys are the algorithms' names, the fastest first.
    """

    axis: str
    algorithm: str
    seconds: dict[str, float]


def chosen(terms: Sequence[Term], layout: Layout, hardware: Hardware) -> tuple[Chosen, ...]:
    """Returns, for each axis, the fastest algorithm for the collectives of `jax.lax` along this
    axis. The plan assumes that these collectives run one after another, so the time of an algorithm
    is the sum over them. An axis without such collectives is left out. Collectives over several
    axes at once are left out too; `messages` computes their time by a formula."""
    found = []
    for axis in layout.axes:
        calls = [
            (KINDS[term.collective.__name__], term.nbytes, term.times)
            for term in terms
            if term.axes == (axis,) and term.collective in LAX
        ]
        if calls:
            seconds = networks.along(axis, layout.axes, hardware, calls)  # the fastest first
            found.append(Chosen(axis, next(iter(seconds)), seconds))
    return tuple(found)


def messages(
    terms: Sequence[Term], layout: Layout, hardware: Hardware, algorithms: Sequence[Chosen] = ()
) -> dict[tuple[str, ...], Number]:
    """Returns the seconds of all messages of a step, by the axes along which they go, such as
    ("data",). No overlap with arithmetic is assumed.

    `algorithms` is a result of `chosen`. Collectives of `jax.lax` along one axis take the simulated
    seconds that `algorithms` has for that axis. The time of all other collectives comes from an
    alpha-beta formula, with the slowest link between the devices of the collective's axes.
    """
    found: dict[tuple[str, ...], Number] = {
        (choice.axis,): choice.seconds[choice.algorithm] for choice in algorithms
    }
    simulated = set(found)
    # By axis: on a torus, neighbours along an axis may be several links apart.
    links_per_hop = hardware.hops(layout.axes)
    for term in terms:
        # A collective of one device sends nothing.
        if term.n > 1 and not (term.axes in simulated and term.collective in LAX):
            # Over several axes, the axis whose neighbours are furthest apart decides.
            links = max(links_per_hop[name] for name in term.axes)
            taken = term.times * cost.seconds(
                term.cost, hop(layout.axes, term.axes, hardware, links)
            )
            found[term.axes] = found.get(term.axes, 0.0) + taken
    return found


def table(found: Sequence[Chosen]) -> str:
    """Returns the fastest algorithms as text, one line per axis."""
    lines = ["algorithms                seconds of messages, by algorithm"]
    for each in found:
        rivals = ", ".join(f"{name} {taken:.3g}" for name, taken in each.seconds.items())
        lines.append(f"  {each.axis:<10} {each.algorithm:<12} {rivals}")
    return "\n".join(lines)
