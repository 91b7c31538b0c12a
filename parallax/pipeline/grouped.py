"""Whether a function may run on some stages only: what its collectives do inside a group of devices that all run it.

A grouped collective, such as a `psum` over a tensor axis, waits for its group alone. A `ppermute` is one operation of all
devices, and hangs or gives wrong numbers where some of them run something else.
"""

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn

from parallax.collectives import types
from parallax.collectives.axis import Axis
from parallax.grads import axes_of
from parallax.jaxprs import inner, source
from parallax.pipeline.traced import COLLECTIVES

GROUPED = COLLECTIVES - {"linear_collective", "ppermute", "ragged_all_to_all"}


def refuse_crossing(name: str, jaxpr: Jaxpr, axis: Axis) -> None:
    """Refuse with a `ValueError` a function that talks over the stages' `axis`, or that all devices would have to run at once."""
    for eqn, line in _moves(jaxpr, ""):
        along = _along(eqn)
        over = ", ".join(map(repr, along))
        crosses = sorted(set(along) & set(axes_of(axis)))
        runs = f"each stage has a job of its own in a tick, and {name} runs {eqn.primitive.name} over {over} ({line})"
        cure = "take a schedule in which the stages keep step, such as schedule.one_f_one_b"
        if crosses:
            raise ValueError(
                f"pipeline: in this schedule {runs}, with stages that run something else. Do it in enter or head, or {cure}."
            )
        if eqn.primitive.name not in GROUPED:
            raise ValueError(
                f"pipeline: in this schedule {runs}, which all devices must run at once. Let jax.lax move the data there (pass "
                f"{over} for the axis), or {cure}."
            )


def _moves(jaxpr: Jaxpr, line: str) -> Iterator[tuple[JaxprEqn, str]]:
    """The collectives of more than one device, each with the caller's line."""
    for eqn in jaxpr.eqns:
        here = line or source(eqn)
        if eqn.primitive.name == "linear_collective":
            yield from _moves(types.opened(eqn, None, check_vma=True), here)
        elif eqn.primitive.name in COLLECTIVES:
            if types.size(_along(eqn)) > 1:
                yield eqn, here
        else:
            for body in inner(eqn):
                yield from _moves(body, line)


def _along(eqn: JaxprEqn) -> tuple[str, ...]:
    return types.axes(eqn.params["axes"] if "axes" in eqn.params else eqn.params["axis_name"])
