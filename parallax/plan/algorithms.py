"""Who should move the data along each axis of a planned layout, by the simulated network."""

import dataclasses
import math
from typing import NamedTuple

from parallax.collectives import cost
from parallax.plan import networks, planned
from parallax.plan.networks import Group, Network
from parallax.plan.planned import Plan

KINDS = ("all_reduce", "reduce_scatter", "all_gather")
LAX_KINDS = {"psum": "all_reduce", "psum_scatter": "reduce_scatter"}  # `jax.lax`'s own names
ORDER = ("tensor", "stage", "data")  # the fastest first, as `planned.span` numbers devices


class Chosen(NamedTuple):
    """The algorithm of an axis.

    Attributes:
        axis: its name.
        algorithm: as `parallax.collectives` names it.
        seconds: of all messages along the axis in a step, by each algorithm that was tried, the fastest first.
    """

    axis: str
    algorithm: str
    seconds: dict[str, float]


def chosen(plan: Plan, network: Network) -> list[Chosen]:
    """The fastest algorithm along each axis of the layout, one thing after another.

    Raises:
        ValueError: the network has another number of devices than the layout.
    """
    if network.devices != plan.layout.devices:
        raise ValueError(
            f"algorithms.chosen needs a network of the layout's {plan.layout.devices} devices; got one of {network.devices}."
        )
    found = []
    for axis, size in plan.layout.axes.items():
        calls = [
            (_kind(term), term.nbytes, term.times) for term in plan.traffic if term.axes == (axis,)
        ]
        calls = [call for call in calls if call[0] in KINDS]
        if size > 1 and calls:
            group = Group(
                size, math.prod(plan.layout.axes[name] for name in ORDER[: ORDER.index(axis)])
            )
            taken = networks.choose(calls, network, group)
            found.append(Chosen(axis, next(iter(taken)), taken))
    return found


def replanned(plan: Plan, network: Network) -> tuple[Plan, list[Chosen]]:
    """The plan with the fastest algorithms, and those: what other collectives take stays as it was."""
    best = chosen(plan, network)
    others = [term for term in plan.traffic if not (_kind(term) in KINDS and len(term.axes) == 1)]
    rest = math.fsum(planned.messages(others, plan.layout, plan.hardware).values())
    messages = rest + math.fsum(each.seconds[each.algorithm] for each in best)
    return dataclasses.replace(plan, seconds=plan.seconds._replace(messages=messages)), best


def table(found: list[Chosen]) -> str:
    """The algorithms, a line an axis."""
    lines = ["algorithms                seconds of messages, by algorithm"]
    for each in found:
        rivals = ", ".join(f"{name} {taken:.3g}" for name, taken in each.seconds.items())
        lines.append(f"  {each.axis:<10} {each.algorithm:<12} {rivals}")
    return "\n".join(lines)


def _kind(term) -> str:
    name = cost.describe(term.collective).rpartition(".")[2]
    return LAX_KINDS.get(name, name)
