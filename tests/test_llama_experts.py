"""A Llama with experts: every layout trains it as all experts on all tokens do on one device."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mixtures
import numpy as np
import optax
import pytest
from reference import EXACT, FLOAT64, assert_close, assert_same_run, gpt2_on, gpt2_on_one_device, windows

from parallax import experts, mesh, tensor
from parallax.layout import Layout
from parallax.models import decoder, llama

BATCH, STEPS, KEY = 8, 5, jax.random.key(0)
TINY = llama.Config(
    **{"layers": 4, "heads": 4, "groups": 2, "width": 16, "hidden": 12, "context": 8, "vocabulary": 61},
    **{"vocabulary_multiple": 64, "experts": 4, "chosen": 2, "balance": 0.3, "z": 0.05},  # far above what one takes
)
CONFIGS = {"2 of 4": TINY, "3 of 8, shared": dataclasses.replace(TINY, experts=8, chosen=3, shared=8)}
LAYOUTS = [
    Layout(data=2, expert=4, zero=3, microbatches=2),
    Layout(data=2, expert=2, tensor=2, zero=1, sequence=True),
    Layout(data=2, expert=2, stage=2, zero=2, microbatches=2, chunks=2),
    Layout(data=2, expert=2, context=2, zero=2, remat="block"),
    Layout(expert=2, stage=2, tensor=2, microbatches=2, schedule="zero_bubble"),
    Layout(expert=2, context=2, tensor=2, microbatches=2, sequence=True),
    Layout(expert=2, stage=2, context=2, microbatches=2, remat="products"),
    Layout(replica=2, data=2, expert=2, zero=3),
    Layout(data=8, zero=3),
]


class Plain(NamedTuple):
    """A family with its loss on one device."""

    FAMILY: Any
    loss: Any


def all_on_all(axis, shared=(), kept=lambda ids: None):
    """Joins by which all experts run on all tokens, times a mask; `kept`: which choices count."""

    def mixture(y, w, *, route, joins):
        choice = route(y @ w.router, None)
        w = experts.Mixture(w.router, w.experts, jnp.zeros(w.router.shape[-1], y.dtype))
        plain = mixtures.Plain(choice.experts.shape[-1], normalised=True)
        return mixtures.dense(y, w, plain, kept(jax.lax.stop_gradient(choice.experts)))

    return tensor.joins(axis, shared=shared)._replace(mixes=lambda _: mixture)


def dense_loss(model, batch):
    return llama.loss(model, batch, joins=all_on_all)


PLAIN = Plain(llama.FAMILY, dense_loss)


def on(layout):
    return mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])


@pytest.mark.sweep(18)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_five_steps_are_those_of_all_experts_on_all_tokens(config, layout):
    plain = gpt2_on_one_device(CONFIGS[config], 0, STEPS, BATCH, PLAIN)
    assert_same_run(gpt2_on(layout, on(layout), CONFIGS[config], 0, STEPS, BATCH, kind=llama), plain)


def test_what_finds_no_room_is_counted_in_the_info_of_a_step():
    """A token that is dropped goes on by the residual alone, and the loss is that of one device that drops the same."""
    layout, dispatch = Layout(expert=4), experts.exchanged(0.6)
    config = dataclasses.replace(TINY, layers=2)
    room = dispatch.room(BATCH // 4 * config.context, config.chosen, 1, 4)

    def kept(ids):
        by_hand = lambda ids: mixtures.dropping(np.asarray(ids), 4, 1, room, shared=False)
        return jax.pure_callback(by_hand, jax.ShapeDtypeStruct(ids.shape, bool), ids)

    compute = decoder.Compute(dtype=FLOAT64, dispatch=dispatch)
    options = {"batch": BATCH, "key": jax.random.key(0), "compute": compute}
    tokens = windows(config, 0, 0, BATCH)
    prepared = decoder.prepare(llama.FAMILY, config, optax.sgd(0.1), layout, on(layout), **options)
    state = prepared.init()
    model = jax.tree.map(jnp.asarray, jax.device_get(state.model))
    joins = functools.partial(all_on_all, kept=kept)
    loss, told = jax.jit(functools.partial(llama.loss_and_statistics, joins=joins))(model, (tokens, None))
    _, info = prepared.train(state, tokens)
    assert_close(info.aux.stages, told, EXACT)
    np.testing.assert_allclose(info.loss, loss, rtol=EXACT)
    assert np.all(info.aux.stages.dropped > 0)
    assert info.aux.stages.load.shape == (2, 4)
    alone = decoder.loss_step(llama.FAMILY, config, layout, on(layout), compute=compute)(model, tokens)
    added = config.balance * np.sum(told.balance) + config.z * np.sum(told.z)
    np.testing.assert_allclose(alone + added, loss, rtol=EXACT)  # an evaluation is without the auxiliary losses


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"experts": 2, "chosen": 3}, r"a token goes to chosen=3 experts, and there are experts=2\. Take chosen=2\."),
        ({"experts": 0}, r"balance=0\.3 belongs to a layer with experts, and experts=0\. Take experts=8, or balance=0\."),
        ({"experts": 0, "balance": 0, "z": 0, "shared": 4}, r"shared=4 belongs to a layer with experts"),
        ({"experts": -1}, r"needs experts of 0 or more; got -1"),
        ({"chosen": 0}, r"needs chosen of 1 or more; got 0"),
    ],
    ids=str,
)
def test_a_configuration_that_means_nothing_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **wrong)


def test_a_layout_that_splits_no_experts_is_refused():
    prepare = lambda family, config: decoder.prepare(family, config, optax.sgd(0.1), layout, on(layout), batch=8, key=KEY)
    layout = Layout(expert=8)
    with pytest.raises(ValueError, match=r"the model's experts \(experts=4\) must divide by expert=8\. Take expert=4"):
        prepare(llama.FAMILY, TINY)
    dense = dataclasses.replace(TINY, experts=0, balance=0, z=0)
    with pytest.raises(ValueError, match=r"the model's experts \(experts=1\) must divide by expert=8\. Take expert=1"):
        prepare(llama.FAMILY, dense)


def test_parameters_are_those_of_mixtral():
    config = llama.Config(
        **{"layers": 32, "heads": 32, "groups": 8, "width": 4096, "hidden": 14336, "context": 32768, "vocabulary": 32000},
        **{"experts": 8, "chosen": 2},
    )
    assert config.parameters == 46_702_792_704  # as published: 46.7 B
    count = lambda config: sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: llama.Llama(config, key=KEY))))
    for each in CONFIGS.values():
        assert count(each) == each.parameters + 2 * (each.rows - each.vocabulary) * each.width
