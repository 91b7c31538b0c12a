"""Decoders on islands: whatever the layout inside, it is the same run; killed, it goes on as it
was."""

import dataclasses
import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import EXACT, FLOAT64, assert_close, windows

from parallax import islands, mesh, schedule
from parallax.collectives import ring
from parallax.collectives.int8 import ErrorFeedback
from parallax.compiled import certificate
from parallax.layout import Layout
from parallax.models import decoder, gpt2, on_islands
from parallax.plan import island_traffic
from parallax.run.checkpoint import Checkpoints

CONFIG = gpt2.Config(
    layers=2, heads=2, width=16, context=8, vocabulary=30, vocabulary_multiple=8, dropout=0.1
)
STEPS, BATCH = 6, 8
STREAM = islands.Stream(islands.by_layers(1), delay=1, mixing=0.25)


def prepared(
    text,
    count=2,
    stream=islands.ALL_AT_ONCE,
    config=CONFIG,
    dtype=FLOAT64,
    axis="island",
    every=3,
    batch=BATCH,
):
    layout = Layout.parse(text)
    mesh_ = mesh.make(island=count, **layout.axes, devices=jax.devices()[: count * layout.devices])
    with jax.numpy_dtype_promotion("standard"):
        one_island = decoder.train_step(
            *(gpt2.FAMILY, config, optax.adamw(1e-3, eps=1e-6), layout, mesh_),
            batch=batch // count,
            key=jax.random.key(0),
            compute=decoder.Compute(dtype=dtype, max_norm=1.0),
        )
        return on_islands.train_step(
            one_island, islands.outer_nesterov(), every=every, axis=axis, stream=stream
        )


def ran(text, stream=islands.ALL_AT_ONCE):
    """The losses, and the outer weights at the end."""
    made = prepared(text, stream=stream)
    losses = []
    with jax.numpy_dtype_promotion("standard"):
        state = made.init()
        for number in range(STEPS):
            state, info = made.train(state, windows(CONFIG, 0, number, BATCH))
            losses.append(np.asarray(info.loss))
    model = decoder.joined(gpt2.FAMILY, Layout.parse(text), islands.joint_model(state))
    return np.stack(losses), jax.tree.map(np.asarray, eqx.filter(model, eqx.is_array))


@functools.cache
def plain(stream):
    return ran("", stream)


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "stream"),
    [
        ("data=2,tensor=2,zero=1", islands.ALL_AT_ONCE),
        ("data=2,stage=2,zero=3,microbatches=2", islands.ALL_AT_ONCE),
        ("replica=2,data=2,zero=2", STREAM),
    ],
)
def test_each_layout_inside_an_island_is_the_same_run(text, stream):
    losses, model = ran(text, stream)
    expected, weights = plain(stream)
    np.testing.assert_allclose(losses, expected, rtol=EXACT)
    assert_close(model, weights, EXACT)
    assert losses.shape == (STEPS, 2)
    assert len(set(losses[0])) == 2  # each island has rows of its own


@pytest.mark.long
@pytest.mark.parametrize("axis", [ring("island"), ErrorFeedback("island")], ids=["exact", "int8"])
def test_a_round_sends_what_the_plan_says(axis):
    """Between rounds nothing: all that goes between islands stands in a branch that is taken every
    H steps."""
    layout, config = (
        Layout(data=2, zero=3),
        gpt2.Config(layers=2, heads=2, width=32, context=8, vocabulary=64),
    )
    made = prepared(str(layout), config=config, dtype=jnp.dtype("float32"), axis=axis)
    with jax.numpy_dtype_promotion("standard"):
        compiled = made.train.lower(
            made.shapes, jax.ShapeDtypeStruct((BATCH, config.context + 1), jnp.int32)
        ).compile()
    mesh_ = mesh.make(island=2, **layout.axes, devices=jax.devices()[:4])
    found = [entry for entry in certificate.read(compiled, mesh_) if "island" in entry.axes]
    assert all(entry.conditional for entry in found)
    assert sum(entry.bytes for entry in found) == sum(
        term.sent for term in island_traffic.terms(config, layout, islands=2, axis=axis)
    )


def test_the_plan_of_a_round_is_of_the_axis_that_is_passed():
    """Its name, and the blocks of its int8 numbers: 4 numbers and a power of two are 5 bytes."""
    config = gpt2.Config(layers=2, heads=2, width=32, context=8, vocabulary=64)
    of = lambda axis: island_traffic.terms(config, Layout(), islands=2, axis=axis)
    for axis in (ring("pod"), ErrorFeedback("pod", 4), "pod"):
        assert {term.axes for term in of(axis)} == {("pod",)}
    exact, int8 = (sum(term.sent for term in of(axis)) for axis in (None, ErrorFeedback("pod", 4)))
    assert int8 * 16 == exact * 5


# Stored, and read by any layout


def numbered(state):
    """The state with other numbers in each array."""
    leaves, structure = jax.tree.flatten(state)
    arrays = [np.arange(i, i + np.prod(x.shape), dtype=float) for i, x in enumerate(leaves)]
    shaped = [array.reshape(x.shape) for array, x in zip(arrays, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


@pytest.mark.parametrize("axis", ["island", ErrorFeedback("island")], ids=["exact", "int8"])
def test_fragments_of_chunks_are_stored_as_fragments_of_layers(axis):
    """A fragment has one of the two chunks of each stage. On disk it is the fragment of a run
    without a pipeline."""
    stream = islands.Stream(islands.by_layers(2), delay=1)
    options = {"stream": stream, "config": dataclasses.replace(CONFIG, layers=8), "axis": axis}
    interleaved = "stage=2,chunks=2,microbatches=2"
    piped = prepared(interleaved, **options).shapes
    on_disk = numbered(prepared("data=1", **options).shapes)
    form = on_islands.stored(gpt2.FAMILY, Layout.parse(interleaved))
    state = form.from_disk(on_disk)
    assert [x.shape for x in jax.tree.leaves(state)] == [x.shape for x in jax.tree.leaves(piped)]
    for one, other in zip(
        jax.tree.leaves(on_disk), jax.tree.leaves(form.to_disk(state)), strict=True
    ):
        np.testing.assert_array_equal(one, other, strict=True)


def test_fragments_of_chunks_in_another_order_are_refused():
    """A schedule in the shape of a V: the second chunk of the first stage is the last."""
    zigzag = schedule.greedy(schedule.v_placement(2), 2, [4, 4])
    text = "stage=2,chunks=2,microbatches=2"
    stored = on_islands.stored(gpt2.FAMILY, Layout.parse(text), schedule=zigzag)
    options = {"config": dataclasses.replace(CONFIG, layers=8)}
    made = prepared(text, stream=islands.Stream(islands.by_layers(2)), **options)
    message = "a fragment has 1 of the 2 chunks of each stage.*Use islands.by_layers.1. or"
    with pytest.raises(ValueError, match=message):
        stored.to_disk(numbered(made.shapes))
    whole = numbered(prepared(text, stream=islands.Stream(islands.by_layers(1)), **options).shapes)
    for one, other in zip(
        jax.tree.leaves(whole),
        jax.tree.leaves(stored.from_disk(stored.to_disk(whole))),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other, strict=True)


# Killed, and gone on


def goes_on(folder, count=2, was=2, kill_at=None):
    """Train to the end from the newest checkpoint, saved at step 4, between two rounds. Returns the
    state, and what was lost."""
    made, lost = prepared("stage=2,microbatches=2", count, STREAM), []
    saved = on_islands.stored(gpt2.FAMILY, Layout.parse("stage=2,microbatches=2"))
    with (
        jax.numpy_dtype_promotion("standard"),
        Checkpoints(folder, settings={}, form=saved, say=lambda line: None) as checkpoints,
    ):
        like = made.shapes if was == count else islands.shapes_for_islands(made.shapes, was)
        restored = checkpoints.restore(like)
        state = made.init() if restored is None else restored.state
        if restored is not None and was != count:
            state, lost = islands.with_number_of_islands(state, made.shapes)
        for number in range(0 if restored is None else restored.step, STEPS):
            state, _ = jax.block_until_ready(made.train(state, windows(CONFIG, 0, number, BATCH)))
            if number + 1 == 4 and restored is None:
                checkpoints.save(4, state)
                checkpoints.wait()
            if number + 1 == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return state, lost


@pytest.mark.programs
@pytest.mark.long
def test_a_run_that_is_killed_goes_on_bit_for_bit(tmp_path):
    """It was saved between the exchange of a fragment and its use. And two islands go on as one,
    and as four."""
    whole, _ = goes_on(tmp_path / "whole")
    command = [sys.executable, __file__, str(tmp_path / "killed")]
    killed = subprocess.run(
        command, check=False, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=500
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    again, _ = goes_on(tmp_path / "killed")
    leaves = lambda tree: jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    for one, other in zip(leaves(whole), leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), strict=True)
    for count in (1, 4):
        state, lost = goes_on(tmp_path / "killed", count, was=2)
        assert int(state.step) == STEPS
        assert any("islands 1 to 1, which are gone" in line for line in lost) == (count == 1)
        assert "the exchanges under way" in lost
        assert all(np.isfinite(np.asarray(leaf)).all() for leaf in leaves(state.model))


def main(folder: str) -> None:
    """A run that kills itself after the fifth step, in a process of its own."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    goes_on(folder, kill_at=5)


if __name__ == "__main__":
    main(sys.argv[1])
