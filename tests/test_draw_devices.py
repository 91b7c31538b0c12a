"""Pictures and tables of which device holds and sends what, on layouts where the answer is known by
hand."""

import jax
import pytest
from test_draw import svg_text

from parallax import draw, hardware, mesh, plan
from parallax.compiled import certificate
from parallax.layout import Layout
from parallax.models import gpt2


def test_mesh(tmp_path):
    assert draw.mesh(mesh.make(data=2, stage=2, tensor=2), tmp_path / "a.svg").splitlines() == [
        "data=2 x stage=2 x tensor=2: 8 CPU devices",
        "data  stage  tensor 0  tensor 1",
        "   0      0         0         1",
        "   0      1         2         3",
        "   1      0         4         5",
        "   1      1         6         7",
    ]
    words = svg_text(tmp_path / "a.svg")
    assert [word for word in words if word.startswith("data ")] == ["data 0", "data 1"]
    assert words.count("stage") == words.count("tensor") == 2
    assert set("01234567") <= set(words)
    assert draw.mesh(mesh.make(data=8), tmp_path / "a.png").splitlines()[2].split() == list(
        "01234567"
    )
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_mesh_in_another_order():
    swapped = mesh.make(data=4, tensor=2, devices=jax.devices()[::-1])
    assert [line.split()[1:] for line in draw.mesh(swapped).splitlines()[2:]] == [
        ["7", "6"],
        ["5", "4"],
        ["3", "2"],
        ["1", "0"],
    ]


def test_bytes_by_kind(tmp_path):
    plans = {
        "data 8": {"parameters": 498e6, "loss": 2e6},
        "zero 3": {"parameters": 62e6, "gathered": 38e6},
    }
    assert draw.bytes_by_kind(plans, tmp_path / "a.svg").splitlines() == [
        "on a device  data 8  zero 3",
        "parameters   498 MB   62 MB",
        "loss           2 MB       -",
        "gathered          -   38 MB",
        "total        500 MB  100 MB",
    ]
    words = svg_text(tmp_path / "a.svg")
    assert {
        "data 8",
        "zero 3",
        "parameters",
        "loss",
        "gathered",
        "MB on a device",
        "500 MB",
    } <= set(words)
    assert "2 MB" not in words  # no room in so low a box


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(data=8, zero=3), Layout(stage=4, tensor=2, microbatches=8)]
)
def test_kinds_of_a_plan_add_up_to_its_peak(layout):
    planned = plan.plan(gpt2.SMALL, layout, hardware.A100, batch=64)
    kinds = planned.memory.at_peak
    assert sum(kinds.values()) == pytest.approx(planned.memory.peak)
    assert {"parameters", "optimizer state", "batch", "other temporaries"} <= set(kinds)


def test_traffic(tmp_path):
    sent = {("data",): 3.3e6, "tensor": 12e6, ("data", "tensor"): 40}
    assert draw.traffic(sent, tmp_path / "a.svg").splitlines() == [
        "along          per step  share",
        "tensor            12 MB  78.4%",
        "data             3.3 MB  21.6%",
        "data x tensor      40 B   0.0%",
        "total           15.3 MB",
    ]
    assert {"MB that a device sends in a step", "tensor", "data x tensor", "3.3 MB", "40 B"} <= set(
        svg_text(tmp_path / "a.svg")
    )
    entry = lambda axes, size: certificate.Entry("collective-permute", axes, 1, size, 1)
    entries = [entry(("data",), 10), entry(("tensor",), 30), entry(("data",), 50), entry((), 10)]
    assert [line.split()[-3:] for line in draw.traffic(entries).splitlines()[1:-1]] == [
        ["60", "B", "60.0%"],
        ["30", "B", "30.0%"],
        ["10", "B", "10.0%"],
    ]
    draw.traffic(entries, tmp_path / "entries.svg")
    assert "B of collectives' results in a step" in svg_text(tmp_path / "entries.svg")
    draw.traffic({}, tmp_path / "nothing.png")
