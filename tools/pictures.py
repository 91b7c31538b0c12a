"""Draws the pictures of the pages: python tools/pictures.py [FOLDER], by default docs/pictures."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from parallax import context, draw, hardware, mesh, plan, schedule
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
from parallax.draw import canvas
from parallax.layout import Layout
from parallax.models import gpt2

PICTURES = {
    "one_f_one_b_lockstep.svg": schedule.one_f_one_b_lockstep(stages=4, microbatches=8),
    "interleaved.svg": schedule.one_f_one_b_lockstep(stages=4, microbatches=8, chunks=2),
    "zero_bubble_lockstep.svg": schedule.zero_bubble_lockstep(stages=4, microbatches=8),
    "one_f_one_b.svg": schedule.one_f_one_b(stages=4, microbatches=8),
    "zero_bubble.svg": schedule.zero_bubble(stages=4, microbatches=8),
    "v_placement.svg": schedule.greedy(schedule.v_placement(4), 8, max_chunks=[8] * 4),
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

STAGES = {"plain": 0, "ZeRO-1": 1, "ZeRO-2": 2, "ZeRO-3": 3}


ORDERS = {"context_zigzag.svg": context.zigzag, "context_contiguous.svg": context.contiguous}
LARGE = 10**6  # bytes: a smaller part of the traffic is invisible in its picture


def planned(**layout: int) -> plan.Plan:
    """The plan of GPT-2 small on eight A100s, with rings, whose bytes per device are exact."""
    parallel = Layout(**layout)
    axes = {axis: ring(axis) for axis in parallel.axes}
    return plan.plan(gpt2.SMALL, parallel, hardware.A100, batch=16, axes=axes)


def training_state(zero: int, devices: int) -> dict[str, float]:
    """The bytes of GPT-2 small on a device, with AdamW in float32, without activations."""
    size = 4 * gpt2.SMALL.parameters
    return {
        "parameters": size / (devices if zero == 3 else 1),
        "gradients": size / (devices if zero >= 2 else 1),
        "optimizer state": 2 * size / (devices if zero >= 1 else 1),
    }


def by_purpose(traffic: Sequence[Any]) -> dict[str, int]:
    """The bytes that a device sends in a step over `data`, by their purpose, without small ones."""
    sent: dict[str, int] = {}
    for term in traffic:
        if term.axes:
            sent[term.what] = sent.get(term.what, 0) + term.sent
    return {purpose: count for purpose, count in sent.items() if count > LARGE}


def split_matrices(path: Path) -> None:
    """Draw two layers of tensor parallelism: columns of W1, rows of W2, and what each device
    has."""
    devices = 4
    shades = [canvas.colour(device, devices) for device in range(devices)]
    figure = canvas.figure(9.0, 2.6)
    names = ["X: the same on all", "W1: columns", "H = f(X W1)", "W2: rows", "Y: summed over all"]
    panels = figure.subplots(1, len(names), width_ratios=[2, 4, 4, 2, 2])
    grey = {(0, 0): (canvas.GREY, "all")}
    columns = {(0, device): (shade, str(device)) for device, shade in enumerate(shades)}
    rows = {(device, 0): (shade, str(device)) for device, shade in enumerate(shades)}
    for axes, name, cells in zip(panels, names, [grey, columns, columns, rows, grey], strict=True):
        height, width = (max(place[dim] for place in cells) + 1 for dim in (0, 1))
        canvas.grid(axes, cells, [""] * height, [""] * width)
        axes.set(aspect="auto", title=name)
        axes.title.set_size(10)
    canvas.save(figure, path)


if __name__ == "__main__":
    folder = (
        Path(sys.argv[1])
        if len(sys.argv) > 1
        else Path(__file__).resolve().parent.parent / "docs" / "pictures"
    )
    for name, table in PICTURES.items():
        costs = {"backward": 1, "weight": 1} if table.weight is not None else {"backward": 2}
        draw.timeline(table, folder / name, title=name.removesuffix(".svg"), **costs)
        print(f"{name}: {draw.summary(table, **costs)}")
    counts = draw.in_flight(PICTURES["one_f_one_b_lockstep.svg"], folder / "in_flight.svg")
    print(f"in_flight.svg: {counts.splitlines()[1]}")
    for name, table in ROUTES.items():
        print(f"{name}: {draw.route(table, folder / name).splitlines()[0]}")
    for name, order in ORDERS.items():
        print(f"{name}: {draw.attention(order, 4, folder / name).splitlines()[0]}")
    jax.config.update("jax_num_cpu_devices", 8)
    devices = mesh.make(data=2, stage=2, tensor=2)
    print(f"mesh.svg: {draw.mesh(devices, folder / 'mesh.svg').splitlines()[0]}")
    split_matrices(folder / "tensor_split.svg")
    plans = {name: planned(data=8, zero=zero, microbatches=2) for name, zero in STAGES.items()}
    held = {name: training_state(zero, devices=8) for name, zero in STAGES.items()}
    print(f"zero.svg: {draw.bytes_by_kind(held, folder / 'zero.svg').splitlines()[-1]}")
    sent = {name: by_purpose(each.traffic) for name, each in plans.items()}
    table = draw.bytes_by_kind(sent, folder / "zero_sent.svg", counted="sent in a step")
    print(f"zero_sent.svg: {table.splitlines()[-1]}")
    along = {axes: count for axes, count in planned(data=2, tensor=4).sent.items() if axes}
    print(f"tensor_sent.svg: {draw.traffic(along, folder / 'tensor_sent.svg').splitlines()[-1]}")
