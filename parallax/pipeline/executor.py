"""The one executor: lanes run tick by tick, as a schedule says, in loops without a conditional.

A lane is a function `(carry, row) -> carry`; what it does is its own affair. Which lanes run anywhere is constant over
stretches of ticks, and each stretch is one `lax.scan`.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from parallax.collectives.cpu import ordered
from parallax.pipeline.rows import Row, Stretch, loops

Carry = TypeVar("Carry")
Lane = Callable[[Any, Row], Any]


def run(lanes: Callable[..., Sequence[tuple[str, Lane]]], table: Row, stretches: list[Stretch], carry: Carry) -> Carry:
    """The carry after all ticks.

    Args:
        lanes: called without arguments, the lanes in the order in which they run within a tick, each with the name that
            `stretches` have for the ticks in which it runs. Called with a carry, the same, for one tick that is not in a loop:
            their collectives wait for that carry.
        table: the rows, one a tick.
        stretches: which lanes run, and for how many ticks on end.
        carry: before the first tick.
    """
    done = 0
    for repeats, pattern in loops(stretches):
        period = sum(length for _, length in pattern)
        rows = jax.tree.map(lambda r: jnp.asarray(r[done : done + repeats * period]), table)  # noqa: B023
        once = lambda carry, rows, pattern=pattern: (_once(lanes, pattern, carry, rows), None)
        if repeats == 1:
            carry, _ = once(carry, rows)
        else:
            carry, _ = lax.scan(once, carry, jax.tree.map(lambda r: r.reshape(repeats, -1, *r.shape[1:]), rows))  # noqa: B023
        done += repeats * period
    return carry


def _once(lanes, pattern: Sequence[Stretch], carry, rows):
    """A few stretches, one after another."""
    begin = 0
    for names, length in pattern:
        of = jax.tree.map(lambda r: r[begin : begin + length], rows)  # noqa: B023
        # XLA writes out a loop of one tick, and no collective of that may overtake the loop before.
        of, own = (ordered(of, carry), lanes(carry)) if length == 1 else (of, lanes())
        running = [lane for name, lane in own if name in names]
        if running:
            carry, _ = lax.scan(lambda carry, row: (_tick(running, carry, row), None), carry, of)  # noqa: B023
        begin += length
    return carry


def _tick(lanes, carry, row):
    for lane in lanes:
        carry = lane(carry, row)
    return carry
