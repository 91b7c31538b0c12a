"""Pictures of schedules say what the tables say."""

import re
import subprocess
import sys
import xml.etree.ElementTree

import pytest

from parallax import context, draw
from parallax.draw import canvas
from parallax.schedule import gpipe, one_f_one_b_lockstep, zero_bubble_lockstep

SCHEDULES = {
    "gpipe": gpipe(4, 8),
    "1f1b": one_f_one_b_lockstep(4, 8),
    "interleaved": one_f_one_b_lockstep(4, 8, chunks=2),
    "zero bubble": zero_bubble_lockstep(4, 8, chunks=2),
    "one stage": one_f_one_b_lockstep(1, 1),
}


def test_text_to_read():
    assert draw.text(one_f_one_b_lockstep(2, 3)).splitlines() == [
        "tick       0  1  2  3  4",
        "runs       F FB FB FB  B",
        "stage 0 F  0  1  2  .  .",
        "stage 0 B  .  .  0  1  2",
        "stage 1 F  .  0  1  2  .",
        "stage 1 B  .  0  1  2  .",
    ]


def test_text_of_chunks_and_of_a_weight_lane():
    lines = draw.text(zero_bubble_lockstep(2, 2, chunks=2)).splitlines()
    assert lines[1].split() == ["runs", "F", "F", "F", "FI", "FIW", "IW", "IW", "IW"]
    assert lines[3] == "stage 0 I   .   .   .   . 0.1 1.1 0.0 1.0"
    assert lines[4] == "stage 0 W   .   .   .   . 0.1 1.1 0.0 1.0"


@pytest.mark.parametrize("name", SCHEDULES)
def test_text_holds_every_job_once_a_lane_and_stage(name):
    table = SCHEDULES[name]
    _, _, *lines = draw.text(table).splitlines()
    assert len(lines) == table.stages * len(table.lanes)
    for line in lines:
        jobs = re.sub(r"^stage \d+ .", "", line).split()
        assert len(jobs) == table.ticks
        assert (
            len({job for job in jobs if job != "."})
            == table.microbatches * table.chunks
            == table.ticks - jobs.count(".")
        )


def test_summary():
    told = (
        "4 stages x 2 chunks, 8 microbatches: time 28.5, bubble 4.5 (16%), at most 5.5 "
        "microbatches in flight"
    )
    assert draw.summary(SCHEDULES["interleaved"]) == told
    assert draw.summary(one_f_one_b_lockstep(4, 16), 0, 0).startswith(
        "4 stages, 16 microbatches: time 0, bubble 0, at most 7"
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_microbatches_in_flight_are_at_most_those_that_the_tables_count(name):
    lines = draw.in_flight(SCHEDULES[name], forward=1, backward=2, weight=1).splitlines()
    assert [float(line.split()[1]) for line in lines[1:]] == SCHEDULES[name].in_flight.tolist()


def test_microbatches_in_flight_over_time_by_hand(tmp_path):
    """Each microbatch is held from the start of its F to the end of its B, so the mean follows from
    these alone."""
    schedule = one_f_one_b_lockstep(2, 2)
    spans = [(span.stage, span.lane, span.start, span.stop) for span in schedule.lockstep()]
    for stage, line in enumerate(draw.in_flight(schedule, tmp_path / "held.svg").splitlines()[1:]):
        starts, stops = (
            [at[i] for at in spans if at[:2] == (stage, lane)]
            for lane, i in (("forward", 2), ("backward", 3))
        )
        mean = (sum(stops) - sum(starts)) / schedule.makespan()
        assert line.split() == [str(stage), f"{schedule.in_flight[stage]:g}", f"{mean:.3g}"]
    assert {"0", "1", "stage", "time"} <= set(svg_text(tmp_path / "held.svg"))


def test_a_cost_of_nothing_is_refused():
    with pytest.raises(
        ValueError,
        match=r"needs times above 0; got 0, 2 and 1 for the forward, backward and weight jobs",
    ):
        draw.in_flight(one_f_one_b_lockstep(2, 2), forward=0)


def svg_text(path):
    return [
        text
        for node in xml.etree.ElementTree.parse(path).iter()
        if (text := (node.text or "").strip())
    ]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("name", SCHEDULES)
def test_timeline(tmp_path, name):
    table = SCHEDULES[name]
    draw.timeline(table, tmp_path / "a.svg")
    words = svg_text(tmp_path / "a.svg")
    assert draw.summary(table) in words
    assert {"stage", "bubble", "in flight, at most"} <= set(words)
    assert any(word.startswith("time; one microbatch") for word in words)
    assert any("(F)" in word for word in words)
    assert (
        any("(I)" in word for word in words)
        == any("(W)" in word for word in words)
        == (table.weight is not None)
    )
    assert any("chunk 1" in word for word in words) == (table.chunks > 1)
    # Every box is labelled with its microbatch; the axes' numbers come on top.
    boxes = table.stages * table.chunks * len(table.lanes)
    assert all(words.count(str(m)) >= boxes for m in range(table.microbatches))
    draw.timeline(table, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    draw.timeline(table, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("suffix", ["svg", "SVG"])
def test_an_svg_file_has_no_date(tmp_path, suffix):
    draw.timeline(one_f_one_b_lockstep(2, 2), tmp_path / f"a.{suffix}")
    assert b"<dc:date>" not in (tmp_path / f"a.{suffix}").read_bytes()


def test_narrow_boxes_have_no_label(tmp_path):
    draw.timeline(one_f_one_b_lockstep(2, 64), tmp_path / "a.svg", forward=0.1)
    assert svg_text(tmp_path / "a.svg").count("63") == 2  # the backward boxes alone


@pytest.mark.parametrize(
    ("largest", "unit"),
    [(0, "B"), (999, "B"), (1000, "kB"), (10**15 - 1, "TB"), (10**15, "PB"), (10**20, "PB")],
)
def test_the_unit_is_not_above_the_largest_number(largest, unit):
    """The logarithm of 10^15 - 1 is rounded to 15."""
    assert canvas.scale(largest)[1] == unit


@pytest.mark.programs
def test_matplotlib_is_imported_only_to_draw():
    script = (
        "import sys, parallax.draw as d; from parallax.schedule import Schedule as S; "
        "print(d.text(S([[0]], [[0]]))); assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_attention_says_in_which_hop_each_block_is_computed(tmp_path):
    told = draw.attention(context.zigzag, 2, tmp_path / "zigzag.svg")
    assert told.splitlines() == [
        "2 devices, 4 chunks: each device computes 5 blocks; used are 5, 5",
        "keys                   0  1  2  3",
        "queries 0 on device 0  0  .  .  .",
        "queries 1 on device 1  1  0  .  .",
        "queries 2 on device 1  1  0  0  .",
        "queries 3 on device 0  0  1  1  0",
    ]
    assert svg_text(tmp_path / "zigzag.svg").count("hop 1") == 1
    assert "used are 1, 2, 3" in draw.attention(context.contiguous, 3)
