"""Layouts with a context axis train GPT-2 and Llama as one device does, with data, stage, tensor
and what else a layout says."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import bare
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from parallax import context, mesh, rules, validate
from parallax.collectives import ring, xla
from parallax.layout import Layout
from parallax.models import decoder, gpt2, llama, recipe

ROOT = Path(__file__).resolve().parent.parent
STEPS, BATCH = 5, 4
SIZES = {
    "layers": 2,
    "heads": 4,
    "width": 16,
    "context": 16,
    "vocabulary": 61,
    "vocabulary_multiple": 8,
}
KINDS = {
    "gpt2": (gpt2, gpt2.Config(**SIZES, dropout=0.1)),
    "llama": (llama, llama.Config(**SIZES, groups=2, hidden=24)),
}


def on(layout):
    return mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])


def check(layout, kind, algorithm=ring, **compute):
    """Five AdamW steps under the layout equal those of one device: weights at birth, losses,
    gradients, weights at the end."""
    module, config = KINDS[kind]
    config = dataclasses.replace(config, layers=max(config.layers, layout.stage * layout.chunks))
    plain = reference.gpt2_on_one_device(config, 0, STEPS, BATCH, kind=module)
    run = reference.gpt2_on(
        layout, on(layout), config, 0, STEPS, BATCH, kind=module, algorithm=algorithm, **compute
    )
    reference.assert_same_run(run, plain)


@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("data=2,context=2,zero=2,microbatches=2", "gpt2"),
        ("context=2,stage=2,microbatches=2", "llama"),
    ],
)
def test_a_context_axis_trains_as_one_device(text, kind):
    check(Layout.parse(text), kind)


@pytest.mark.long
@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("text", "kind", "algorithm"),
    [
        ("data=2,context=2,tensor=2,zero=1,microbatches=2", "gpt2", xla),
        ("data=2,context=2,tensor=2,zero=3,remat=products", "llama", ring),
        ("data=2,context=2,stage=2,microbatches=2,zero=3,remat=block", "gpt2", ring),
        ("data=2,context=2,stage=2,microbatches=2,zero=2", "llama", xla),
        (
            "context=2,stage=2,tensor=2,microbatches=4,sequence=True,schedule=zero_bubble_lockstep",
            "gpt2",
            xla,
        ),
        ("context=2,stage=2,tensor=2,microbatches=2,remat=stage,split_sends=True", "llama", ring),
        ("context=4,tensor=2,sequence=True,zero=1,remat=attention", "gpt2", ring),
        ("context=8,zero=3", "llama", xla),
        ("data=2,context=2,stage=2,microbatches=2,chunks=2,zero=1", "gpt2", ring),
        ("context=2,stage=2,tensor=2,microbatches=2,chunks=2,sequence=True", "llama", xla),
        (
            "data=2,context=2,stage=2,microbatches=2,schedule=zero_bubble_lockstep,zero=1",
            "llama",
            ring,
        ),
    ],
)
def test_with_any_two_of_data_stage_and_tensor(text, kind, algorithm):
    check(Layout.parse(text), kind, algorithm)


ULYSSES, GATHERED = (
    {"context_attention": context.ulysses},
    {"attention": context.blockwise, "context_attention": context.gathered},
)


@pytest.mark.long
@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("text", "compute", "algorithm"),
    [
        ("context=2,tensor=2,microbatches=2", ULYSSES, ring),
        ("context=2,tensor=2,microbatches=2", GATHERED, ring),
        ("data=2,context=2,stage=2,microbatches=2,schedule=zero_bubble", GATHERED, xla),
    ],
    ids=["ulysses", "gathered", "gathered, per stage"],
)
def test_with_other_attention(text, compute, algorithm):
    check(Layout.parse(text), "llama", algorithm, **compute)


@pytest.mark.long
@pytest.mark.sweep
@settings(
    max_examples=2, phases=[Phase.explicit, Phase.generate]
)  # each example compiles a program
@given(
    sizes=st.sampled_from(
        [
            (2, 2, 2, 1),
            (2, 2, 1, 2),
            (1, 2, 2, 2),
            (1, 4, 2, 1),
            (1, 4, 1, 2),
            (2, 4, 1, 1),
            (4, 2, 1, 1),
        ]
    ),
    microbatches=st.sampled_from([1, 2, 4]),
    chunks=st.sampled_from([1, 2]),
    words=st.fixed_dictionaries(
        {
            name: st.sampled_from(validate.CHOICES[name])
            for name in ("zero", "sequence", "remat", "split_sends")
        }
        | {
            "schedule": st.sampled_from(["one_f_one_b_lockstep", "gpipe", "zero_bubble_lockstep"])
        }  # those per stage refuse a ring in a stage
    ),
    kind=st.sampled_from(sorted(KINDS)),
)
def test_drawn_layouts_train_as_one_device(sizes, microbatches, chunks, words, kind):
    fields = dict(zip(("data", "context", "stage", "tensor"), sizes, strict=True))
    fields = (
        validate.DEFAULTS
        | fields
        | words
        | {"microbatches": min(microbatches, BATCH // sizes[0]), "chunks": chunks}
    )
    fields |= validate.repaired(fields, {}, {})  # words that have nothing to act on
    check(Layout(**fields), kind, algorithm=xla)


@pytest.mark.sweep(30, "steps")
def test_the_loss_to_evaluate_with_is_that_of_one_device():
    layout, (module, config) = Layout(data=2, context=2, microbatches=2), KINDS["llama"]
    model = module.FAMILY.model(config, key=jax.random.key(0), dtype=reference.FLOAT64)
    windows = reference.windows(config, 0, 0, BATCH)
    weights = np.random.default_rng(0).integers(0, 3, (BATCH, config.context)).astype(float)
    measure = decoder.loss_step(module.FAMILY, config, layout, on(layout))
    placed = mesh.place(
        model, rules.specs(model, recipe.rules_of(module.FAMILY, layout)[0]), on(layout)
    )
    expected = module.loss(
        model, decoder.Batch(jnp.asarray(windows), None, jnp.asarray(weights / weights.mean()))
    )
    np.testing.assert_allclose(
        float(measure(placed, windows, weights)), float(expected), rtol=reference.EXACT
    )


@pytest.mark.programs
@pytest.mark.long
def test_all_four_axes_on_sixteen_devices():
    """In a process of its own, which has so many."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SIXTEEN]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stderr


SIXTEEN = """
import jax

jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_enable_x64", True)
from test_context_layouts import check
from parallax.layout import Layout

check(Layout(data=2, stage=2, context=2, tensor=2, microbatches=2, zero=1, sequence=True), "gpt2")
"""


# Refusals


def lowered(family, config, layout, **compute):
    """The step's program, not yet compiled."""
    options = {"batch": BATCH, "key": jax.random.key(0), "compute": decoder.Compute(**compute)}
    prepared = decoder.train_step(family, config, optax.sgd(0.1), layout, on(layout), **options)
    return prepared.train.lower(
        prepared.shapes, jax.ShapeDtypeStruct((BATCH, config.sizes["tokens"] + 1), "int32")
    )


REFUSED = {
    "Bare's family has no `context_attention`, so each token would see only the tokens of its "
    "own device": (
        bare.FAMILY,
        bare.Config(),
        {},
    ),
    "context=2, and Compute has only `attention`": (
        gpt2.FAMILY,
        KINDS["gpt2"][1],
        {"attention": gpt2.attention},
    ),
    "the layers send nothing along ['context'], which splits their tokens": (
        dataclasses.replace(bare.FAMILY, context_attention=context.causal_attention),
        bare.Config(),
        {},
    ),
}


@pytest.mark.parametrize("attend", ["attention", "ulysses", "gathered"])
def test_attention_in_another_order_than_the_layers_is_refused(attend):
    """The layers of a decoder have zigzag tokens: contiguous ones would be another model."""
    in_order = {
        "attention": lambda _, axis: functools.partial(
            context.attention, axis=axis, order=context.contiguous
        ),
        "ulysses": functools.partial(context.ulysses, order=context.contiguous),
        "gathered": functools.partial(context.gathered, order=context.contiguous),
    }[attend]
    compute = {"attention": context.blockwise, "context_attention": in_order}
    with pytest.raises(
        ValueError,
        match=rf"context\.{attend}: the layers split .* order than the attention's order= "
        r"\(contiguous\)\. Pass the order of context\.comms",
    ):
        lowered(gpt2.FAMILY, KINDS["gpt2"][1], Layout(data=2, context=2), **compute)


def test_gathered_weights_are_no_attention():
    """ZeRO-3 sends along the axis too, weights that is."""
    family = dataclasses.replace(bare.FAMILY, context_attention=context.causal_attention)
    with pytest.raises(
        ValueError,
        match=re.escape("the layers send nothing along ['context'], which splits their tokens"),
    ):
        lowered(family, bare.Config(), Layout(data=2, context=2, zero=3))


@pytest.mark.sweep(3, "wholes")
def test_keys_do_not_go_round_where_stages_do_other_jobs():
    layout = Layout.parse("context=2,stage=2,microbatches=2,schedule=zero_bubble")
    message = (
        r"a stage's forward pass runs ppermute over 'context' (.*)\. All devices must run this "
        "collective at the same time"
    )
    with pytest.raises(ValueError, match=message):
        lowered(llama.FAMILY, KINDS["llama"][1], layout)


@pytest.mark.parametrize("message", REFUSED)
def test_attention_that_ignores_the_axis_is_refused(message):
    family, config, compute = REFUSED[message]
    with pytest.raises(ValueError, match=re.escape(message)):
        lowered(family, config, Layout(context=2, data=2), **compute)
