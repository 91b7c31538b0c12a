"""Groups of replicas with a copy each of what ZeRO splits inside a group (HSDP): the same steps,
and 1/n of the bytes between."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from reference import assert_same_run, gpt2_on, gpt2_on_one_device

from parallax import mesh
from parallax.collectives import ring, xla
from parallax.compiled import certificate
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.plan import traffic

CONFIG = gpt2.Config(
    layers=2, heads=4, width=32, context=8, vocabulary=30, vocabulary_multiple=32, dropout=0.1
)
STEPS, BATCH = 4, 16


def trains_as_one_device(text, algorithm=ring):
    layout = Layout.parse(text)
    mesh_ = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    run = gpt2_on(layout, mesh_, CONFIG, 0, STEPS, BATCH, algorithm=algorithm)
    assert_same_run(run, gpt2_on_one_device(CONFIG, 0, STEPS, BATCH))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("replica=2,data=2,zero=3", marks=pytest.mark.sweep(30, "steps")),
        *(
            pytest.param(text, marks=pytest.mark.long)
            for text in [
                "replica=2,data=2,tensor=2,zero=1,microbatches=2",
                "replica=2,data=2,stage=2,zero=2,microbatches=4",
                "replica=2,data=2,stage=2,zero=3,microbatches=4,remat=block",
            ]
        ),
    ],
)
def test_groups_of_replicas_train_as_one_device(text):
    trains_as_one_device(text)


SIZES = [
    (replica, data, stage, tensor)
    for replica in (2, 4)
    for data in (2, 4)
    for stage in (1, 2)
    for tensor in (1, 2)
    if replica * data * stage * tensor <= 8
]


@pytest.mark.sweep
@pytest.mark.long
@settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
@given(
    sizes=st.sampled_from(SIZES),
    zero=st.sampled_from([1, 2, 3]),
    microbatches=st.sampled_from([1, 2]),
    algorithm=st.sampled_from([ring, xla]),
)
def test_they_do_whatever_is_combined(sizes, zero, microbatches, algorithm):
    replica, data, stage, tensor = sizes
    trains_as_one_device(
        f"replica={replica},data={data},stage={stage},tensor={tensor},zero={zero},"
        f"microbatches={microbatches}",
        algorithm,
    )


@pytest.mark.programs
@pytest.mark.long
def test_four_axes_on_sixteen_devices():
    command = [sys.executable, __file__, "replica=2,data=2,stage=2,tensor=2,zero=2,microbatches=2"]
    done = subprocess.run(
        command, check=False, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"devices": 16}


# Bytes between the groups


@functools.cache
def sent_along(text):
    """Bytes that a device sends in a step, by axes, from the certificate and from the plan."""
    config, layout = (
        gpt2.Config(layers=4, heads=4, width=32, context=8, vocabulary=32, vocabulary_multiple=32),
        Layout.parse(text),
    )
    mesh_ = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    rings = {name: ring(name) for name in layout.axes}
    with jax.numpy_dtype_promotion("standard"):
        prepared = decoder.train_step(
            *(gpt2.FAMILY, config, optax.adamw(1e-3), layout, mesh_),
            batch=8,
            key=jax.random.key(0),
            compute=decoder.Compute(axes=rings),
        )
        windows = jax.ShapeDtypeStruct((8, config.context + 1), jnp.int32)
        compiled = prepared.train.lower(prepared.shapes, windows).compile()
    found: dict[tuple[str, ...], int] = {}
    for entry in certificate.read(compiled, mesh_):
        found[entry.axes] = found.get(entry.axes, 0) + entry.bytes
    return found, traffic.by_axes(traffic.terms(config, layout, 8, axes=rings)), config


@pytest.mark.parametrize(
    "zero",
    [
        pytest.param(1, marks=pytest.mark.sweep(30, "steps")),
        *(pytest.param(zero, marks=pytest.mark.long) for zero in (2, 3)),
    ],
)
def test_between_groups_the_shares_move(zero):
    """An all-reduce between 2 groups of n = 4: of 1/n of what is split, of what is whole, and of
    the loss."""
    found, planned, config = sent_along(f"replica=2,data=4,zero={zero}")
    assert found == planned
    shapes = jax.eval_shape(functools.partial(gpt2.GPT2, config, key=jax.random.key(0)))
    total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    split = sum(
        leaf.size for leaf in jax.tree.leaves(shapes) if leaf.size >= 1024
    )  # `fsdp` leaves smaller ones whole
    assert found["replica",] == 4 * (
        split // 4 + total - split + 2
    )  # the loss is one number, padded to two
    assert split > 0.9 * total


def main(text: str) -> None:
    """A run on more devices than the tests have, in a process of its own."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", Layout.parse(text).devices)
    jax.config.update("jax_enable_x64", True)
    trains_as_one_device(text)
    print(json.dumps({"devices": len(jax.devices())}))


if __name__ == "__main__":
    main(sys.argv[1])
