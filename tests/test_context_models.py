"""GPT-2 and Llama with their tokens split over a context axis, beside data, stage and tensor, equal
one device."""

import functools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from jax.sharding import PartitionSpec as P

from parallax import (
    context,
    cross_entropy,
    grads,
    mesh,
    pipeline,
    rules,
    schedule,
    sequence,
    tensor,
)
from parallax.collectives import ring
from parallax.models import gpt2, llama

CONFIG = gpt2.Config(
    layers=2, heads=4, width=16, context=16, vocabulary=61, vocabulary_multiple=8, dropout=0.1
)
MODELS = {
    "gpt2": (gpt2, gpt2.GPT2, CONFIG),
    "llama": (  # one head of keys, which every device of the tensor axis has
        llama,
        llama.Llama,
        llama.Config(
            layers=2,
            heads=4,
            groups=1,
            width=16,
            hidden=24,
            context=16,
            vocabulary=61,
            vocabulary_multiple=8,
        ),
    ),
}
LAYOUTS = {  # the axes of the mesh; how layers join; who attends
    "data, tensor": ({"data": 2, "context": 2, "tensor": 2}, tensor.comms, None),
    "sequence": ({"context": 4, "tensor": 2}, sequence.comms, None),
    "stage": ({"context": 2, "stage": 2, "tensor": 2}, tensor.comms, None),
    "stage, sequence, ulysses": (
        {"context": 2, "stage": 2, "tensor": 2},
        sequence.comms,
        lambda attend: context.ulysses(attend, ring("context")),
    ),
    "gathered": (
        {"data": 2, "context": 4},
        tensor.comms,
        lambda attend: context.gathered(context.blockwise, ring("context")),
    ),
}


def batch_of(weighted):
    draw = np.random.default_rng(0)
    windows = jnp.asarray(
        draw.integers(0, CONFIG.vocabulary, (4, CONFIG.context + 1)).astype(np.int32)
    )
    weights = (
        jnp.asarray(draw.integers(0, 3, (4, CONFIG.context)).astype(float)) if weighted else None
    )
    return gpt2.Batch(windows, jax.random.split(jax.random.key(1), 4), weights)


def chunked(model):
    return eqx.tree_at(lambda m: m.blocks, model, jax.tree.map(lambda w: w[None], model.blocks))


@functools.cache
def on_one_device(of, weighted):
    family, make, config = MODELS[of]
    model = make(config, key=jax.random.key(0), dtype=reference.FLOAT64)
    batch = batch_of(weighted)
    if weighted:
        batch = batch._replace(weights=batch.weights / jnp.mean(batch.weights))
    return model, *jax.jit(jax.value_and_grad(family.loss))(model, batch)


@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize("of", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_one_device(layout, of):
    family, _, config = MODELS[of]
    axes, inner, around = LAYOUTS[layout]
    weighted = "data" in axes
    model, expected_loss, expected = on_one_device(of, weighted)
    over = mesh.make(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    t = ring("tensor") if "tensor" in axes else ()
    comms = functools.partial(context.comms, context=ring("context"), inner=inner, around=around)
    rules_of = functools.partial(family.FAMILY.rules, size=axes.get("tensor", 1))
    split = ("data", "context") if "data" in axes else "context"
    if "stage" in axes:
        model, rule = chunked(model), rules_of("tensor", stage="stage")
        stages = family.stages(
            config, ring("stage"), t, comms=comms, attend=family.FAMILY.attention
        )
        grad = pipeline.value_and_grad(
            *stages, schedule.one_f_one_b_lockstep(stages=2, microbatches=2), ring("stage")
        )
    else:
        rule = rules_of("tensor" if "tensor" in axes else ())
        grad = grads.accumulated(
            jax.value_and_grad(functools.partial(family.loss, axis=t, comms=comms)), microbatches=2
        )
    grad = grads.summed(grad, ring("tensor")) if inner is sequence.comms else grad
    grad = grads.averaged(grad, ring(split))

    def inside(model, batch):
        weights = None if batch.weights is None else cross_entropy.normalized(batch.weights, "data")
        return grad(model, batch._replace(weights=weights))

    specs = rules.specs(model, rule, over)
    rows = P("data" if "data" in axes else None)
    run = jax.jit(mesh.spmd(inside, mesh=over, in_specs=(specs, rows), out_specs=(P(), specs)))
    loss, found = run(mesh.place(model, specs, over), batch_of(weighted))
    found = (
        eqx.tree_at(lambda m: m.blocks, found, jax.tree.map(lambda w: w[0], found.blocks))
        if "stage" in axes
        else found
    )
    np.testing.assert_allclose(float(loss), float(expected_loss), rtol=reference.EXACT)
    reference.assert_close(jax.device_get(found), jax.device_get(expected), reference.EXACT)


ERRORS = {
    "gpt2: attention_dropout=0.1 needs all tokens on a device; they are split over 2 devices.": (
        {"attention_dropout": 0.1},
        16,
    ),
    "context: the number of tokens, 10, must be a multiple of 4: 2 chunks for each of 2 devices. "
    "Use sequences of 12": (
        {},
        10,
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_refusals(message):
    changed, tokens = ERRORS[message]
    config = gpt2.Config(layers=1, heads=2, width=8, context=16, vocabulary=61, **changed)
    model = jax.eval_shape(lambda: gpt2.GPT2(config, key=jax.random.key(0)))
    loss = functools.partial(gpt2.loss, comms=functools.partial(context.comms, context="context"))
    over = mesh.make(context=2, devices=jax.devices()[:2])
    f = mesh.spmd(
        lambda *given: loss(*given)[None], mesh=over, in_specs=P(), out_specs=P("context")
    )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(1), 2))
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(f, model, (jax.ShapeDtypeStruct((2, tokens + 1), jnp.int32), keys))
