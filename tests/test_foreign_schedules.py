"""Schedules that others made: the tables of torch.distributed.pipelining (2.13), as it writes them,
for 2, 4 and 8 ranks."""

import re
from pathlib import Path

import numpy as np
import pytest
from reference import EXACT, assert_close
from test_branching import anywhere, assert_memory_is_that_of_the_slots

from parallax import draw
from parallax.schedule import from_csv, one_f_one_b, to_csv, v_placement

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "schedules").glob("*.csv"))}
IN_FLIGHT = {  # the tables' own numbers, and the ticks in which all of it runs
    "1f1b_2_4": (14, [2, 1]),
    "bfs_2_4": (26, [4, 4]),
    "dualpipev_2_4": (25, [2.5, 2.5]),
    "gpipe_2_4": (14, [4, 4]),
    "interleaved_2_4": (26, [2.5, 1.5]),
    "izb_2_4": (25, [2, 2]),
    "zbv_2_4": (25, [2, 2]),
    "1f1b_4_8": (30, [4, 3, 2, 1]),
    "bfs_4_8": (54, [8] * 4),
    "dualpipev_4_8": (51, [4.5] * 4),
    "gpipe_4_8": (30, [8] * 4),
    "interleaved_4_8": (54, [5.5, 4.5, 3.5, 2.5]),
    "izb_4_8": (51, [4] * 4),
    "zbv_4_8": (51, [4] * 4),
    "1f1b_8_16": (62, [8, 7, 6, 5, 4, 3, 2, 1]),
    "bfs_8_16": (110, [16] * 8),
    "dualpipev_8_16": (103, [8.5] * 8),
    "gpipe_8_16": (62, [16] * 8),
    "interleaved_8_16": (110, [11.5, 10.5, 9.5, 8.5, 7.5, 6.5, 5.5, 4.5]),
    "izb_8_16": (103, [8] * 8),
    "zbv_8_16": (103, [8] * 8),
}


@pytest.mark.sweep(14)
@pytest.mark.parametrize("name", FILES)
def test_tables_of_torch_load_and_are_drawn(name, tmp_path):
    table = from_csv(FILES[name])
    assert (table.ticks, table.in_flight.tolist()) == IN_FLIGHT[name]
    assert (table.stages, table.microbatches) == tuple(map(int, name.split("_")[1:]))
    to_csv(table, tmp_path / "again.csv")
    again = from_csv(tmp_path / "again.csv")
    for lane in table.lanes:
        np.testing.assert_array_equal(again.lanes[lane], table.lanes[lane])
    np.testing.assert_array_equal(again.placed, table.placed)
    draw.timeline(table, tmp_path / "picture.svg", backward=1)
    assert len(draw.text(table).splitlines()) == 2 + 3 * table.stages
    assert draw.summary(table, 1, 1, 1).startswith(f"{table.stages} stages")


@pytest.mark.parametrize(("P", "M"), [(2, 4), (4, 8), (8, 16)])
def test_torchs_1f1b_is_ours(P, M):
    """Its last rank's forwards are numbered from 1."""
    table, ours = from_csv(FILES[f"1f1b_{P}_{M}"]), one_f_one_b(P, M)
    for lane in table.lanes:
        np.testing.assert_array_equal(table.lanes[lane], ours.lanes[lane])


def test_a_v_is_a_v():
    for P, M in ((2, 4), (4, 8), (8, 16)):
        for name in ("zbv", "dualpipev"):
            np.testing.assert_array_equal(from_csv(FILES[f"{name}_{P}_{M}"]).placed, v_placement(P))


@pytest.mark.sweep(7)
@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_tables_of_torch_run_to_the_same_gradients(name):
    found, expected = anywhere(from_csv(FILES[name]))
    assert_close(found, expected, EXACT)


@pytest.mark.sweep(7)
@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_their_memory_is_that_of_their_slots(name):
    assert_memory_is_that_of_the_slots(from_csv(FILES[name]))


REFUSED = {
    "what is no job": (
        "0F0,0F1x\n1F0,1B0\n",
        "row 1, cell 2: '0F1x' is no job. Write a job as 5F3: the place, then a letter (F, I, W "
        "or B), then the microbatch.",
    ),
    "a long row": (
        f"0F0,{'x' * 9866}\n1F0\n",
        f"row 1, cell 2: '{'x' * 79}... (9868 characters) is no job. Write a job as 5F3: the "
        "place, then a letter (F, I, W or B), then the microbatch.",
    ),
    "a deadlock": (
        "0B0,0F0\n1F0,1B0\n",
        "stage 0 waits for ever before backward of microbatch 0 at place 0: this job needs "
        "backward of microbatch 0 at place 1, which stage 1 does not run in an earlier tick. "
        "Change the order of one of the two stages.",
    ),
    "one forward alone": (
        "0F0,0B0\n1F0,1B0,1F1\n",
        "stage 1 waits for ever before forward of microbatch 1 at place 1: this job needs "
        "forward of microbatch 1 at place 0, which stage 0 does not run in an earlier tick. "
        "Change the order of one of the two stages.",
    ),
    "no weights": (
        "0F0,0I0,0W0\n1F0,1I0\n",
        "weight of microbatch 0 runs in no tick on stage 1. Add it, or number the microbatches "
        "from 0 without a gap.",
    ),
    "another number of places": (
        "0F0,0B0,2F0,2B0\n1F0,1B0\n",
        "All stages need the same number of chunks (places of the model); got 2, 1.",
    ),
    "the first elsewhere": (
        "1F0,1B0\n0F0,0B0\n",
        "The placement must give stage 0 the first chunk of the model (place 0), since stage 0 has "
        "the batch; got [[1, 0]]. Number the stages so that stage 0 has place 0.",
    ),
    "a gap in the places": (
        "0F0,3F0,3B0,0B0\n1F0,4F0,4B0,1B0\n",
        "The places of all stages, in ascending order, must be 0, 1, 2 and so on; got place 3 of "
        "stage 0 instead of place 2. Number the places without a gap, "
        "and put each on exactly one stage.",
    ),
    "a gap in the places of a file by ticks": (
        "tick,stage 0\n0,0F0\n1,2F0\n2,2I0\n3,2W0\n4,0I0\n5,0W0\n",
        "The places of all stages, in ascending order, must be 0, 1, 2 and so on; got place 2 of "
        "stage 0 instead of place 1. Number the places without a gap, "
        "and put each on exactly one stage.",
    ),
    "a place twice": (
        "0F0,1F0,1B0,0B0\n1F0,2F0,2B0,1B0\n",
        "The places of all stages, in ascending order, must be 0, 1, 2 and so on; got place 1 of "
        "stage 1 instead of place 2. Number the places without a gap, "
        "and put each on exactly one stage.",
    ),
    "no job": (
        "tick,stage 0\n0,\n",
        "All stages need the same number of chunks (places of the model); got 0.",
    ),
    "too early": (
        "tick,stage 0,stage 1\n0,0F0,1F0\n1,,1I0\n2,0I0,1W0\n3,0W0,\n",
        "line 2: tick 0, stage 1: forward of microbatch 0 must run in tick 1 or later, since the "
        "forward of this microbatch at the previous place of the model runs in tick 0.",
    ),
    "twice": (
        "tick,stage 0\n0,0F0\n1,0F0\n2,0I0\n3,0W0\n",
        "line 3: tick 1, stage 0: forward of microbatch 0 has already run in tick 0. Keep one.",
    ),
    "a tick left out": (
        "tick,stage 0\n0,0F0\n2,0I0\n",
        "line 3: needs 2 cells, and the first cell must be the tick, 1; got '2,0I0'.",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_says_why_in_a_sentence(what, tmp_path):
    text, message = REFUSED[what]
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{tmp_path}/table.csv: {message}')}$"):
        from_csv(tmp_path / "table.csv")
