"""The fastest collective algorithm along each axis of a planned layout, by the simulated
network."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from parallax.collectives import cost
from parallax.plan import networks, planned
from parallax.plan.networks import Group, Network
from parallax.plan.planned import Plan

KINDS = ("all_reduce", "reduce_scatter", "all_gather")
LAX_KINDS = {"psum": "all_reduce", "psum_scatter": "reduce_scatter"}  # `jax.lax`'s own names


class Chosen(NamedTuple):
    """The algorithm of an axis.

    Attributes:
        axis: its name.
        algorithm: as `parallax.collectives` names it.
        seconds: of all messages along the axis in a step, by each algorithm that was tried, the
            fastest first.
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
            f"algorithms.chosen needs a network of the layout's {plan.layout.devices} devices; got "
            f"one of {network.devices}."
        )
    found = []
    for axis, size in plan.layout.axes.items():
        calls = [
            (_kind(term), term.nbytes, term.times) for term in plan.traffic if term.axes == (axis,)
        ]
        calls = [call for call in calls if call[0] in KINDS]
        if size > 1 and calls:
            names = list(plan.layout.axes)  # the last axis runs fastest
            faster = names[names.index(axis) + 1 :]
            group = Group(size, math.prod(plan.layout.axes[name] for name in faster))
            taken = networks.choose(calls, network, group)
            found.append(Chosen(axis, next(iter(taken)), taken))
    return found


def replanned(plan: Plan, network: Network) -> Plan:
    """The plan with the fastest algorithm along each axis; what other collectives take stays as it
    was."""
    best = chosen(plan, network)
    axes = {one.axis for one in best}
    others = [
        term
        for term in plan.traffic
        if not (_kind(term) in KINDS and {*term.axes} <= axes and len(term.axes) == 1)
    ]
    along = planned.messages(others, plan.layout, plan.hardware)
    for one in best:
        key = (one.axis,)
        along[key] = along.get(key, 0.0) + one.seconds[one.algorithm]
    seconds = plan.seconds._replace(messages=math.fsum(along.values()))
    return dataclasses.replace(plan, seconds=seconds, along=along, algorithms=tuple(best))


def table(found: Sequence[Chosen]) -> str:
    """The algorithms, a line an axis."""
    lines = ["algorithms                seconds of messages, by algorithm"]
    for each in found:
        rivals = ", ".join(f"{name} {taken:.3g}" for name, taken in each.seconds.items())
        lines.append(f"  {each.axis:<10} {each.algorithm:<12} {rivals}")
    return "\n".join(lines)


def _kind(term) -> str:
    name = cost.describe(term.collective).rpartition(".")[2]
    return LAX_KINDS.get(name, name)
