"""Llama: every layout trains it as one device does, heads of keys and values shared among devices as well."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from reference import EXACT, assert_close, assert_same_run, gpt2_on, gpt2_on_one_device

from parallax import mesh, rules, sequence, tensor
from parallax.collectives import ring
from parallax.layout import Layout
from parallax.models import decoder, llama
from parallax.models.attention import grouped

BATCH, STEPS, KEY = 8, 5, jax.random.key(0)
TINY = llama.Config(layers=4, heads=4, groups=2, width=16, hidden=24, context=8, vocabulary=61, vocabulary_multiple=64)
CONFIGS = {
    "groups": TINY,
    "one group, tied, scaled": dataclasses.replace(TINY, groups=1, tied=True, theta=500.0, scaling=llama.Scaling(8.0, 1.0, 4.0, 8)),
    "bias, norms of heads": dataclasses.replace(TINY, head_width=6, bias=True, head_norms=True),
}
LAYOUTS = [
    Layout(data=2, tensor=4, microbatches=2, zero=2, sequence=True, remat="products"),
    Layout(data=4, tensor=2, zero=3, remat="attention"),
    Layout(data=2, stage=2, tensor=2, microbatches=4, zero=3, sequence=True, remat="block"),
    Layout(data=4, stage=2, microbatches=2, chunks=2, zero=2, remat="stage"),
    Layout(stage=2, tensor=4, microbatches=2, split_sends=True),
    Layout(data=2, tensor=4, zero=1),
    Layout(data=2, tensor=4, zero=3, sequence=True, microbatches=2, remat="gathers"),
]


def on(layout):
    return mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])


@pytest.mark.sweep(11)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_five_steps_are_those_of_one_device(config, layout):
    plain = gpt2_on_one_device(CONFIGS[config], 0, STEPS, BATCH, llama)
    assert_same_run(gpt2_on(layout, on(layout), CONFIGS[config], 0, STEPS, BATCH, kind=llama), plain)
