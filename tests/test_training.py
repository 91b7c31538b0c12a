"""A step that is not finite changes nothing and is counted; seconds and metrics survive a
restart."""

import errno
import functools
import io
import json
import math
import os
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from reference import FLOAT64

from parallax import grads, mesh, precision, rules, step
from parallax.collectives import ring, xla
from parallax.run import metrics

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from gpt2_run import trackers

BAD = {"nan": math.nan, "inf": math.inf, "overflow": 1e300}


def make_step():
    """A linear model over data 4 x tensor 2, its weights split over tensor; a batch's own numbers
    can break it."""
    axes = mesh.make(data=4, tensor=2)

    def loss(weights, batch):
        inputs, targets = batch
        partial = jnp.sum(inputs * weights["w"][None], axis=1)
        return jnp.mean((jax.lax.psum(partial, "tensor") - targets) ** 2)

    optimizer = optax.adam(0.1)
    grad = grads.averaged(jax.value_and_grad(loss), ring("data"))
    state, specs = step.init(
        lambda: {"w": jnp.ones(4, FLOAT64)}, optimizer, rules.match("w", P("tensor")), axes
    )
    local = step.make(grad, optimizer, reduce_norm_over=[ring("data")])
    train = mesh.spmd(
        local, mesh=axes, in_specs=(specs, (P("data", "tensor"), P("data"))), out_specs=(specs, P())
    )
    return state, jax.jit(train)


def batch(number, bad=None):
    generator = np.random.default_rng(number)
    inputs = generator.standard_normal((8, 4))
    if bad is not None:
        inputs[5, 3] = bad  # of one device alone
    return inputs, inputs.sum(1)


@functools.cache
def fresh():
    with jax.numpy_dtype_promotion("standard"):
        return make_step()


def train(numbers, bad=None):
    state, one = fresh()
    infos = []
    with jax.numpy_dtype_promotion("standard"):
        for number in numbers:
            state, info = jax.block_until_ready(
                one(state, batch(number, BAD.get(bad) if number == 2 else None))
            )
            infos.append(info)
    return state, infos


@pytest.mark.parametrize("bad", BAD)
def test_a_step_that_is_not_finite_changes_its_number_alone(bad):
    broken, infos = train([0, 1, 2, 3], bad)
    without, _ = train([0, 1, 3])
    assert int(broken.step) == 4
    jax.tree.map(
        np.testing.assert_array_equal,
        (broken.model, broken.optimizer),
        (without.model, without.optimizer),
    )
    skipped = metrics.Skipped(1)
    assert [skipped.count(i, info) for i, info in enumerate(infos)] == [False, False, True, False]


def test_a_loss_that_is_not_finite_skips_its_step():
    """Though its gradients are finite."""
    params, optimizer = jnp.ones(3), optax.sgd(0.1)
    one = step.make(lambda params, batch: (jnp.asarray(math.inf), params), optimizer)
    after, info = one(step.State(params, optimizer.init(params), jnp.zeros((), jnp.int32)), None)
    assert info.skipped
    np.testing.assert_array_equal(after.model, params)


def test_the_budget_holds_over_restarts():
    info = step.Info(jnp.asarray(jnp.nan), jnp.asarray(1.0), jnp.asarray(True))
    skipped = metrics.Skipped(3, [4, 9])
    assert skipped.count(12, info)
    with pytest.raises(
        metrics.OverBudget,
        match=r"step 15: the loss is nan .* 4 steps .* \(the last ones: 4, 9, 12, 15\).*is 3",
    ):
        skipped.count(15, info)


def test_probes_of_a_larger_loss_scale_are_no_faults():
    """Every 2,000 good steps the scale is raised, and may be too large: 20 times in 40,000 steps of
    a converged float16 run."""
    good, bad = (
        step.Info(jnp.asarray(1.0), jnp.asarray(1.0), jnp.asarray(skips)) for skips in (False, True)
    )
    skipped, scale = metrics.Skipped(2), precision.Scale(2.0)
    for number in range(20):
        scale = precision.adjusted(scale, jnp.asarray(True), interval=1)
        assert not skipped.count(2 * number, good, scale)
        scale = precision.adjusted(scale, jnp.asarray(False))
        assert skipped.count(2 * number + 1, bad, scale)
    assert skipped.steps == []
    for number in (100, 101, 102):  # at 2, which falls to 1; then at 1
        scale = precision.adjusted(scale, jnp.asarray(False))
        assert skipped.count(number, bad, scale)
    assert skipped.steps == [101, 102]
    with pytest.raises(metrics.OverBudget, match=r"step 103: .* 3 steps had a loss"):
        skipped.count(103, bad, precision.adjusted(scale, jnp.asarray(False)))


# What the update makes


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("of", ["parameters", "state"])
def test_an_update_that_is_not_finite_changes_nothing_on_any_device(of, shards):
    """One number of one shard overflows, of finite gradients; what was infinite before stays so,
    and is no fault."""
    devices = mesh.make(devices=jax.devices()[:shards], data=shards)
    large = lambda g: jnp.where(g > 50, jnp.inf, g)

    def update(gradients, state, params):
        kept = (
            state[0] - 1,
            jax.tree.map(lambda g, s: s + (large(g) if of == "state" else g), gradients, state[1]),
        )
        return jax.tree.map(lambda g: large(g) if of == "parameters" else g, gradients), kept

    optimizer = optax.GradientTransformation(
        lambda params: (jnp.asarray(-jnp.inf), jnp.zeros_like(params)), update
    )
    specs = step.State(P("data"), (P(), P("data")), P())
    grad = lambda params, batch: (xla("data").all_reduce(jnp.sum(batch) * 0.0), batch)
    one = mesh.spmd(
        step.make(grad, optimizer),
        mesh=devices,
        in_specs=(specs, P("data")),
        out_specs=(specs, step.Info(P(), P(), P())),
    )
    params = mesh.place(np.ones(8, np.float32), P("data"), devices)
    state = step.State(
        params, (jnp.asarray(-jnp.inf), jnp.zeros_like(params)), jnp.zeros((), jnp.int32)
    )
    right = mesh.place(np.arange(8, dtype=np.float32), P("data"), devices)
    wrong = mesh.place(np.asarray([1, 99, 1, 1, 1, 1, 1, 1], np.float32), P("data"), devices)
    state, info = jax.jit(one)(state, right)
    assert not info.skipped
    after, info = jax.jit(one)(state, wrong)
    assert info.skipped
    assert np.isfinite(float(info.gradient_norm))
    jax.tree.map(
        np.testing.assert_array_equal,
        (after.model, after.optimizer),
        (state.model, state.optimizer),
    )
    assert int(after.step) == 2


# Time


def test_goodput_counts_what_was_lost_and_the_time_away(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(metrics.time, "time", lambda: now[0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])

    def spend(clock, name, seconds):
        with clock(name):
            now[0] += seconds

    clock = metrics.Clock()
    spend(clock, "steps", 30)
    spend(clock, "evaluation", 10)
    note = json.loads(json.dumps(clock.note()))  # as a checkpoint keeps it
    spend(clock, "steps", 20)  # lost
    now[0] += 40  # until the restart
    clock = metrics.Clock(note)
    spend(clock, "steps", 50)
    assert clock.seconds == {"steps": 80.0, "evaluation": 10.0}
    assert clock.goodput() == 80 / 150
    now[0] = 900  # the system's clock is set back, to before the run began
    assert clock.goodput() == 80 / 90
    assert metrics.Clock().goodput() == 0


# Metrics


def test_a_value_named_step_does_not_take_the_place_of_the_step(tmp_path):
    sink = metrics.jsonl(tmp_path / "metrics.jsonl")
    sink(7, {"step": 3.0, "loss": 1.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 7, "loss": 1.0}


def test_jsonl_goes_on_after_the_checkpoint(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    sink = metrics.jsonl(path)
    for number in range(1, 6):
        sink(number, {"loss": float(number)})
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    sink = metrics.jsonl(path, after=3)
    sink(4, {"loss": 40.0})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        *({"step": i, "loss": float(i)} for i in (1, 2, 3)),
        {"step": 4, "loss": 40.0},
    ]


def test_metrics_wait_while_the_storage_fails(tmp_path, monkeypatch):
    """A run ended where it could not write its numbers for a moment."""
    path, said, full = tmp_path / "metrics.jsonl", [], {3, 4}

    class Half(io.StringIO):  # the disk takes the first bytes of a line
        def close(self):
            if not self.closed:
                path.write_text(path.read_text() + self.getvalue()[:9])
                super().close()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(name, *rest, **options):
        return Half() if number in full else open(name, *rest, **options)

    monkeypatch.setattr(metrics, "open", opened, raising=False)
    sink = metrics.jsonl(path, say=said.append)
    for number in range(1, 7):
        sink(number, {"loss": float(number)})
    assert metrics.recorded(path) == [{"step": i, "loss": float(i)} for i in range(1, 7)]
    line = (
        "the numbers of step 3 were not written; No space left on device. They wait; the "
        "run goes on meanwhile."
    )
    assert said == [f"{path}: {line}"]
    full.add(7)
    number, sink = 7, metrics.jsonl(path, after=6, say=said.append, patience=0.0)
    with pytest.raises(
        OSError, match="the numbers of step 7 were not written; No space left on device"
    ):
        sink(7, {"loss": 7.0})
    assert metrics.recorded(path)[-1]["step"] == 6
    assert len(said) == 1  # not that the run goes on


@pytest.mark.parametrize(
    "left",
    [
        b'{"step": 3, "lo',
        b"\0" * 4096,
        b'{"step": 3, "loss": NaN}',
        b"\xff\xfe\n",
        b"[" * 200_000 + b"\n",
        b'{"step": "3"}\n',
    ],
)
def test_what_a_crash_left_of_the_metrics_is_cut_out_and_said(tmp_path, left):
    path, said = tmp_path / "metrics.jsonl", []
    path.write_bytes(b'{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0}\n' + left)
    metrics.jsonl(path, after=2, say=said.append)(3, {"loss": 3.0})
    assert metrics.recorded(path) == [{"step": i, "loss": float(i)} for i in (1, 2, 3)]
    assert said == [f"{path}: 1 line is not whole, and passed over."]
    assert metrics.recorded(tmp_path / "none") == []


def test_all_sinks_get_all_and_none_is_silent(tmp_path):
    seen = []
    metrics.to_all()(1, {"loss": 1.0})
    metrics.to_all(lambda *given: seen.append(given), metrics.jsonl(tmp_path / "a"))(
        1, {"loss": 1.0}
    )
    assert seen == [(1, {"loss": 1.0})]
    assert (tmp_path / "a").read_text() == '{"step": 1, "loss": 1.0}\n'


def test_tensorboard_gets_each_number(tmp_path, monkeypatch):
    calls = []

    class Writer:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def flush(self):
            calls.append("flush")

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=Writer))
    trackers.tensorboard(tmp_path, after=7)(8, {"loss": 1.0, "held_out": 2.0})
    assert calls == [(str(tmp_path), 8), ("loss", 1.0, 8), ("held_out", 2.0, 8), "flush"]


def test_wandb_goes_on_under_the_same_id(monkeypatch):
    calls = []

    class Session:
        def log(self, values, step):
            calls.append((values, step))

    def init(**options):
        calls.append(options)
        return Session()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    trackers.wandb("parallax", run="a", settings={"seed": 0})(3, {"loss": 1.0})
    assert calls == [
        {"project": "parallax", "id": "a", "resume": "allow", "config": {"seed": 0}},
        ({"loss": 1.0}, 3),
    ]


@pytest.mark.parametrize(
    ("package", "sink"),
    [
        ("tensorboardX", lambda: trackers.tensorboard("x")),
        ("wandb", lambda: trackers.wandb("x", run="y", settings={})),
    ],
)
def test_a_missing_package_is_named(monkeypatch, package, sink):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        sink()


# Profiles


@pytest.mark.parametrize(
    ("chosen", "ran", "expected"),
    [
        (range(2, 4), range(6), ["start 2", "stop 4"]),
        (range(2, 4), range(3, 6), ["start 3", "stop 4"]),
        (range(4, 9), range(6), ["start 4", "stop end"]),
        (range(0), range(6), []),
    ],
)
def test_chosen_steps_are_traced(monkeypatch, tmp_path, chosen, ran, expected):
    calls, now = [], [None]
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(f"start {now[0]}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append(f"stop {now[0]}"))
    with trackers.profiler(tmp_path, chosen) as begin:
        for now[0] in ran:
            begin(now[0])
        now[0] = "end"
    assert calls == expected


@pytest.mark.sweep(3, "wholes")
def test_a_trace_is_written(tmp_path):
    with trackers.profiler(tmp_path, range(1)) as begin:
        begin(0)
        jnp.ones(3).block_until_ready()
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_full_disk_is_told_with_the_step(tmp_path):
    sink = metrics.jsonl(tmp_path / "metrics.jsonl", patience=0.0)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(
        OSError,
        match=r"metrics\.jsonl: the numbers of step 1 were not written; No space left on device",
    ):
        sink(1, {"loss": 1.0})
