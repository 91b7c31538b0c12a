"""Pictures and tables of which device holds and sends what, on layouts where the answer is known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_draw import svg_text

from parallax import draw, mesh, plan
from parallax.compiled import certificate
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.plan import hardware


def shaped(shape, spec, **axes):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh.make(**axes), spec))


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


def test_sharding_over_two_axes(tmp_path):
    assert draw.sharding(
        shaped((16, 64), P("data", "tensor"), data=4, tensor=2), tmp_path / "a.svg"
    ).splitlines() == [
        "float32[16, 64] (data, tensor): 8 blocks, 512 B of 4.1 kB on each of 8 devices",
        "dim 0  dim 1 0:32  dim 1 32:64",
        "  0:4           0            1",
        "  4:8           2            3",
        " 8:12           4            5",
        "12:16           6            7",
    ]
    words = svg_text(tmp_path / "a.svg")
    assert {"dim 0 of 16, over data", "dim 1 of 64, over tensor", "8:12", "32:64"} <= set(words)


def test_sharding_with_replicas():
    lines = draw.sharding(shaped((16, 64), P(None, "tensor"), data=4, tensor=2)).splitlines()
    assert lines[0].endswith("(-, tensor): 2 blocks, 2.05 kB of 4.1 kB on each of 8 devices")
    assert lines[2].split() == ["0,2,4,6", "1,3,5,7"]


def test_sharding_of_dims_in_another_order_than_the_axes(tmp_path):
    text = draw.sharding(
        shaped((8, 16, 64), P("stage", "data", "tensor"), data=2, stage=2, tensor=2),
        tmp_path / "a.png",
    )
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["0:4", "0:8", "0", "1"],
        ["0:4", "8:16", "4", "5"],
        ["4:8", "0:8", "2", "3"],
        ["4:8", "8:16", "6", "7"],
    ]


@pytest.mark.parametrize(
    ("shape", "spec", "cells"),
    [
        ((8,), P(), [["0,1,2,3,4,5,6,7"]]),
        ((), P(), [["0,1,2,3,4,5,6,7"]]),
        (
            (16,),
            P(("tensor", "data")),
            [[f"{2 * k}:{2 * k + 2}", n] for k, n in enumerate("02461357")],
        ),
    ],
)
def test_sharding_in_one_column(tmp_path, shape, spec, cells):
    text = draw.sharding(shaped(shape, spec, data=4, tensor=2), tmp_path / "a.png")
    assert [line.split() for line in text.splitlines()[2:]] == cells


def test_sharding_says_what_the_shards_of_an_array_are():
    devices = mesh.make(data=4, tensor=2)
    array = mesh.place(np.arange(64.0).reshape(8, 8), P("tensor", "data"), devices)
    rows = [line.split() for line in draw.sharding(array).splitlines()[2:]]
    where = {
        row * 4 + column: int(number)
        for row, line in enumerate(rows)
        for column, number in enumerate(line[1:])
    }
    for shard in array.addressable_shards:
        row, column = (part.start or 0 for part in shard.index)
        assert where[row // 4 * 4 + column // 2] == shard.device.id
    assert (
        draw.sharding(jax.device_put(np.ones(5), jax.devices()[3])).splitlines()[-1].strip() == "3"
    )


def test_an_array_without_a_sharding():
    with pytest.raises(
        ValueError,
        match=r"needs an array with a sharding.*got ShapeDtypeStruct without one. Place it with mesh",
    ):
        draw.sharding(jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(ValueError, match=r"^down: needs an array with a sharding"):
        draw.model({"down": np.ones(2)})


def test_model(tmp_path):
    devices = mesh.make(data=4, tensor=2)
    leaf = lambda shape, spec: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=NamedSharding(devices, spec)
    )
    tree = {
        "bias": leaf((), P()),
        "down": leaf((16, 64), P(None, "tensor")),
        "up": leaf((16, 64), P("data", "tensor")),
        "f": len,
    }
    assert [line.split() for line in draw.model(tree, tmp_path / "a.svg").splitlines()[1:]] == [
        ["bias", "scalar", "float32", "whole", "4", "4"],
        ["down", "16", "x", "64", "float32", "(-,", "tensor)", "4,096", "2,048"],
        ["up", "16", "x", "64", "float32", "(data,", "tensor)", "4,096", "512"],
        ["3", "leaves", "8,196", "2,564"],
    ]
    words = svg_text(tmp_path / "a.svg")
    assert {
        "bias",
        "down",
        "up",
        "512 B of 4.1 kB",
        "on each device 2.56 kB of 8.2 kB",
        "device",
    } <= set(words)


def test_bytes_by_kind(tmp_path):
    plans = {
        "data 8": {"parameters": 498e6, "loss": 2e6},
        "zero 3": {"parameters": 62e6, "gathered": 38e6},
    }
    assert draw.bytes_by_kind(plans, tmp_path / "a.svg", limit=400e6).splitlines() == [
        "on a device  data 8  zero 3",
        "parameters   498 MB   62 MB",
        "loss           2 MB       -",
        "gathered          -   38 MB",
        "in all       500 MB  100 MB",
        "of 400 MB      125%     25%",
    ]
    words = svg_text(tmp_path / "a.svg")
    assert {
        "data 8",
        "zero 3",
        "parameters",
        "loss",
        "gathered",
        "MB on a device",
        "a device has 400 MB",
        "500 MB",
    } <= set(words)
    assert "2 MB" not in words  # no room in so low a box


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(data=8, zero=3), Layout(stage=4, tensor=2, microbatches=8)]
)
def test_kinds_of_a_plan_add_up_to_its_peak(layout):
    planned = plan.plan(gpt2.SMALL, layout, hardware.A100, batch=64)
    kinds = planned.memory.at_peak
    assert sum(kinds.values()) == pytest.approx(planned.memory.peak)
    assert {"parameters", "optimizer state", "batch", "activations"} <= set(kinds)


def test_balance(tmp_path):
    loads = {"contiguous": [1, 2, 3, 4], "zigzag": [2.5] * 4}
    assert [line.split() for line in draw.balance(loads, tmp_path / "a.svg").splitlines()] == [
        ["least", "mean", "most", "even"],
        ["contiguous", "1", "2.5", "4", "62%"],
        ["zigzag", "2.5", "2.5", "2.5", "100%"],
    ]
    assert "contiguous: 62% even" in (tmp_path / "a.svg").read_text()
    with pytest.raises(ValueError, match="needs a load above 0 of each name; 'idle' has"):
        draw.balance({"idle": [0, 0]})


def test_traffic(tmp_path):
    sent = {("data",): 3.3e6, "tensor": 12e6, ("data", "tensor"): 40}
    assert draw.traffic(sent, tmp_path / "a.svg").splitlines() == [
        "along           a step  share",
        "tensor           12 MB  78.4%",
        "data            3.3 MB  21.6%",
        "data x tensor     40 B   0.0%",
        "in all         15.3 MB",
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
    draw.traffic({}, tmp_path / "nothing.png")
