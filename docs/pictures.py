"""Draws the schedules, collectives and attention of the pages: python docs/pictures.py [FOLDER], by default docs/pictures."""

import sys
from pathlib import Path

from parallax import context, draw, schedule
from parallax.collectives import direct, halving, halving_by, machines, pairs, ring, torus, two_rings

PICTURES = {
    "gpipe.svg": schedule.gpipe(stages=4, microbatches=8),
    "one_f_one_b.svg": schedule.one_f_one_b(stages=4, microbatches=8),
    "interleaved.svg": schedule.one_f_one_b(stages=4, microbatches=8, chunks=2),
    "zero_bubble.svg": schedule.zero_bubble(stages=4, microbatches=8),
    "one_f_one_b_in_turns.svg": schedule.one_f_one_b_in_turns(stages=4, microbatches=8),
    "zero_bubble_in_turns.svg": schedule.zero_bubble_in_turns(stages=4, microbatches=8),
    "there_and_back.svg": schedule.as_soon_as_can_be(schedule.there_and_back(4), 8, held=[8] * 4),
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

ORDERS = {"context_zigzag.svg": context.zigzag, "context_contiguous.svg": context.contiguous}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures"
    for name, table in PICTURES.items():
        costs = {"backward": 1, "weight": 1} if table.weight is not None else {"backward": 2}
        draw.timeline(table, folder / name, **costs)
        print(f"{name}: {draw.summary(table, **costs)}")
    for name, table in ROUTES.items():
        print(f"{name}: {draw.route(table, folder / name).splitlines()[0]}")
    for name, order in ORDERS.items():
        print(f"{name}: {draw.attention(order, 4, folder / name).splitlines()[0]}")
