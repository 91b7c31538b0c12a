"""The examples in docstrings run, and print what they say."""

import doctest
import importlib
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from parallax import grads, mesh, rules, step, zero
from parallax.collectives import ring

ROOT = Path(__file__).parents[1]
FILES = [
    path.relative_to(ROOT)
    for path in sorted((ROOT / "parallax").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]
# The names that an example may use beside those of its module.
NAMES = {
    "P": P,
    "eqx": eqx,
    "grads": grads,
    "jax": jax,
    "jnp": jnp,
    "mesh": mesh,
    "optax": optax,
    "ring": ring,
    "rules": rules,
    "step": step,
    "zero": zero,
}


def examples():
    """The examples of each docstring that has some."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for path in FILES:
        module = importlib.import_module(
            ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        )
        yield from finder.find(module, extraglobs=NAMES)


@pytest.mark.parametrize("example", [*examples()], ids=lambda example: example.name)
def test_an_example_prints_what_it_says(example):
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        printed = []
        doctest.DocTestRunner(verbose=False).run(example, out=printed.append)
    assert not printed, "".join(printed)
    assert len(example.examples) <= 10
