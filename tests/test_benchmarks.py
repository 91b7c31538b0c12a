"""Each benchmark runs and prints its tables, and what its parser reads off a compiled program is
what theory says."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_modules import load
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.collectives import ring

ROOT = Path(__file__).parent.parent


measure = load("measure")

RUNS = {
    "collectives": (
        ["--quick", "--devices", "4", "--rounds=1", "--picture={folder}/race.png"],
        [
            "4 devices of one process",
            "2 processes over gloo",
            "predicted ms",
            "to floor",
            "Who wins",
            "model off by",
            "Drawn in",
        ],
    ),
    "buckets": (
        ["--quick", "--processes=2", "--rounds=1"],
        [
            "A GPT-2 with 28 arrays of 117.5 kB in all, over 2 processes",
            "psum, leaf by leaf",
            "ring, buckets",
        ],
    ),
    "compiled": ([], ["local ms", "0.5 x links", "psum_kernel", "v5e:2x4"]),
    "experts": (
        ["--quick", "--rounds=1"],
        ["2 of 4 experts", "blocks of 128", "lax.ragged_dot", "exchanged, all", "c k < n = 8"],
    ),
    "simulate": (
        ["--sides", "2", "316", "--picture={folder}/simulate.png"],
        [
            "ring: each device",
            "torus: a square",
            "cluster: machines of 8",
            "99,856",
            "hierarchical, halving, ms",
            "Drawn in",
        ],
    ),
    "traces": (
        ["--picks=1,6"],
        ["2 of 2", "operations", "traced kB", "in the median", "of 2, equal: operations 2, sent 2"],
    ),
    "train_step": (
        ["--quick", "--data=2", "--layers=1", "--rounds=2"],
        ["a plain", "b ours", "c GSPMD", "d ours, psum", "e ours, ring", "of matrix rate", "(e/c)"],
    ),
    "schedules": (
        ["--stages=2", "--microbatches=4"],
        ["P = 2, M = 4", "F = I = W", "zero bubble, 2 chunks, 3 in flight", "V, 2 in flight"],
    ),
    "pipeline": (
        ["--quick", "--stages=2", "--layers=4", "--microbatches=4", "--rounds=2"],
        [
            "1F1B",
            "1F1B lockstep, remat",
            "interleaved",
            "GPipe",
            "naive twin",
            "one device",
            "M = 4",
        ],
    ),
    "checkpoint": (
        ["--quick"],
        [
            "A state of 8 MB in 10 arrays over 8 devices",
            "waits",
            "computes",
            "blocked",
            "Orbax alone",
            "restore",
        ],
    ),
    "fingerprint": (["--quick"], ["data 8", "ZeRO-1", "not compared", "1 of", "every 50"]),
    "scaling": (
        ["--quick", "--steps=1"],
        ["GPT-2 with 0.0 M parameters", "weak", "strong", "ours: two processes train"],
    ),
    "context": (
        ["--quick", "--rounds=1"],
        [
            "4 devices of one process",
            "jax.nn",
            "zigzag",
            "contiguous",
            "ulysses",
            "gathered",
            "1.125",
            "predicted MB moved",
        ],
    ),
    "islands": (
        ["--quick", "--rounds=1", "--every=2"],
        ["over two processes, 100 Mb/s by", "data parallelism", "islands, int8", "s measured"],
    ),
    "same_bits": (["--quick", "--layers=1"], ["By cells to ordinary", "data 8", "compile"]),
    "loss": (
        ["--quick", "--rounds=2", "--blocks", "16", "64"],
        ["plain", "blocks of 16", "predicted MB", "gradients differ by"],
    ),
}


LONG = (
    "traces",
    "buckets",
    "collectives",
    "fingerprint",
    "islands",
    "same_bits",
    "scaling",
    "train_step",
    "pipeline",
)


@pytest.mark.programs
@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in RUNS]
)
def test_prints_its_tables(name, tmp_path):
    flags, expected = RUNS[name]
    flags = [flag.format(folder=tmp_path) for flag in flags]
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", *flags]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for words in expected:
        assert words in ran.stdout, ran.stdout
    assert len(list(tmp_path.glob("*.png"))) == sum("png" in flag for flag in flags)


def compiled(f, n, x):
    over = mesh.make(x=n, devices=jax.devices()[:n])
    return jax.jit(mesh.spmd(f, mesh=over, in_specs=(P("x"),), out_specs=P())).lower(x).compile()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("turns", [1, 5])
def test_counts_what_runs_in_loops(n, turns):
    size = 6 * n

    def f(x):
        return lax.scan(
            lambda total, _: (total + ring.all_reduce(x + total, "x"), None),
            jnp.zeros(size),
            length=turns,
        )[0]

    sent = measure.collectives(compiled(f, n, jnp.ones(n * size)))
    assert sent == {
        "collective-permute": measure.Traffic(
            turns * 2 * (n - 1), turns * 2 * (n - 1) * size // n * 8
        )
    }


def test_reads_every_kind_of_array():
    sent = measure.collectives(
        compiled(lambda x: lax.psum((x, x[:3].astype(jnp.int8)), "x"), 4, jnp.ones(40))
    )
    assert sent["all-reduce"].bytes == 10 * 8 + 3


def test_rivals_take_turns():
    order = []
    rival = lambda name: lambda: order.append(name)
    seconds = measure.interleaved({"a": rival("a"), "b": rival("b")}, rounds=3)
    assert "".join(order) == "ab" + "ababab"
    assert [len(rounds) for rounds in seconds.values()] == [3, 3]
    assert measure.medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}


def test_copy_leaves_its_source_alone():
    x = jnp.arange(8.0)
    run = measure.copy(x)
    assert [np.asarray(run()).tolist() for _ in range(3)] == [list(range(1, 9))] * 3


@pytest.mark.programs
def test_failed_processes_tell_and_end():
    commands = [
        [sys.executable, "-c", text]
        for text in ("raise SystemExit('broken')", "import time; time.sleep(60)")
    ]
    with pytest.raises(RuntimeError, match="broken"):
        measure.run_together(commands, timeout=30)
    with pytest.raises(RuntimeError, match="ended, after 1 s"):
        measure.run_together(commands[1:], timeout=1)
