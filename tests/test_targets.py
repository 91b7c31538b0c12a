"""Programs for accelerators that are not there are read right: saved ones, and new ones where a
compiler is (`-m targets`)."""

import dataclasses
import gzip
import importlib.util
import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import make_compiled_fixtures as made
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from parallax import draw, grads, hardware, mesh, plan
from parallax.__main__ import main
from parallax.collectives import cost, ring
from parallax.compiled import (
    certificate,
    costly,
    hlo,
    links,
    report,
    seconds,
    source_lines,
    targets,
    timeline,
)
from parallax.plan import traffic

KINDS = ("tpu", "cuda")
AXES = dict(made.LAYOUT.axes)


def text(kind, what="step"):
    return gzip.decompress((made.FOLDER / f"{kind}_{what}.txt.gz").read_bytes()).decode()


def about(kind):
    return json.loads((made.FOLDER / f"{kind}_step.json").read_text())


def machine(kind):
    if kind == "cuda":
        return links.switch(hardware.H100, 8)
    return links.torus(hardware.TPU_V5E, about("tpu")["places"])


LOOP = """HloModule m, is_scheduled=true
%sum (a: s32[], b: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %s = s32[] add(%a, %b)
}
%less (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %bound = s32[] constant(BOUND)
  ROOT %c = pred[] compare(%p, %bound), direction=DIRECTION
}
%test (state: (f32[4], s32[])) -> pred[] {
  %state = (f32[4], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=1
  ROOT %f = pred[] fusion(%i), kind=kLoop, calls=%less
}
%trip (state: (f32[4], s32[])) -> (f32[4], s32[]) {
  %state = (f32[4], s32[]) parameter(0)
  %x = f32[4] get-tuple-element(%state), index=0
  %i = s32[] get-tuple-element(%state), index=1
  %step = s32[] constant(STEP)
  %next = s32[] fusion(%i, %step), kind=kLoop, calls=%sum
  %moved = s32[] copy(%next)
  ROOT %t = (f32[4], s32[]) tuple(%x, %moved)
}
ENTRY %main (x: f32[4], n: s32[]) -> (f32[4], s32[]) {
  %x = f32[4] parameter(0)
  %n = s32[] parameter(1)
  %first = s32[] FIRST
  %begin = (f32[4], s32[]) tuple(%x, %first)
  ROOT %loop = (f32[4], s32[]) while(%begin), condition=%test, body=%trip
}
"""


@pytest.mark.parametrize(
    ("first", "step", "direction", "bound", "trips"),
    [
        ("constant(0)", 1, "LT", 7, 7),
        ("constant(1)", 2, "LT", 8, 4),
        ("constant(0)", 1, "LE", 7, 8),
        ("constant(6)", -1, "GE", 0, 7),
        ("constant(6)", -2, "GT", 0, 3),
        ("constant(0)", 3, "NE", 9, 3),
        ("constant(0)", 2, "NE", 9, 0),  # never equal
        ("constant(0)", -1, "LT", 7, 0),
        ("copy(%n)", 1, "LT", 7, 0),  # begins with what only a run knows
    ],
)
def test_trips_stand_in_the_condition(first, step, direction, bound, trips):
    assert turns(first, step, direction, bound) == {"test": trips and trips + 1, "trip": trips}


@pytest.mark.parametrize(
    ("moved", "direction", "bound", "trips"),
    [
        ("subtract(%a, %b)", "GE", 0, 7),  # 6, 5, .. 0
        ("subtract(%b, %a)", "LT", 9, 0),  # 1 less the state is no step
        ("add(%b, %a)", "LT", 9, 3),
        ("add(%a, %a)", "LT", 9, 0),
    ],
)
def test_a_step_may_be_taken_away(moved, direction, bound, trips):
    assert turns("constant(6)", 1, direction, bound, moved) == {
        "test": trips and trips + 1,
        "trip": trips,
    }


def turns(first, step, direction, bound, moved="add(%a, %b)"):
    """How often the two computations of `LOOP` run."""
    program = (
        LOOP.replace("FIRST", first)
        .replace("STEP", str(step))
        .replace("DIRECTION", direction)
        .replace("BOUND", str(bound))
    )
    (loop,) = [
        line
        for line in hlo.module(program.replace("add(%a, %b)", moved))["main"]
        if line.opcode == "while"
    ]
    return dict(loop.called)


def test_links_of_a_torus_and_of_a_switch():
    cube = links.torus(hardware.TPU_V4, [(k % 4, k // 4 % 4, k // 16) for k in range(64)])
    assert cube.path(0, 1) == [(0, 0, 0, 0, 0, 1)]
    assert cube.path(0, 3) == [(0, 0, 0, 0, 0, -1)]  # round the back
    long = links.torus(hardware.TPU_V4, [(k % 8, k // 8 % 4, k // 32) for k in range(128)])
    assert [len(long.path(0, k)) for k in range(8)] == [0, 1, 2, 3, 4, 3, 2, 1]
    assert links.of_a_hop(cube, {"data": 16, "tensor": 4}) == {
        "data": 1.25,
        "tensor": 1.0,
    }  # row by row, not laid as rings
    assert links.of_a_hop(links.switch(hardware.H100, 8), {"data": 8, "tensor": 1}) == {"data": 2.0}
    line = links.torus(hardware.TPU_V5E, [(k, 0) for k in range(4)])
    assert len(line.path(0, 3)) == 3  # too short to close
    assert line.path(2, 2) == []
    busy, delay = line.crossing({(0, 2): 45e9, (1, 2): 45e9})
    assert max(busy.values()) == pytest.approx(2.0)  # both over the link from 1 to 2
    assert delay == pytest.approx(2e-6)
    assert links.torus(hardware.TPU_V4, [(0, 0), (0, 0), (1, 0), (1, 0)]).cores == 2
    gpus = links.switch(hardware.H100, 16)
    assert gpus.path(1, 2) == [("out", 1), ("in", 2)]
    assert gpus.kind(7, 8) == "network"
    busy, delay = gpus.crossing({(7, 8): 50e9})
    assert (max(busy.values()), delay) == (pytest.approx(1.0), 14e-6)


def permute(name, pairs, megabytes):
    size = f"f32[{megabytes * 250_000}]"
    start = (
        f"  %{name} = ({size}, {size}) collective-permute-start(%x{megabytes}), "
        f"source_target_pairs={pairs}"
    )
    return start, f"  %{name}.d = {size} collective-permute-done(%{name})"


def compute(name, cycles):
    cost = f'{{"estimated_cycles":"{cycles}"}}'
    return f"  %{name} = f32[8]{{0:T(128)}} fusion(%x), kind=kLoop, backend_config={cost}"


def test_a_replay_by_hand():
    """45 MB take a millisecond and a microsecond; two messages on one link wait for each other, on
    two they do not."""
    right, left = "{{0,1}}", "{{1,0}}"
    one, two = links.torus(hardware.TPU_V5E, [(0, 0), (1, 0)]), {"x": 2}
    program = lambda *lines: (
        "HloModule m, is_scheduled=true\n\nENTRY %main (x: f32[8]) -> f32[8] {\n"
        + "\n".join(lines)
        + "\n}\n"
    )
    a, a_done = permute("a", right, 45)
    b, b_done = permute("b", left, 45)
    c, c_done = permute("c", right, 45)
    ms = lambda *lines: 1e3 * timeline.of(program(*lines), one, two).seconds
    assert ms(a, a_done, compute("w", 1_500_000)) == pytest.approx(2.001)
    assert ms(a, compute("w", 1_500_000), a_done) == pytest.approx(1.001)
    assert ms(a, b, compute("w", 1_500_000), a_done, b_done) == pytest.approx(1.001)  # two links
    found = timeline.of(program(a, c, compute("w", 1_500_000), a_done, c_done), one, two)
    assert found.seconds == pytest.approx(2.001e-3)
    assert found.exposed == pytest.approx(1.001e-3)  # not twice what hides behind one computation
    assert found.exposed_along == {"x": pytest.approx(1.001e-3)}
    assert found.at_speed[0.5] == pytest.approx(4.001e-3)
    assert found.at_speed[2.0] == pytest.approx(1.001e-3)
    fused = compute("w", 1_500_000).replace("kLoop", "kCustom, calls=%inner")
    inner = a.replace("collective-permute-start", "collective-permute").replace(
        "(f32[11250000], f32[11250000])", "f32[11250000]"
    )
    text = program(fused).replace(
        "\n\nENTRY", f"\n\n%inner (x: f32[8]) -> f32[8] {{\n{inner}\n}}\n\nENTRY"
    )
    assert timeline.of(text, one, two).seconds == pytest.approx(
        1.001e-3
    )  # beside the product that it is fused into


def test_a_loop_of_one_trip_or_none_turns_as_often_as_its_name_says():
    """A job of a millisecond in 3 of 5 ticks."""
    job = compute("w", 1_500_000)
    scope = "jit(f)/while/body/forward.3_of_5/while"
    loop = f'while(%s), condition=%test, body=%body, metadata={{op_name="{scope}"}}'
    text = (
        "HloModule m, is_scheduled=true\n\n%test (s: f32[8]) -> pred[] {\n  ROOT %go = pred[] "
        "custom-call(%s)\n}\n\n"
        f"%body (s: f32[8]) -> f32[8] {{\n{job}\n}}\n\n"
        f"%tick (s: f32[8]) -> f32[8] {{\n  %job = f32[8] {loop}\n}}\n\n"
        "ENTRY %main (x: f32[8]) -> f32[8] {\n  %ticks = f32[8] while(%x), condition=%test, "
        "body=%tick, "
        'backend_config={"known_trip_count":{"n":"5"}}\n}\n'
    )
    one = links.torus(hardware.TPU_V5E, [(0, 0), (1, 0)])
    found = timeline.of(text, one, {"x": 2})
    assert found.seconds == pytest.approx(
        3 * timeline.of(text.replace("3_of_5", "1_of_5"), one, {"x": 2}).seconds
    )
    assert found.seconds == pytest.approx(3e-3)
    assert found.unbounded == 0
    unknown = timeline.of(text.replace("forward.3_of_5", "forward"), one, {"x": 2})
    assert (unknown.seconds, unknown.unbounded) == (pytest.approx(5e-3), 1)


def test_a_conditional_takes_the_time_of_its_longest_branch():
    """Branches of one and of two milliseconds: the time, the events, the waits and the costly
    instructions are those of the second, then of the one that waits for a message."""
    short, long = compute("a", 1_500_000), compute("b", 3_000_000)
    branches = "branch_computations={%one, %two}"
    text = (
        "HloModule m, is_scheduled=true\n\n"
        f"%one (x: f32[8]) -> f32[8] {{\n{short}\n}}\n\n"
        f"%two (x: f32[8]) -> f32[8] {{\n{long}\n}}\n\n"
        "ENTRY %main (x: f32[8]) -> f32[8] {\n"
        f"  %c = f32[8] conditional(%i, %x, %x), {branches}\n}}\n"
    )
    pair = links.torus(hardware.TPU_V5E, [(0, 0), (1, 0)])
    found = timeline.of(text, pair, {"x": 2})
    assert (found.seconds, found.compute) == (pytest.approx(2e-3), pytest.approx(2e-3))
    assert [event.name for event in found.events] == ["b"]
    assert [each.name for each in costly.instructions(text, hardware.TPU_V5E)] == ["b"]
    start, done = permute("m", "{{0,1}}", 90)  # two milliseconds and a microsecond
    sends = text.replace(short, f"{start}\n{short}\n{done}")
    found = timeline.of(sends, pair, {"x": 2})
    assert found.seconds == pytest.approx(2.001e-3)
    assert found.exposed == pytest.approx(1e-6)
    assert [event.name for event in found.events] == ["m", "a"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_step_sends_what_theory_says(kind):
    """Byte for byte, along every axis; nothing else, no loop but those over layers, no branch, no
    unknown length."""
    entries = certificate.read(text(kind), mesh.make(**AXES))
    sent: dict = {}
    for entry in entries:
        sent[entry.axes] = sent.get(entry.axes, 0) + entry.bytes
    expected = traffic.by_axes(
        traffic.terms(
            made.CONFIG, made.LAYOUT, made.BATCH, axes={name: ring(name) for name in AXES}
        )
    )
    assert sent == {axes: size for axes, size in expected.items() if size}
    assert not [entry for entry in entries if entry.conditional or entry.unbounded]
    assert {entry.kind for entry in entries} == {
        "collective-permute",
        "all-reduce",
    }  # the latter: lax.pmax of the logits
    loops = [
        line
        for lines in hlo.module(text(kind)).computations.values()
        for line in lines
        if line.opcode == "while"
    ]
    assert [line.called[0][1] + line.called[1][1] for line in loops] == [
        5,
        5,
    ]  # two layers, forward and backward


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_step_is_replayed(kind, tmp_path):
    found = timeline.of(text(kind), machine(kind), AXES)
    assert (
        found.at_speed[0.5]
        > found.seconds
        == found.at_speed[1.0]
        > found.at_speed[2.0]
        > found.compute
        > 0
    )
    assert set(found.exposed_along) == {"data", "tensor"}
    assert all(0 <= seconds <= found.exposed for seconds in found.exposed_along.values())
    assert found.unbounded == 0
    assert any(re.search(r"/parallax/(grads|tensor)\.py:\d+$", line) for line in found.waits)
    assert "exposed along data" in report.estimate(found, 1e-5)
    rows = draw.replay(found, tmp_path / "replay.svg")
    assert [line.split(" |")[0].strip() for line in rows.splitlines()] == [
        "compute",
        *dict.fromkeys(_rows(found)),
    ]
    draw.replay_trace(found, tmp_path / "replay.json")
    events = json.loads((tmp_path / "replay.json").read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "X"]) == len(found.events)
    assert (tmp_path / "replay.svg").stat().st_size > 1000


def _rows(found):
    return [event.row for event in found.events if event.row != "compute"]


def test_arguments_of_saved_steps_are_those_of_the_plan():
    """Exactly on the GPU; a TPU pads rows of odd sizes to its tiles."""
    planned = plan.memory(made.CONFIG, made.LAYOUT, hardware.H100, made.BATCH).arguments
    assert about("cuda")["memory"]["arguments"] == planned
    assert planned <= about("tpu")["memory"]["arguments"] <= 1.01 * planned


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["all_gather", "all_reduce"])
def test_message_and_local_copy_are_one_instruction(kind, what):
    """What a device sends and what it keeps is computed once: the product (gather), or the last sum
    before the gather.

    With JAX 0.10.2 both compilers compute it once without `pin_bits` too, so these programs say
    what is so, not that the guard is needed. That the reader would see two instructions is the next
    test's.
    """
    check_once(hlo.module(text(kind, what)), what)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["all_gather", "all_reduce"])
def test_a_copy_that_is_computed_again_is_seen(kind, what):
    """The same programs in which the local copy comes from another instruction: what a compiler
    without the guard may do."""
    with pytest.raises(AssertionError):
        check_once(hlo.module(computed_twice(text(kind, what), what)), what)


def computed_twice(program, what):
    """What the first message carries (gather), or what the last hop of the scatter brings (sum), is
    made twice."""
    lines = program.splitlines()
    where = {line.split(" = ")[0].split()[-1]: k for k, line in enumerate(lines) if " = " in line}
    if what == "all_gather":
        made = next(
            k for k, line in enumerate(lines) if " multiply(" in line and "= f32[64,128]" in line
        )
    else:
        entry = next(k for k, line in enumerate(lines) if line.startswith("ENTRY"))
        last = [
            name
            for name, k in where.items()
            if k > entry and " collective-permute-done(" in lines[k]
        ][6]
        made = next(
            k
            for k, line in enumerate(lines)
            if re.search(rf"\({re.escape(last)}\b.*kind=kLoop", line)
        )
    name = lines[made].split(" = ")[0].split()[-1]
    return "\n".join(
        [
            *lines[: made + 1],
            lines[made].replace(f"{name} =", f"{name}.again ="),
            *lines[made + 1 :],
        ]
    )


def check_once(program, what):
    lines = [line for each in program.computations.values() for line in each]
    if what == "all_gather":
        assert (
            len(
                [
                    line
                    for line in lines
                    if line.opcode == "multiply" and line.result.startswith("f32[")
                ]
            )
            == 1
        )
        return
    done = [line for line in program[program.entry] if line.opcode == "collective-permute-done"]
    last = done[6]  # of seven hops of the scatter; those of the gather follow
    users = [line for line in program[program.entry] if last.name in line.operands]
    assert len(done) == 14
    assert len(users) == 1, users


@pytest.mark.parametrize("what", ["ring", "psum"])
def test_messages_between_slices_are_read(what):
    """A program for two slices: 512 kB summed inside each, then 512 kB between each device and its
    twin in the other slice."""
    program, nbytes = text("tpu", f"slices_{what}"), 4 * 1024 * 128
    kind = {"ring": "collective-permute", "psum": "all-reduce"}[what]
    entries = {entry.axes: entry for entry in certificate.read(program, mesh.make(far=2, near=4))}
    assert {axes: (entry.kind, entry.bytes) for axes, entry in entries.items()} == {
        ("near",): ("all-reduce", nbytes),
        ("far",): (kind, nbytes),
    }
    assert entries["far",].hops == {"ring": 2, "psum": 1}[what]
    places = [(0, 0), (1, 0), (0, 1), (1, 1)]
    two = links.torus(hardware.TPU_V5E, 2 * places, [0] * 4 + [1] * 4)
    # Half there and half back, by eight devices; a ring both ways of four, in each of two slices.
    assert links.by_kind(program, two) == {"network": 8 * nbytes, "link": 2 * 4 * 3 * nbytes // 2}
    found = timeline.of(program, two, {"far": 2, "near": 4})
    assert found.exposed_along["far"] > nbytes / (1 / hardware.TPU_V5E.slow.beta)
    other = program.replace('"ONE_TO_ONE"', '"ALL_TO_ALL"').replace('"ALL_REDUCE"', '"ALL_TO_ALL"')
    with pytest.raises(
        ValueError, match="a collective between TPU slices that cannot be read: ALL_TO_ALL"
    ):
        hlo.module(other)


@dataclasses.dataclass(frozen=True)
class Numbered:
    """A device with the number that programs for several slices give it."""

    id: int


def numbered(ids, **sizes):
    devices = np.array([Numbered(number) for number in ids]).reshape(tuple(sizes.values()))
    return jax.sharding.Mesh(devices, tuple(sizes))


def slices_of_four(ids):
    """The machine of v5e slices of 2 x 2 chips, with the devices in this order."""
    places = [(number % 2, number // 2 % 2) for number in ids]
    groups = [number // 100_000 - 1 for number in ids]
    return links.torus(hardware.TPU_V5E, places, groups)._replace(numbers=tuple(ids))


def test_chips_of_slices_are_found_in_the_mesh():
    """A ring round two slices, each laid as a ring: chip 1 is at position 3. A hop is two permutes
    of the text, one inside the slices and one between them."""
    program, nbytes = text("tpu", "slices_halves"), 4 * 64 * 128
    ids = [number + chip for number in (100_000, 200_000) for chip in (0, 2, 3, 1)]
    (entry,) = entries = certificate.read(program, numbered(ids, data=8))
    assert (entry.axes, entry.count, entry.hops) == (("data",), 14, 14)
    predicted = {"data": cost.of(ring.all_reduce, nbytes, 8)}
    assert certificate.differences(entries, predicted) == []
    hop = 14 * nbytes // 8
    two = slices_of_four(ids)
    assert links.by_kind(program, two) == {"network": 2 * hop, "link": 6 * hop}
    assert set(timeline.of(program, two, {"data": 8}).exposed_along) == {"data"}
    with pytest.raises(ValueError, match="names device 100001, and the mesh has no device of this"):
        certificate.read(program, numbered([*ids[:3], 100_009, *ids[4:]], data=8))
    with pytest.raises(ValueError, match=r"slices of 4 devices, and the mesh has slices of \[3\]"):
        certificate.read(program, numbered([*ids[:3], *ids[4:7]], data=6))


INSIDE = """HloModule m, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0:T(128)} parameter(0)
  ROOT %y = f32[8]{0:T(128)} all-reduce(%x), replica_groups=GROUPS, use_global_device_ids=true
}
"""


@pytest.mark.parametrize("groups", ["{{0,1,2,3}}", "{}"])
@pytest.mark.parametrize("far_first", [True, False])
def test_messages_inside_all_slices_count(groups, far_first):
    """A text for several slices that has no messages between them; the slices follow each other in
    the mesh, or alternate."""
    ids = np.array([[100_000 + k for k in range(4)], [200_000 + k for k in range(4)]])
    sizes = {"far": 2, "near": 4} if far_first else {"near": 4, "far": 2}
    ids = [int(number) for number in (ids if far_first else ids.T).flat]
    program = INSIDE.replace("GROUPS", groups)
    (entry,) = certificate.read(program, numbered(ids, **sizes))
    assert entry.axes == ("near",)
    sent = {"link": 2 * 4 * 2 * 3 * 32 // 4}
    machine = slices_of_four(ids)
    assert links.by_kind(program, machine) == sent
    assert links.by_kind(program, machine._replace(numbers=())) == sent
    assert set(timeline.of(program, machine, sizes).exposed_along) == {"near"}


def test_fusions_of_an_asynchronous_collective_are_one_message():
    """Two of the three gathers of weights of 8 MB are hidden by the products before theirs."""
    program, nbytes = text("tpu", "hidden"), 3 * 2 * 2048 * 2048
    (entry,) = certificate.read(program, mesh.make(data=8))
    assert (entry.kind, entry.count, entry.bytes, entry.hops) == ("all-gather", 3, nbytes, 1)
    machine = links.torus(hardware.TPU_V5E, [(k // 4, min(k, 7 - k)) for k in range(8)])
    assert links.by_kind(program, machine) == {"link": 7 * nbytes}
    found = timeline.of(program, machine, {"data": 8})
    first, *others = [event for event in found.events if event.row == "data"]
    assert [event.name.partition(".")[0] for event in others] == 2 * ["async-collective-start"]
    assert first.stop - first.start < sum(found.waits.values()) + 1e-9 < 1e-4
    (line,) = found.waits
    assert "make_compiled_fixtures.py:" in line
    products = [event for event in found.events if "fusion" in event.name]
    for message, product in zip(others, products[:2], strict=True):
        assert product.start <= message.start < message.stop < product.stop
    # A gather of what was computed behind another one does not wait for that one.
    apart = program.replace("%all-gather.24,", "%copy-done,").replace("(%copy.6)", "(%fusion.7)")
    assert apart.count("(%fusion.7)") == 1 + program.count("(%fusion.7)")
    assert certificate.read(apart, mesh.make(data=8))[0].hops == 1


def test_devices_of_a_chip_share_its_port_to_the_network():
    places = [(k // 2 % 4 // 2, k // 2 % 2) for k in range(16)]  # two on each chip
    two = links.torus(hardware.TPU7X, places, [k // 8 for k in range(16)])
    busy, _ = two.crossing({(k, k + 8): 12.5e9 for k in range(8)})
    assert max(busy.values()) == pytest.approx(2.0)
    planned = hardware.named("tpu7x:2x2x1").for_devices(8)
    assert max(busy.values()) == pytest.approx(12.5e9 * planned.slow.beta)


@pytest.mark.parametrize(("dtype", "rate"), [("bf16", 312e12), ("f32", 156e12), ("f64", 156e12)])
def test_products_of_a_gpu_take_the_rate_of_their_type(dtype, rate):
    product = """%fused (x: T[8192,8192]) -> T[8192,8192] {
  %x = T[8192,8192]{1,0} parameter(0)
  ROOT %y = T[8192,8192]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
ENTRY %main (w: T[8192,8192]) -> T[8192,8192] {
  %w = T[8192,8192]{1,0} parameter(0)
  ROOT %f = T[8192,8192]{1,0} fusion(%w), kind=kOutput, calls=%fused
}""".replace("T[", f"{dtype}[")
    (found,) = costly.instructions(product, hardware.A100)
    assert found.seconds == pytest.approx(2 * 8192**3 / (rate * hardware.A100.efficiency))


@pytest.mark.parametrize(
    ("metadata", "line"),
    [('metadata={source_file="/a/b.py" source_line=7}', "/a/b.py:7"), ("", timeline.UNKNOWN)],
)
def test_a_wait_has_the_line_of_the_collective_in_a_fusion(metadata, line):
    program = f"""HloModule m, is_scheduled=true

%fused (x: f32[250000]) -> f32[250000] {{
  %x = f32[250000]{{0:T(128)}} parameter(0)
  ROOT %y = f32[250000] collective-permute(%x), source_target_pairs={{{{0,1}}}}, {metadata}
}}

ENTRY %main (x: f32[250000]) -> f32[250000] {{
  %x = f32[250000]{{0:T(128)}} parameter(0)
  ROOT %f = f32[250000]{{0:T(128)}} fusion(%x), kind=kCustom, calls=%fused
}}
"""
    found = timeline.of(program, links.torus(hardware.TPU_V5E, [(0, 0), (1, 0)]), {"x": 2})
    assert found.waits == {line: pytest.approx(found.exposed)}
    assert found.exposed > 0


@pytest.mark.parametrize("shape", ["[]", "[4]"])
def test_a_loops_test_of_a_long_sum_is_read_at_once(shape):
    """Each summand is read by two instructions: 2 ** 64 paths, or 4000 instructions in a row."""
    depth = 64 if shape == "[]" else 4000
    chain = [f"  %c{k} = s32{shape} add(%c{k - 1}, %c{k - 1})" for k in range(1, depth + 1)]
    chain[0] = f"  %c1 = s32{shape} fusion(%next, %step), kind=kLoop, calls=%sum"
    last = f"  %moved = s32[] fusion(%c{depth}, %step), kind=kLoop, calls=%sum"
    before = "  %moved = s32[] copy(%next)"
    program = LOOP.replace(before, "\n".join([*chain, last]))
    assert program != LOOP
    for word, number in {"FIRST": "constant(0)", "STEP": "1", "BOUND": "7"}.items():
        program = program.replace(word, number)
    (loop,) = [
        line
        for line in hlo.module(program.replace("DIRECTION", "LT"))["main"]
        if line.opcode == "while"
    ]
    assert dict(loop.called) == {"test": 0, "trip": 0}


def test_a_step_without_work_is_reported():
    """Its text does not tell the platform; and one of its arguments is an array, on no mesh."""
    there = targets.Target("8 x h100", "h100", hardware.H100, tuple(jax.devices()), 1)
    world = mesh.make(data=8)
    shape = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=mesh.shardings(P("data"), world))
    idle = jax.jit(lambda scale, x: jnp.zeros(()))
    program = targets.compile(idle, jnp.float32(3), shape, target=there)
    assert program.mesh == world
    assert "8 devices of H100, data=8" in report.table(program)
    nothing = timeline.Timeline(0.0, 0.0, {}, dict.fromkeys(timeline.SPEEDS, 0.0), {}, [], 0)
    assert "links 0.5 x: 0 ms, exposed 0 ms (0.0%)" in report.estimate(nothing)
    with pytest.raises(ValueError, match="got shapes without a sharding"):
        targets.compile(idle, jnp.float32(3), jnp.ones(8), target=there)


def test_operations_and_bytes_of_a_gpu_program():
    product = """ENTRY %main (x: f32[8,16], w: f32[16,32]) -> f32[8,32] {
  %x = f32[8,16]{1,0} parameter(0)
  %w = f32[16,32]{1,0} parameter(1)
  ROOT %y = f32[8,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}"""
    program = hlo.module(product)
    costs = seconds.Costs(program, hardware.H100, 1)
    (dot,) = [line for line in program["main"] if line.opcode == "dot"]
    assert costs.operations(dot) == 2 * 8 * 16 * 32
    assert costs.traffic(dot) == 4 * (8 * 16 + 16 * 32 + 8 * 32)


def test_a_fused_slice_reads_the_slice_and_its_whole_index():
    sliced = """%fused (big: f32[64,8], i: s32[]) -> f32[1,8] {
  %big = f32[64,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,8]{1,0} dynamic-slice(%big, %i, %zero), dynamic_slice_sizes={1,8}
}
ENTRY %main (x: f32[64,8], n: s32[]) -> f32[1,8] {
  %x = f32[64,8]{1,0} parameter(0)
  %n = s32[] parameter(1)
  ROOT %y = f32[1,8]{1,0} fusion(%x, %n), kind=kLoop, calls=%fused
}"""
    program = hlo.module(sliced)
    fusion = program["main"][-1]
    row, index = 4 * 8, 4
    assert seconds.Costs(program, hardware.H100, 1).traffic(fusion) == row + index + row


def test_two_fused_updates_of_one_array_write_both_updates():
    updated = """%fused (big: f32[64,8], row: f32[1,8], i: s32[]) -> f32[64,8] {
  %big = f32[64,8]{1,0} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %once = f32[64,8]{1,0} dynamic-update-slice(%big, %row, %zero, %zero)
  ROOT %twice = f32[64,8]{1,0} dynamic-update-slice(%once, %row, %i, %zero)
}
ENTRY %main (x: f32[64,8], r: f32[1,8], n: s32[]) -> f32[64,8] {
  %x = f32[64,8]{1,0} parameter(0)
  %r = f32[1,8]{1,0} parameter(1)
  %n = s32[] parameter(2)
  ROOT %y = f32[64,8]{1,0} fusion(%x, %r, %n), kind=kLoop, calls=%fused
}"""
    program = hlo.module(updated)
    row, index = 4 * 8, 4
    written, read = 2 * row, row + index
    costs = seconds.Costs(program, hardware.H100, 1)
    assert costs.traffic(program["main"][-1]) == written + read


def test_messages_that_overlap_are_on_threads_of_their_own(tmp_path):
    spans = [(0, 10), (3, 13), (10, 12), (13, 15)]
    events = [timeline.Event("data", f"start.{k}", *span, "") for k, span in enumerate(spans)]
    found = timeline.of(text(KINDS[0]), machine(KINDS[0]), AXES)
    draw.replay_trace(found._replace(events=events), tmp_path / "replay.json")
    written = json.loads((tmp_path / "replay.json").read_text())["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in written if each["ph"] == "M"}
    assert names == {0: "compute", 1: "data", 2: "data"}
    threads = {each["name"]: each["tid"] for each in written if each["ph"] == "X"}
    assert threads == {"start.0": 1, "start.1": 2, "start.2": 1, "start.3": 1}


def test_refusals(capsys):
    with pytest.raises(
        ValueError,
        match=r"needs a machine with one of the chips a100, .*v4, v5e.*; got 'v9:2x2'\. "
        r"Examples: v5e:2x4",
    ):
        targets.target("v9:2x2")
    with pytest.raises(
        ValueError, match="'v5e' is no machine: a TPU needs the sizes of its topology"
    ):
        targets.target("v5e")
    with pytest.raises(
        ValueError, match="needs a program compiled for tpu; this one was compiled for cuda"
    ):
        timeline.of(text("cuda"), machine("tpu"), AXES)
    program = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
    with pytest.raises(
        ValueError, match="needs a program compiled for cuda; this one was compiled for cpu"
    ):
        timeline.of(program, links.switch(hardware.H100, 1), {"data": 1})
    with pytest.raises(ValueError, match="needs axes that multiply to the machine's 8 devices"):
        timeline.of(text("tpu"), machine("tpu"), {"data": 4})
    for devices in (4, 16):
        other = links.torus(hardware.TPU_V5E, [(k // 4, k % 4) for k in range(devices)])
        words = f"compiled for 8 devices, and the machine has {devices}"
        with pytest.raises(ValueError, match=words):
            timeline.of(text("tpu"), other, {"data": devices})
        with pytest.raises(ValueError, match=words):
            links.by_kind(text("tpu"), other)
    if not importlib.util.find_spec("libtpu"):
        with pytest.raises(
            ImportError, match=r'installed, libtpu\. .* run: pip install -e "\.\[tpu\]"'
        ):
            targets.target("v5e:2x4")
        assert (
            main(["compile", "--model", "tiny", "--target", "v5e:2x4", "--layout", "data=8"]) == 2
        )
        assert 'pip install -e ".[tpu]"' in capsys.readouterr().err


def test_quiet_discards_a_line_that_has_not_ended(monkeypatch, capfd):
    with open(2, "w", closefd=False) as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        with targets.quiet():
            stderr.write("the first half of a line")
        stderr.write("told")
        stderr.flush()
        assert capfd.readouterr().err == "told"
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("name", "platforms"), [("v5e:2x4", ["cpu"]), ("8 x h100", []), ("no chip", ["cpu"])]
)
def test_only_for_gpus_jax_looks_for_a_gpu(monkeypatch, name, platforms):
    chosen = []
    monkeypatch.setattr(jax.config, "update", lambda option, value: chosen.append(value))
    targets.choose_platform(name)
    assert chosen == platforms


@pytest.mark.parametrize("installed", ["jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13", ""])
def test_either_version_of_cuda_has_the_gpus_compiler(monkeypatch, installed):
    """Without both, the error says what to install."""

    def import_module(name):
        if name.startswith("jax_plugins") and name != installed:
            raise ImportError(name)

    monkeypatch.setattr(targets.importlib, "import_module", import_module)
    topology = SimpleNamespace(get_topology_desc=lambda **_: SimpleNamespace(devices=range(8)))
    monkeypatch.setattr(targets, "_topologies", lambda: topology)
    if installed:
        assert targets.target("8 x h100").devices == tuple(range(8))
    else:
        with pytest.raises(
            ImportError, match=r'xla_cuda12\. .* run: pip install -e "\.\[gpu-compile\]"'
        ):
            targets.target("8 x h100")


@pytest.mark.parametrize(
    "said",
    [
        "Ran out of memory on HBM, the total memory required for HLO temporaries (48.00G) "
        "exceeds available HBM (15.75G).",
        "Ran out of memory in memory space hbm. Used 48.00G of 15.75G hbm. Exceeded hbm capacity "
        "by 32.25G.",
    ],
)
def test_a_step_that_does_not_fit_says_what_it_needs(said):
    class Train:
        def lower(self, *shapes):
            return self

        def compile(self):
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {said}")

    there = targets.Target("v5e:2x4", "v5e", hardware.TPU_V5E, tuple(jax.devices()), 1)
    shape = jax.ShapeDtypeStruct(
        (8,), jnp.float32, sharding=mesh.shardings(P("data"), mesh.make(data=8))
    )
    with pytest.raises(
        ValueError,
        match=(
            r"does not fit in the memory of a device of v5e:2x4: it needs 48.00G of 15.75G\. "
            r"Split it"
        ),
    ):
        targets.compile(Train(), shape, target=there)


def test_sources_are_found_in_both_notations():
    assert source_lines.read("")('metadata={source_file="/a/b.py" source_line=7}') == "/a/b.py:7"
    assert source_lines.read("")("") == ""


@pytest.mark.targets
class TestCompiled:
    """Where the TPU's compiler is: `pip install -e ".[test,tpu]"`, then
    `pytest -m targets -n 0`."""

    def test_a_small_step(self):
        # As users have it: AdamW mixes types, and a TPU counts in 64 bits by pairs of numbers,
        # which `trips` does not follow.
        with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
            program = made.step(targets.target("v5e:2x4"))
        assert program.fits
        assert certificate.read(program.text, program.mesh) == certificate.read(
            text("tpu"), mesh.make(**AXES)
        )
        assert "v5e:2x4: 8 devices of TPU v5e, data=4, tensor=2" in report.table(
            program, operations=1e9
        )

    def test_two_slices(self):
        program = made.between(targets.target("2 x v5e:2x2"), "ring")
        assert certificate.read(program.text, program.mesh) == certificate.read(
            text("tpu", "slices_ring"), mesh.make(far=2, near=4)
        )
        assert set(program.by_link()) == {"link", "network"}

    def test_a_ring_round_two_slices(self):
        program = made.halves(targets.target("2 x v5e:2x2"))
        saved = certificate.read(text("tpu", "slices_halves"), program.mesh)
        assert program.certificate() == saved
        assert set(program.timeline().exposed_along) == {"data"}

    def test_gathers_behind_products(self):
        program = made.hidden(targets.target("v5e:2x4"))
        assert program.certificate() == certificate.read(text("tpu", "hidden"), mesh.make(data=8))

    @pytest.mark.parametrize(
        ("name", "sizes"),
        [
            ("v5e:2x4", {"data": 8}),
            ("v5e:8x8", {"data": 64}),
            ("v5p:2x2x2", {"data": 2, "stage": 2, "tensor": 2}),
            ("v5p:4x4x4", {"data": 8, "tensor": 8}),
            ("v4:4x4x4", {"data": 16, "tensor": 8}),
            ("tpu7x:2x2x1", {"data": 4, "tensor": 2}),
        ],
    )
    def test_rings_are_of_neighbours(self, name, sizes):
        there = targets.target(name)
        hops = links.of_a_hop(there.machine(mesh.make(devices=there.devices, **sizes)), sizes)
        assert max(hops.values()) <= 1.0

    @pytest.mark.parametrize("what", ["all_gather", "all_reduce"])
    def test_computed_once(self, what):
        check_once(hlo.module(made.guarded(targets.target("v5e:2x4"), what).text), what)

    @pytest.mark.parametrize("how", ["averaged", "summed", "reduced in the backward pass"])
    def test_sums_of_bfloat16_gradients_stay_wide(self, how):
        """A compiler may add in bfloat16, if a program uses only sums that are rounded to it."""
        there = targets.target("v5e:2x4")
        world = mesh.make(devices=there.devices, data=8)
        block = lambda weight, x: jnp.tanh(x @ weight)
        if how == "reduced in the backward pass":
            block = grads.reduced_in_backward(block, "data")

        def loss(weights, x):
            x = jax.lax.scan(lambda x, weight: (block(weight, x), None), x, weights)[0]
            return jnp.mean(x.astype(jnp.float32) ** 2)

        reduce = grads.summed if how == "summed" else grads.averaged
        reduced = (lambda weights: weights) if "pass" in how else None
        grad = reduce(jax.value_and_grad(loss), "data", reduced=reduced)
        step = mesh.spmd(
            lambda weights, x: grad(weights, x)[1],
            mesh=world,
            in_specs=(P(), P("data")),
            out_specs=P(),
        )
        shapes = (
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=mesh.shardings(spec, world))
            for shape, spec in (((4, 128, 128), P()), ((1024, 128), P("data")))
        )
        program = targets.compile(jax.jit(step), *shapes, target=there)
        sums = re.findall(r"(\w+)\[(?:4,)?128,128\]\S* all-reduce(?:-start)?\(", program.text)
        assert sums == ["f32"]

    def test_refusals(self, capfd):
        with pytest.raises(ValueError, match=r"the compiler has no 'v5e:3x5'"):
            targets.target("v5e:3x5")
        there = targets.target("v5e:2x4")
        with pytest.raises(
            ValueError,
            match="needs shapes whose shardings are on devices of v5e:2x4; got shapes without",
        ):
            targets.compile(
                jax.jit(lambda x: x), jax.ShapeDtypeStruct((8,), jnp.float32), target=there
            )
        world = mesh.make(devices=there.devices, data=8)
        huge = jax.ShapeDtypeStruct(
            (8, 6, 2**30), jnp.float32, sharding=mesh.shardings(P("data"), world)
        )
        with pytest.raises(
            ValueError, match=r"does not fit in the memory of a device of v5e:2x4: it needs .*G of"
        ):
            targets.compile(jax.jit(jnp.sin), huge, target=there)
        assert capfd.readouterr().err == ""
        assert (
            main(["compile", "--model", "tiny", "--target", "v5e:2x4", "--layout", "data=4"]) == 2
        )


def test_fixtures_name_no_folder_of_a_machine():
    for path in sorted(Path(made.FOLDER).glob("*.gz")):
        folders = set(re.findall(r'"(/[^/"]*)/', gzip.decompress(path.read_bytes()).decode()))
        assert folders <= {"/src"}, folders
