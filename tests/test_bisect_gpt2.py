"""`bisect` of a GPT-2: no alarm in a right layout, and a fault in the package is found where it is."""

import functools
import itertools
import os
import random
import subprocess
import sys

import bisected
import bisected_run
import flags
import jax
import pytest
from mutant import Mutant

from parallax import bisect
from parallax.layout import Layout

CHOICES = {
    "data": (1, 2, 4),
    "stage": (1, 2),
    "tensor": (1, 2),
    "microbatches": (1, 2, 4),
    "zero": (0, 1, 2, 3),
    "sequence": (False, True),
    "remat": ("none", "gathers", "attention", "products", "block", "stage"),
    "schedule": ("one_f_one_b", "gpipe", "zero_bubble"),
    "split_sends": (False, True),
}
SIZES = {**bisected_run.CONFIG.sizes, "batch": bisected_run.BATCH}


def fits(fields):
    try:
        return Layout(**fields).check(**SIZES) is None
    except ValueError:
        return False


@functools.cache
def layouts():
    """A hundred of all layouts that fit."""
    every = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
    right = [fields for fields in every if fields["data"] * fields["stage"] * fields["tensor"] <= 8 and fits(fields)]
    return random.Random(0).sample(right, 100)


@functools.cache
def one_device():
    with jax.numpy_dtype_promotion("standard"):  # optax mixes float32 schedules with float64 weights
        return bisect.record(bisected_run.run(Layout()))


@pytest.mark.slow
@pytest.mark.sweep(50)
@pytest.mark.parametrize("number", range(100))
def test_no_alarm_in_a_drawn_layout(number):
    with jax.numpy_dtype_promotion("standard"):
        found = bisect.compare(one_device(), bisected_run.run(Layout(**layouts()[number])))
    assert found.first is None, f"{layouts()[number]}: {found}"
    assert found.compared > 100


@pytest.mark.slow
def test_a_fault_in_the_package_is_found_where_it_is(tmp_path):
    layout, record = bisected.LAYOUTS[""], tmp_path / "one.npz"
    assert bisected.put_to(None, layout, record).word == "equal"
    fault = Mutant("accumulated", "total / microbatches", "total", "")
    said = bisected.put_to(fault, layout, record)
    assert said.word == "found"
    assert said.first == "gradients.wte"
    assert "summed 2 times" in said.looks
    assert any(name.startswith("parallax/grads.py:accumulated") for name in said.functions)


@pytest.mark.slow
def test_the_command_line(tmp_path):
    words = ["-m", "parallax", "bisect", "--layers", "1", "--context", "8", "--batch", "4", "--layout", "data=2"]
    stored = str(tmp_path / "run.npz")
    for more in (["--save", stored], ["--record", stored]):
        command = [sys.executable, *words, *more]
        environment = os.environ | flags.quick() | {"PYTHONPATH": str(bisected.ROOT), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("All ")
