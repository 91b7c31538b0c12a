"""Draws the schedules of the pipeline page: python docs/pictures.py [FOLDER], by default docs/pictures."""

import sys
from pathlib import Path

from parallax import draw, schedule

PICTURES = {
    "gpipe.svg": schedule.gpipe(stages=4, microbatches=8),
    "one_f_one_b.svg": schedule.one_f_one_b(stages=4, microbatches=8),
    "interleaved.svg": schedule.one_f_one_b(stages=4, microbatches=8, chunks=2),
    "zero_bubble.svg": schedule.zero_bubble(stages=4, microbatches=8),
}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures"
    for name, table in PICTURES.items():
        costs = {"backward": 1, "weight": 1} if table.weight is not None else {"backward": 2}
        draw.timeline(table, folder / name, **costs)
        print(f"{name}: {draw.summary(table, **costs)}")
