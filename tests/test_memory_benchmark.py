"""The memory benchmark runs and prints its tables, and its columns of theory are the theory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_benchmarks import load

from parallax.layout import Layout
from parallax.models import gpt2

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def memory():
    """The script as a module; it imports its neighbours."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield load("memory")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.programs
@pytest.mark.long
def test_prints_its_tables():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, ROOT / "benchmarks" / "memory.py", "--quick"]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for words in (
        "ZeRO over data 2",
        "parameters (theory)",
        "compiled MB a sequence",
        "tensor 4, sequence",
        "plain logits",
    ):
        assert words in ran.stdout, ran.stdout


def test_the_theory_of_parameters_counts_each_once(memory):
    config = gpt2.SMALL
    padding = (config.rows - config.vocabulary) * config.width
    assert sum(memory.weights(config)) == 4 * (config.parameters + padding)


@pytest.mark.parametrize(
    ("layout", "elements", "softmax"),
    [
        (
            Layout(),
            16,
            1,
        ),  # 34 B T D + 5 H B T^2 bytes in 16 bits, less dropout's masks and its result
        (Layout(tensor=4), 2 + 2 + 3, 1 / 4),
        (Layout(tensor=4, sequence=True), 2 / 4 + 2 + 3, 1 / 4),
        (Layout(tensor=4, sequence=True, remat="gathers"), 16 / 4, 1 / 4),
        (Layout(tensor=4, remat="attention"), 2 + 2 + 3, 0),
        (Layout(remat="products"), 9, 0),
        (Layout(tensor=4, sequence=True, remat="block"), 1 / 4, 0),
    ],
    ids=str,
)
def test_the_theory_of_activations_is_that_of_the_paper(memory, layout, elements, softmax):
    T, D, H, L = 1024, 768, 12, 12
    assert memory.kept(gpt2.SMALL, layout, T) == pytest.approx(
        4 * L * (elements * T * D + softmax * H * T * T)
    )
