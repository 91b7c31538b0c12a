"""A guard against spikes: the step leaves all as it was, the run goes back, and on with other
batches, resumed or not."""

import contextlib
import json
import math
import re
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import untrained
from jax.sharding import PartitionSpec as P

from parallax import mesh, precision, step
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.precision import Scale
from parallax.run import fingerprint
from parallax.run.spikes import LEAST, WINDOW, Spiked, Spikes

# The step


@pytest.mark.parametrize("scale", [None, Scale(8.0)], ids=["plain", "scaled"])
def test_a_loss_above_the_limit_changes_nothing_and_compiles_nothing_anew(scale):
    traced = []

    def grad_of(scale):
        def grad(params, batch):
            traced.append(1)
            return jax.value_and_grad(lambda w: jnp.sum(w * batch))(params)

        return grad

    model = jnp.arange(1.0, 4.0)
    state = step.State(
        model, optax.sgd(0.1, momentum=0.9).init(model), jnp.zeros((), jnp.int32), scale
    )
    train = jax.jit(step.make(precision.ScaledGrad(grad_of), optax.sgd(0.1, momentum=0.9)))
    batch = jnp.ones(3)  # the loss is 6
    for limit, skipped in [
        (math.inf, False),
        (6.0, False),
        (5.9, True),
        (-math.inf, True),
        (math.nan, True),
    ]:
        new, info = train(state, batch, limit)
        assert bool(info.skipped) is skipped
        assert float(info.loss) == 6.0
        assert int(new.step) == 1
        assert bool(jnp.all(new.model == model)) is skipped
        same = jax.tree.map(lambda a, b: bool(jnp.all(a == b)), new.optimizer, state.optimizer)
        assert all(jax.tree.leaves(same)) is skipped
        if scale is not None:  # it overflowed nowhere
            assert (float(new.scale.value), int(new.scale.skipped)) == (8.0, 0)
    assert len(traced) == 1
    assert not train(state, batch)[1].skipped


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_loss_of_16_bits_is_compared_as_the_guard_does(dtype):
    """In bfloat16 the limit 3.0234375 would be rounded up, to this loss."""
    model = jnp.array([3.03125], dtype)
    train = step.make(jax.value_and_grad(lambda w, batch: jnp.sum(w * batch)), optax.sgd(0.1))
    begin = step.State(model, optax.sgd(0.1).init(model), jnp.zeros((), jnp.int32), None)
    for limit, skipped in [(3.0234375, True), (3.03124, True), (3.03125, False)]:
        _, info = jax.jit(train)(begin, jnp.ones(1, dtype), np.float32(limit))
        assert info.loss.dtype == dtype
        assert bool(info.skipped) is skipped is (float(info.loss) > limit)


@pytest.mark.sweep(30, "steps")
def test_a_decoders_step_over_a_mesh_takes_a_limit_as_data():
    config = gpt2.Config(
        layers=1, heads=2, width=8, context=4, vocabulary=16, vocabulary_multiple=8
    )
    layout = Layout(data=2, tensor=2)
    axes = mesh.make(**layout.axes, devices=jax.devices()[:4])
    prepared = decoder.train_step(
        gpt2.FAMILY, config, optax.sgd(0.1), layout, axes, batch=2, key=jax.random.key(0)
    )
    windows = jax.ShapeDtypeStruct((2, 5), jnp.int32, sharding=mesh.shardings(P("data"), axes))
    train = prepared.train.lower(prepared.shapes, windows, None, np.float32(0)).compile()
    batch = mesh.place(np.arange(10, dtype=np.int32).reshape(2, 5), P("data"), axes)
    first = jax.tree.map(np.array, prepared.init().model)
    for limit, skipped in [(np.float32(1.0), True), (np.float32(math.inf), False)]:
        state, info = train(prepared.init(), batch, None, limit)
        assert (bool(info.skipped), float(info.loss) > 2) == (skipped, True)
        same = jax.tree.map(np.array_equal, state.model, first)
        assert all(jax.tree.leaves(same)) is skipped


# The guard


def test_the_limit_is_a_multiple_of_the_running_median():
    spikes, losses = (
        Spikes(2.0, 3),
        [float(loss) for loss in np.random.default_rng(0).uniform(1, 1.9, 3 * WINDOW)],
    )
    for number, loss in enumerate(losses, start=1):
        assert (spikes.limit == math.inf) == (number <= LEAST)
        if number > LEAST:
            assert spikes.limit == np.float32(
                2 * statistics.median(losses[max(0, number - 1 - WINDOW) : number - 1])
            )
        assert not spikes.count(number, loss)
    before = spikes.limit
    assert spikes.count(len(losses) + 1, math.nextafter(before, math.inf))
    assert not spikes.count(len(losses) + 2, math.nan)  # no spike, but a fault: `Skipped` counts it
    assert spikes.limit == before
    assert not spikes.count(len(losses) + 3, before)


def test_losses_that_are_not_above_0_have_no_limit():
    spikes = Spikes(2.0, 3)
    for number in range(2 * LEAST):
        assert not spikes.count(number, -1.0)
    assert spikes.limit == math.inf


def test_as_many_as_the_budget_among_the_last_64_steps_are_too_many():
    spikes = Spikes(2.0, 3)
    for number in range(1, 101):
        spikes.count(number, 1.0)
    assert spikes.count(101, 9.0)
    assert spikes.count(120, 9.0)
    assert spikes.count(101 + WINDOW, 9.0)  # the first is too long ago
    with pytest.raises(
        Spiked,
        match=r"step 180: the loss is 9, above the limit 2 \(2 times the running median .* at 3 "
        r".*\(the last ones: 120, 165, 180\)",
    ) as caught:
        spikes.count(180, 9.0)
    assert (caught.value.step, caught.value.first) == (180, 120)


def test_a_note_goes_on_as_the_guard_would_have():
    spikes = Spikes(2.0, 3)
    for number in range(1, 40):
        spikes.count(number, 1 + number / 100)
    spikes.count(40, 9.0)
    note = json.loads(json.dumps(spikes.note()))
    again = Spikes(2.0, 3, note)
    assert (again.note(), again.limit) == (spikes.note(), spikes.limit)
    behind = spikes.back(60, 40, note)
    assert (behind.past, behind.limit) == (20, spikes.limit)
    assert behind.back(75, 70, note).past == 25


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1.0, 0.5, -1.0])
def test_a_factor_with_which_ordinary_losses_are_spikes_is_refused(factor):
    with pytest.raises(ValueError, match=rf"needs a finite factor above 1; got {factor}"):
        Spikes(factor, 3)


def test_a_budget_below_1_is_refused():
    with pytest.raises(ValueError, match="needs a budget of 1 spike or more; got 0"):
        Spikes(2.0, 0)


# The example, around a step that computes next to nothing

BAD = {22, 24, 25, 27}  # batches, counted from 0


def batch_of(windows):
    return tuple(np.asarray(windows).ravel())


def run(folder, capsys, *, until=None, differs=None, **options):
    """The batches that the steps took, in their order, and what was printed. `until` is the step
    of a kill, and `differs` one at which, once, copies of the state differ.
    """
    from parallax import data

    train, _ = data.split(np.frombuffer(untrained.TEXT.encode(), np.uint8))
    number = {
        tuple(data.batch(train, seed=0, step=i, size=8, length=8).ravel()): i for i in range(200)
    }
    taken = []

    def losses(i, windows):
        if i == until:
            raise KeyboardInterrupt
        if taken and taken[-1] == differs and (i, None) not in taken:
            taken.append((i, None))  # so that this happens once
            found = fingerprint.Differs("w", 1, 0, alike=1, copies=8, outvoted=True)
            raise fingerprint.CopiesDiffer(i, [found])
        taken.append((i, number[batch_of(windows)]))
        return 9.0 if taken[-1][1] in BAD else 1 + 1 / i

    with contextlib.suppress(KeyboardInterrupt):
        untrained.run(
            folder,
            losses=losses,
            **{"steps": 40, "checkpoint_every": 20, "spike_factor": 2.0} | options,
        )
    return taken, capsys.readouterr().out


def test_the_example_skips_goes_back_and_past_the_batches(tmp_path, capsys):
    taken, printed = run(tmp_path / "one", capsys)
    assert (
        printed.count("a spike; the step is skipped") == 3
    )  # the last of them after the run went back
    assert (
        len(
            re.findall(
                r"step 26: the loss is 9, above .* The run goes back to step 20, and past the "
                r"batches of the steps up to 26\.",
                printed,
            )
        )
        == 1
    )
    assert taken == [(i, i - 1) for i in range(1, 27)] + [(i, i + 5) for i in range(21, 41)]
    records = [
        json.loads(line) for line in (tmp_path / "one/out/metrics.jsonl").read_text().splitlines()
    ]
    assert [record["step"] for record in records] == [*range(1, 41)]
    assert [record["step"] for record in records if record.get("skipped")] == [22]
    assert (
        json.loads(
            (tmp_path / "one/out/checkpoints/00000040/manifest.json").read_text().splitlines()[0]
        )["note"]["spikes"]["past"]
        == 6
    )


def test_what_was_skipped_stays_skipped_where_copies_differ_before_the_next_save(tmp_path, capsys):
    taken, printed = run(tmp_path / "one", capsys, differs=(28, 33))
    assert re.search(r"step 29: device 1 .* holds other bits.*The run goes back to its", printed)
    assert taken[-20:] == [(i, i + 5) for i in range(21, 41)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("until", [23, 30, 35])
def test_a_run_that_is_killed_takes_the_same_batches(until, tmp_path, capsys):
    whole, _ = run(tmp_path / "one", capsys)
    run(tmp_path / "two", capsys, until=until)
    again, _ = run(tmp_path / "two", capsys)
    assert again[-10:] == whole[-10:]
    assert again[0][0] == (21 if until < 31 else 31)
    kept = lambda folder: [
        json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()
    ]
    numbers = lambda records: [
        (record["step"], record.get("loss"), record.get("skipped")) for record in records
    ]
    assert numbers(kept(tmp_path / "two")) == numbers(kept(tmp_path / "one"))


@pytest.mark.sweep(3, "wholes")
def test_a_checkpoint_between_the_spikes_is_passed_over_and_the_budget_ends_it(tmp_path, capsys):
    """One spike lies before the save of step 24, the next two behind it."""
    _, printed = run(tmp_path / "one", capsys, checkpoint_every=4, keep=4)
    assert "The run goes back to step 22, and past" in printed
    with pytest.raises(
        SystemExit,
        match=r"Losses spiked at the steps \[26\], and --rollback-budget is 0\. Lower "
        r"--learning-rate",
    ):
        run(tmp_path / "two", capsys, rollback_budget=0)
