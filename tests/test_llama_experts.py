"""A Llama with experts: every layout trains it as all experts on all tokens do on one device."""

import dataclasses
import functools
import os
import subprocess
import sys
from typing import Any, NamedTuple

import flags
import jax
import jax.numpy as jnp
import mixtures
import numpy as np
import optax
import pytest
from reference import (
    EXACT,
    FLOAT64,
    assert_close,
    assert_same_run,
    gpt2_on,
    gpt2_on_one_device,
    windows,
)

from parallax import experts, mesh, tensor
from parallax.layout import Layout
from parallax.models import decoder, llama

BATCH, STEPS, KEY = 16, 5, jax.random.key(0)
TINY = llama.Config(
    **{
        "layers": 4,
        "heads": 4,
        "groups": 2,
        "width": 16,
        "hidden": 12,
        "context": 8,
        "vocabulary": 61,
    },
    **{
        "vocabulary_multiple": 64,
        "experts": 4,
        "chosen": 2,
        "balance": 0.3,
        "z": 0.05,
    },  # far above what one takes
)
CONFIGS = {
    "2 of 4": TINY,
    "3 of 8, shared": dataclasses.replace(TINY, experts=8, chosen=3, shared=8),
}
LAYOUTS = [
    Layout(data=2, expert=4, zero=3, microbatches=2),
    Layout(data=2, expert=2, tensor=2, zero=1, sequence=True),
    Layout(data=2, expert=2, stage=2, zero=2, microbatches=2, chunks=2),
    Layout(data=2, expert=2, context=2, zero=2, remat="block"),
    Layout(expert=2, stage=2, tensor=2, microbatches=2, schedule="zero_bubble_lockstep"),
    Layout(expert=2, context=2, tensor=2, microbatches=2, sequence=True),
    Layout(expert=2, stage=2, context=2, microbatches=2),
    Layout(replica=2, data=2, expert=2, zero=3),
    Layout(data=8, zero=3),
]


class Plain(NamedTuple):
    """A family with its loss on one device."""

    FAMILY: Any
    loss: Any


def all_on_all(axis, shared=(), kept=lambda ids: None):
    """Comms by which all experts run on all tokens, times a mask; `kept`: which choices count."""

    def mixture(y, w, *, route, comms):
        choice = route(y @ w.router, None)
        w = experts.Mixture(w.router, w.experts, jnp.zeros(w.router.shape[-1], y.dtype))
        plain = mixtures.Plain(choice.experts.shape[-1], normalised=True)
        return mixtures.dense(y, w, plain, kept(jax.lax.stop_gradient(choice.experts)))

    return tensor.comms(axis, shared=shared)._replace(wrap_experts=lambda _: mixture)


def dense_loss(model, batch):
    return llama.loss(model, batch, comms=all_on_all)


PLAIN = Plain(llama.FAMILY, dense_loss)


def on(layout):
    return mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])


@pytest.mark.long
@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_five_steps_are_those_of_all_experts_on_all_tokens(config, layout):
    plain = gpt2_on_one_device(CONFIGS[config], 0, STEPS, BATCH, PLAIN)
    assert_same_run(
        gpt2_on(layout, on(layout), CONFIGS[config], 0, STEPS, BATCH, kind=llama), plain
    )


TOLD = {
    "dropping": (Layout(expert=2, tensor=2, sequence=True), experts.exchanged(0.6)),
    "accumulated": (Layout(data=2, expert=2, context=2, microbatches=2), experts.gathered),
    "interleaved": (
        Layout(expert=2, stage=2, tensor=2, chunks=2, microbatches=2),
        experts.gathered,
    ),
}


@pytest.mark.sweep(30, "steps")
def test_what_finds_no_room_is_counted_in_the_info_of_a_step():
    """A dropped token goes on by the residual alone: the loss is that of one device that drops the
    same."""
    check_info("dropping")


@pytest.mark.long
@pytest.mark.parametrize("case", ["accumulated", "interleaved"])
def test_the_info_of_a_step_tells_of_each_layer(case):
    check_info(case)


def check_info(case):
    """Loss, with the auxiliary losses, and statistics are those of all experts on all tokens on one
    device."""
    (layout, dispatch), drops, config = TOLD[case], case == "dropping", TINY

    def kept(ids):
        room = dispatch.room(BATCH // 2 * config.context, config.chosen, 2, 2)
        by_hand = lambda ids: mixtures.dropping(np.asarray(ids), 2, 2, room, shared=False)
        return jax.pure_callback(by_hand, jax.ShapeDtypeStruct(ids.shape, bool), ids)

    compute, tokens = (
        decoder.Compute(dtype=FLOAT64, expert_dispatch=dispatch),
        windows(config, 0, 0, BATCH),
    )
    options = {"batch": BATCH, "key": KEY, "compute": compute}
    prepared = decoder.train_step(
        llama.FAMILY, config, optax.sgd(0.1), layout, on(layout), **options
    )
    state = prepared.init()
    model = jax.tree.map(
        jnp.asarray, jax.device_get(decoder.joined(llama.FAMILY, layout, state.model))
    )
    comms = functools.partial(all_on_all, kept=kept) if drops else all_on_all
    loss, told = jax.jit(functools.partial(llama.loss_and_statistics, comms=comms))(
        model, (tokens, None)
    )
    _, info = prepared.train(state, tokens)
    np.testing.assert_allclose(info.loss, loss, rtol=EXACT)
    assert_close(info.aux.stages, told, EXACT)
    assert np.all((info.aux.stages.dropped > 0) == drops)
    assert info.aux.stages.load.shape == (config.layers, config.experts)


@pytest.mark.long
def test_an_evaluation_is_without_auxiliary_losses():
    layout, tokens = Layout(expert=2), jnp.asarray(windows(TINY, 0, 0, BATCH))
    model = llama.Llama(TINY, key=KEY)
    alone = decoder.loss_step(llama.FAMILY, TINY, layout, on(layout))(model, tokens)
    loss = llama.loss(
        llama.Llama(dataclasses.replace(TINY, balance=0.0, z=0.0), key=KEY), (tokens, None)
    )
    np.testing.assert_allclose(alone, loss, rtol=2e-6)  # a float32 has 7 digits


@pytest.mark.long
def test_auxiliary_losses_are_scaled_in_float16():
    """The gradient's norm is mostly theirs: unscaled, they would be lost beside a loss times
    2^15."""
    config, tokens, norms = (
        dataclasses.replace(TINY, balance=30.0, z=5.0, layers=1),
        windows(TINY, 0, 0, BATCH),
        [],
    )
    for precision in ("full", "float16"):
        layout = Layout(expert=2, precision=precision)
        made = decoder.train_step(
            llama.FAMILY, config, optax.sgd(0.1), layout, on(layout), batch=BATCH, key=KEY
        )
        state, train = made.init(), made.train
        norms.append(float(train(state, tokens)[1].gradient_norm))
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-2)  # float16 has 3 digits


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"experts": 2, "chosen": 3},
            r"chosen, .* must be at most experts=2; got chosen=3\. Use chosen=2\.",
        ),
        (
            {"experts": 0},
            r"balance=0\.3 needs layers with experts; got experts=0\. Use experts=8, .*, or "
            r"balance=0\.",
        ),
        (
            {"experts": 0, "balance": 0.0, "z": 0.0, "shared": 4},
            r"shared=4 needs layers with experts",
        ),
        ({"experts": -1}, r"needs experts of 0 or more; got -1"),
        ({"chosen": 0}, r"needs chosen of 1 or more; got 0"),
    ],
    ids=str,
)
def test_a_configuration_that_means_nothing_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **wrong)


def test_a_layout_that_splits_no_experts_is_refused():
    prepare = lambda family, config: decoder.train_step(
        family, config, optax.sgd(0.1), layout, on(layout), batch=8, key=KEY
    )
    layout = Layout(expert=8)
    with pytest.raises(
        ValueError,
        match=r"the model's experts \(experts=4\) must be a multiple of expert=8\. Use expert=4",
    ):
        prepare(llama.FAMILY, TINY)
    dense = dataclasses.replace(TINY, experts=0, balance=0.0, z=0.0)
    with pytest.raises(
        ValueError,
        match=r"the model's experts \(experts=1\) must be a multiple of expert=8\. Use expert=1",
    ):
        prepare(llama.FAMILY, dense)


def test_parameters_are_those_of_mixtral():
    config = llama.Config(
        **{
            "layers": 32,
            "heads": 32,
            "groups": 8,
            "width": 4096,
            "hidden": 14336,
            "context": 32768,
            "vocabulary": 32000,
        },
        **{"experts": 8, "chosen": 2},
    )
    assert config.parameters == 46_702_792_704  # as published: 46.7 B
    count = lambda config: sum(
        leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: llama.Llama(config, key=KEY)))
    )
    for each in CONFIGS.values():
        assert count(each) == each.parameters + 2 * (each.rows - each.vocabulary) * each.width


SIXTEEN = (
    Layout(data=2, expert=2, stage=2, tensor=2, microbatches=2, zero=2, sequence=True),
    Layout(data=2, expert=2, context=2, tensor=2, zero=3),
)


@pytest.mark.programs
@pytest.mark.long
def test_four_axes_on_sixteen_devices():
    """In a process of its own, set up by its environment, since arrays of the tests are made on
    import."""
    settings = {
        "NUM_CPU_DEVICES": "16",
        "ENABLE_X64": "1",
        "NUMPY_DTYPE_PROMOTION": "strict",
        "NUMPY_RANK_PROMOTION": "raise",
    }
    environment = (
        os.environ | flags.quick() | {f"JAX_{name}": value for name, value in settings.items()}
    )
    done = subprocess.run(
        [sys.executable, __file__],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    for four in SIXTEEN:
        test_five_steps_are_those_of_all_experts_on_all_tokens("2 of 4", four)
