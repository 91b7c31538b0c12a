"""Layouts with a context axis train GPT-2 and Llama as one device does: with data, stage, tensor and all that a layout may say."""

import functools
import re

import jax
import numpy as np
import optax
import pytest
import reference

from parallax import context, mesh
from parallax.collectives import xla
from parallax.layout import Layout
from parallax.models import decoder, gpt2, llama

STEPS, BATCH = 5, 4
SIZES = {"layers": 2, "heads": 4, "width": 16, "context": 16, "vocabulary": 61, "vocabulary_multiple": 8}
KINDS = {"gpt2": (gpt2, gpt2.Config(**SIZES, dropout=0.1)), "llama": (llama, llama.Config(**SIZES, groups=2, hidden=24))}


def on(layout):
    return mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])


def check(text, kind, mover=reference.ring, **compute):
    """Five AdamW steps under the layout equal those of one device."""
    layout, (module, config) = Layout.parse(text), KINDS[kind]
    plain = reference.gpt2_on_one_device(config, 0, STEPS, BATCH, kind=module)
    run = reference.gpt2_on(layout, on(layout), config, 0, STEPS, BATCH, kind=module, mover=mover, **compute)
    reference.assert_same_run(run, plain)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("data=2,context=2,zero=2,microbatches=2", "gpt2"),
        ("context=2,stage=2,microbatches=2", "llama"),
    ],
)
def test_a_context_axis_trains_as_one_device(text, kind):
    check(text, kind)
