"""`bisect` over whole layouts: no alarm in a right one, and a fault in the package is found where
it is."""

import functools
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import bisected
import bisected_run
import flags
import jax
import jax.numpy as jnp
import pytest
import tapped_net
from bisected_run import Run
from jax import lax
from jax.sharding import PartitionSpec as P
from mutant import Mutant

from parallax import bisect, mesh, pipeline
from parallax.layout import Layout
from parallax.schedule import one_f_one_b

DECODER = {
    "data": (1, 2, 4),
    "stage": (1, 2),
    "tensor": (1, 2),
    "microbatches": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "sequence": (False, True),
    "remat": ("none", "gathers", "attention", "products", "block", "stage"),
    "schedule": ("one_f_one_b_lockstep", "gpipe", "zero_bubble_lockstep"),
    "split_sends": (False, True),
}
WIDER = DECODER | {
    "context": (1, 2),
    "replica": (1, 2),
    "remat": ("none", "block"),
    "split_sends": (False,),
}
CHOICES = {
    "own": DECODER
    | {
        "zero": (0, 1, 3),
        "chunks": (1, 2),
        "sequence": (False,),
        "remat": ("none",),
        "split_sends": (False,),
    },
    "gpt2": DECODER,
    "gpt2 of 8 tokens": WIDER | {"replica": (2,)},
    "llama": WIDER,
    "experts": WIDER | {"expert": (2,), "replica": (1,)},
}
COUNTS = {"own": 40, "gpt2": 25, "gpt2 of 8 tokens": 10, "llama": 15, "experts": 10}  # a hundred
OWN = {
    "layers": tapped_net.L,
    "heads": 4,
    "hidden": tapped_net.F,
    "rows": 8,
    "batch": tapped_net.ROWS,
    "tokens": 8,
}


def fits(kind, fields):
    config = bisected_run.DECODERS[kind][1] if kind != "own" else None
    try:
        layout = Layout(**fields)
        layout.check(OWN if config is None else config.sizes | {"batch": bisected_run.BATCH})
    except ValueError:
        return False
    return layout.devices in (2, 4, 8) and not (
        layout.chunks > 1 and layout.schedule != "one_f_one_b_lockstep"
    )


@functools.cache
def drawn():
    """A hundred of all layouts that fit, with the kind of model."""
    found = []
    for kind, choices in CHOICES.items():
        every = [
            dict(zip(choices, values, strict=True))
            for values in itertools.product(*choices.values())
        ]
        random.Random(0).shuffle(every)
        right = (fields for fields in every if fits(kind, fields))
        found += [Run(kind, Layout(**fields)) for fields in itertools.islice(right, COUNTS[kind])]
    return found


@functools.cache
def one_device(kind):
    return Run(kind).record()


@pytest.mark.long
@pytest.mark.sweep(50)
@pytest.mark.parametrize("number", range(100))
def test_no_alarm_in_a_drawn_layout(number):
    run = drawn()[number]
    found = bisect.compare(one_device(run.kind), run.record())
    assert found.first is None, f"{run}: {found}"
    assert found.compared > 60


EVERY_AXIS = [
    Run("llama", Layout(context=2, tensor=2, sequence=True)),
    Run("llama", Layout(replica=2, data=2, zero=3)),
    Run("gpt2 of 8 tokens", Layout(context=2, data=2, stage=2, microbatches=2, zero=2)),
    Run("experts", Layout(data=2, expert=2, tensor=2)),
]


@pytest.mark.long
@pytest.mark.sweep(4)
@pytest.mark.parametrize("run", EVERY_AXIS, ids=str)
def test_no_alarm_over_context_replica_and_expert(run):
    found = bisect.compare(one_device(run.kind), run.record())
    assert found.first is None, str(found)


def test_no_alarm_where_stages_share_the_embedding():
    """Only the first stage has the embedding's sum; what the others have is not compared."""
    found = bisect.compare(
        one_device("gpt2"), Run("gpt2", Layout(stage=2, microbatches=2)).record()
    )
    assert found.first is None, str(found)


def test_an_embedding_of_ones_own_may_report_on_the_first_stage_alone():
    """After `sum_to_first` the other stages have parts of the sum."""
    params = {
        "scale": jnp.linspace(0.5, 1, 4),
        "blocks": jnp.linspace(-1, 1, 32).reshape(1, 2, 4, 4),
    }
    batch = jnp.sin(jnp.arange(32.0)).reshape(8, 4)

    def embed(params, part):
        x = part * params["scale"][None]
        return bisect.tap(x, "entered", P("batch"))

    def embed_by_halves(params, part):
        x = pipeline.ends.sum_to_first(part * params["scale"][None] / 2, "stage")
        with bisect.only_if(lax.axis_index("stage") == 0):
            return bisect.tap(x, "entered", P("batch"))

    def stage(params, x, part, position):
        return lax.scan(
            lambda x, w: (x + jnp.tanh(x @ w), None), x, params["blocks"].reshape(-1, 4, 4)
        )[0]

    def head(params, x, part):
        return jnp.mean((x - part) ** 2)

    def one():
        loss = pipeline.unpipelined(embed, stage, head, blocks=lambda params: params["blocks"])
        return jax.value_and_grad(loss), (params, batch)

    def two():
        specs = {"scale": P(), "blocks": P(None, "stage")}
        grad = pipeline.value_and_grad(
            embed_by_halves,
            stage,
            head,
            one_f_one_b(2, 4),
            "stage",
            blocks=lambda params: params["blocks"],
        )
        world = mesh.make(stage=2, devices=jax.devices()[:2])
        split = mesh.spmd(grad, mesh=world, in_specs=(specs, P()), out_specs=(P(), specs))
        return split, (params, batch)

    found = bisect.compare(one, two)
    assert found.first is None, str(found)
    assert bisect.Key("entered", -1, "forward") in bisect.record(two).values


def test_a_hundred_layouts_are_drawn_and_split_every_axis():
    assert len({*drawn()}) == 100
    for axis in ("data", "stage", "tensor", "context", "replica", "expert"):
        assert sum(getattr(run.layout, axis) > 1 for run in drawn()) >= 5


@functools.cache
def records(folder):
    """A folder of records of the right package."""
    assert bisected.put_to(None, "own; data=2", folder).word == "equal"
    return folder


@pytest.mark.long
@pytest.mark.sweep(10)
@pytest.mark.parametrize("number", range(len(bisected.PLACED)))
def test_a_fault_in_the_package_is_found_where_it_is(number, tmp_path_factory):
    name, by = bisected.PLACED[number]
    mutant, path = next(
        (mutant, path)
        for mutant, path in bisected.chosen(name, 0, 0)
        if (mutant.name, mutant.by) == (name, by)
    )
    said = bisected.put_to(
        mutant, bisected.run_of(mutant, path), records(tmp_path_factory.getbasetemp())
    )
    assert bisected.word_of(said, mutant, path) == "placed", said


def test_where_a_fault_counts_as_found():
    """In the function that holds it, or in one inside that; of a table, in what runs it; before the
    step, in an argument."""
    said = bisected.Said(
        "",
        "found",
        "gradients.up",
        functions=("parallax/grads/devices.py:averaged.<locals>.wrapped",),
    )
    has = lambda name, path, said=said: said.has(Mutant(name, "", "", ""), Path(path))
    assert has("averaged", "parallax/grads/devices.py")
    assert not has("average", "parallax/grads/devices.py")
    assert not has("averaged", "parallax/zero.py")
    assert not has("gpipe", "parallax/schedule/makers.py")
    runs = said._replace(functions=("parallax/pipeline/lanes.py:forward",))
    assert has("gpipe", "parallax/schedule/makers.py", runs)
    given = said._replace(first="argument.1", functions=())
    assert has("batch", "parallax/data/batches.py", given)
    assert not has("averaged", "parallax/grads/devices.py", given)


@pytest.mark.programs
@pytest.mark.long
def test_the_command_line(tmp_path):
    words = ["-m", "parallax", "bisect", "--layers", "1", "--context", "8", "--batch", "4"]
    stored = str(tmp_path / "run.npz")
    for more in (
        ["--layout", "data=2", "--save", stored],
        ["--layout", "context=2", "--record", stored],
    ):
        command = [sys.executable, *words, *more]
        environment = (
            os.environ | flags.quick() | {"PYTHONPATH": str(bisected.ROOT), "JAX_PLATFORMS": "cpu"}
        )
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("All ")
