"""Draws the pictures of the pages: python docs/pictures.py [FOLDER], by default docs/pictures."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from parallax import context, draw, mesh, plan, schedule
from parallax.collectives import (
    direct,
    halving,
    halving_by,
    machines,
    pairs,
    ring,
    torus,
    two_rings,
)
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.plan import hardware

PICTURES = {
    "gpipe.svg": schedule.gpipe(stages=4, microbatches=8),
    "one_f_one_b_lockstep.svg": schedule.one_f_one_b_lockstep(stages=4, microbatches=8),
    "interleaved.svg": schedule.one_f_one_b_lockstep(stages=4, microbatches=8, chunks=2),
    "zero_bubble_lockstep.svg": schedule.zero_bubble_lockstep(stages=4, microbatches=8),
    "one_f_one_b.svg": schedule.one_f_one_b(stages=4, microbatches=8),
    "zero_bubble.svg": schedule.zero_bubble(stages=4, microbatches=8),
    "v_placement.svg": schedule.greedy(schedule.v_placement(4), 8, held=[8] * 4),
}

ROUTES = {
    "route_ring.svg": ring.table(8),
    "route_two_rings.svg": two_rings.table(8),
    "route_halving.svg": halving.table(8),
    "route_halving_by_4.svg": halving_by(4).table(8),
    "route_pairs.svg": pairs.table(8),
    "route_direct.svg": direct.table(8),
    "route_machines_of_4.svg": machines(4).table(8),
    "route_torus.svg": torus.table(2, 4),
}

SHARDINGS = {"tensor_columns.svg": P(None, "tensor"), "tensor_rows.svg": P("tensor")}
STAGES = {"plain": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}


def by_purpose(planned: plan.Plan) -> dict[str, int]:
    """The bytes that a device sends in a step over `data`, by what they are for; those below a megabyte are left out."""
    sent: dict[str, int] = {}
    for term in planned.traffic:
        if term.axes:
            sent[term.what] = sent.get(term.what, 0) + term.sent
    return {what: nbytes for what, nbytes in sent.items() if nbytes > 10**6}


ORDERS = {"context_zigzag.svg": context.zigzag, "context_contiguous.svg": context.contiguous}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures"
    for name, table in PICTURES.items():
        costs = {"backward": 1, "weight": 1} if table.weight is not None else {"backward": 2}
        draw.timeline(table, folder / name, **costs)
        print(f"{name}: {draw.summary(table, **costs)}")
    held = draw.in_flight(PICTURES["one_f_one_b_lockstep.svg"], folder / "in_flight.svg")
    print(f"in_flight.svg: {held.splitlines()[1]}")
    for name, table in ROUTES.items():
        print(f"{name}: {draw.route(table, folder / name).splitlines()[0]}")
    jax.config.update("jax_num_cpu_devices", 8)
    print(
        f"mesh.svg: {draw.mesh(mesh.make(data=2, stage=2, tensor=2), folder / 'mesh.svg').splitlines()[0]}"
    )
    for name, spec in SHARDINGS.items():
        weight = jax.ShapeDtypeStruct(
            (64, 64), jnp.float32, sharding=mesh.shardings(spec, mesh.make(tensor=8))
        )
        print(f"{name}: {draw.sharding(weight, folder / name).splitlines()[0]}")
    planned = lambda zero: plan.plan(
        gpt2.SMALL, Layout(data=8, zero=zero, microbatches=2), hardware.A100, batch=16
    )
    held = {name: planned(zero).memory.at_peak for name, zero in STAGES.items()}
    print(f"zero.svg: {draw.bytes_by_kind(held, folder / 'zero.svg').splitlines()[-1]}")
    sent = {name: by_purpose(planned(zero)) for name, zero in STAGES.items()}
    print(
        f"zero_sent.svg: {draw.bytes_by_kind(sent, folder / 'zero_sent.svg', counted='sent in a step').splitlines()[-1]}"
    )
    split = plan.plan(gpt2.SMALL, Layout(data=2, tensor=4), hardware.A100, batch=16).sent
    along = {axes: nbytes for axes, nbytes in split.items() if axes}
    print(f"tensor_sent.svg: {draw.traffic(along, folder / 'tensor_sent.svg').splitlines()[-1]}")
    needed = {}
    for order in (
        context.contiguous,
        context.zigzag,
    ):  # blocks of (T / 8)^2 scores that the causal mask does not drop
        table = context.block_pairs(order, 4)
        own = table.chunks / 2 + table.own.shape[1]
        size = (2 / table.chunks) ** 2  # table.chunks of a device
        needed[order.__name__] = [
            size * (own + int(table.hops[:, i, :, 2].sum())) for i in range(4)
        ]
    print(f"balance.svg: {draw.balance(needed, folder / 'balance.svg').splitlines()[-1]}")
    for name, order in ORDERS.items():
        print(f"{name}: {draw.attention(order, 4, folder / name).splitlines()[0]}")
