"""Llama: every layout trains it as one device does, heads of keys and values shared among devices
as well."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from reference import EXACT, assert_close, assert_same_run, gpt2_on, gpt2_on_one_device

from parallax import grads, mesh, rules, sequence, tensor
from parallax.collectives import ring
from parallax.layout import Layout
from parallax.models import decoder, gpt2, llama
from parallax.models.attention import grouped

BATCH, STEPS, KEY = 8, 5, jax.random.key(0)
TINY = llama.Config(
    layers=4,
    heads=4,
    groups=2,
    width=16,
    hidden=24,
    context=8,
    vocabulary=61,
    vocabulary_multiple=64,
)
CONFIGS = {
    "groups": TINY,
    "one group, tied, scaled": dataclasses.replace(
        TINY, groups=1, tied=True, theta=500.0, scaling=llama.Scaling(8.0, 1.0, 4.0, 8)
    ),
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


@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_five_steps_are_those_of_one_device(config, layout):
    plain = gpt2_on_one_device(CONFIGS[config], 0, STEPS, BATCH, llama)
    assert_same_run(
        gpt2_on(layout, on(layout), CONFIGS[config], 0, STEPS, BATCH, kind=llama), plain
    )


def naive(q, k, v, first):
    """One head after another, one query after another."""
    B, T, H, K = q.shape
    y = np.zeros(q.shape)
    for b, t, h in np.ndindex(B, T, H):
        own = h // (H // k.shape[2])
        seen = slice(first + t + 1)
        weights = np.exp(k[b, seen, own] @ q[b, t, h] / K**0.5)
        y[b, t, h] = weights @ v[b, seen, own] / weights.sum()
    return y


def test_segments_that_do_not_number_all_keys_are_refused():
    k = jnp.ones((2, 3, 2, 4))
    with pytest.raises(ValueError, match=r"^attention needs segments .* as many keys as queries"):
        grouped(k[:, :1], k, k, first=2, segments=jnp.ones((2, 1), int))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("heads", "groups", "first"), [(6, 2, 0), (4, 4, 3), (4, 1, 2)])
def test_grouped_attention_is_that_of_each_head(heads, groups, first):
    draw = np.random.default_rng(0).normal
    q, k, v = (
        draw(size=(2, 3, heads, 4)),
        draw(size=(2, 3 + first, groups, 4)),
        draw(size=(2, 3 + first, groups, 4)),
    )
    found = grouped(*map(jnp.asarray, (q, k, v)), first=first, sharers=heads // groups)
    np.testing.assert_allclose(found, naive(q, k, v, first), rtol=1e-13, atol=1e-15)
    later = grouped(
        jnp.asarray(q[:, 1:]),
        jnp.asarray(k),
        jnp.asarray(v),
        first=jnp.asarray(first + 1, jnp.int32),
    )
    np.testing.assert_allclose(later, found[:, 1:], rtol=1e-13, atol=1e-15)


def test_groups_that_were_not_picked_are_refused():
    q, k = jnp.zeros((1, 3, 2, 4)), jnp.zeros((1, 3, 4, 4))
    with pytest.raises(
        ValueError, match=r"heads of q that is a multiple of .*; got 2 of q and 4 of k and v"
    ):
        grouped(q, k, k)
    with pytest.raises(
        ValueError, match=r"4 heads of queries share one .* so with 2 heads .* must be 1; got 2\."
    ):
        grouped(q, k[:, :, :2], k[:, :, :2], sharers=4)  # of 8 heads and 2 groups on 4 devices
    assert grouped(q, k[:, :, :1], k[:, :, :1], sharers=4).shape == q.shape
    q = jnp.zeros((1, 3, 6, 4))  # four heads share the first head of keys, two the next
    with pytest.raises(ValueError, match=r"a multiple or a divisor of 4 heads of queries; got 6\."):
        grouped(q, k[:, :, :1], k[:, :, :1], sharers=4)


@pytest.mark.sweep(3, "wholes")
def test_a_shard_with_other_heads_is_refused():
    model = llama.Llama(dataclasses.replace(TINY, layers=1), key=KEY)
    windows = jnp.zeros((1, 4), jnp.int32)
    half = lambda layer: llama.Linear(layer.weight[:, :, : layer.weight.shape[2] // 2])
    for where in (lambda m: m.blocks.attention.key, lambda m: m.blocks.attention.query):
        with pytest.raises(
            ValueError,
            match=r"llama: with 4 heads of queries and 2 of keys and values on 1 devices",
        ):
            llama.loss(eqx.tree_at(where, model, replace_fn=half), (windows, None))


def test_groups_that_neither_divide_the_devices_nor_are_divided_are_refused():
    config = dataclasses.replace(TINY, heads=12, groups=6, width=24)
    shapes = jax.eval_shape(lambda: llama.Llama(config, key=KEY))
    with pytest.raises(
        ValueError,
        match=r"llama: groups=6, .* must divide 4, .* Use 3 devices, or groups=4",
    ):
        rules.specs(
            shapes, llama.rules("tensor", size=4), mesh.make(tensor=4, devices=jax.devices()[:4])
        )
    config, layout = dataclasses.replace(TINY, heads=12, groups=6, width=24), Layout(tensor=4)
    with pytest.raises(ValueError, match=r"groups=6, .* must divide 4"):
        decoder.train_step(
            llama.FAMILY, config, optax.sgd(0.1), layout, on(layout), batch=BATCH, key=KEY
        )
    shapes = jax.eval_shape(lambda: llama.Llama(TINY, key=KEY))
    with pytest.raises(
        ValueError, match=r"attention\.key\.weight.* dim 2 .*must be a multiple of 4"
    ):  # without the size
        rules.specs(shapes, llama.rules("tensor"), mesh.make(tensor=4, devices=jax.devices()[:4]))


@pytest.mark.parametrize("family", [gpt2, llama])
@pytest.mark.parametrize(("axis", "over"), [("x", ("x",)), (("x", "y"), ("x", "y")), ((), ())])
def test_the_vocabulary_is_split_over_stages_and_several_axes(family, axis, over):
    """JAX refused the axes in a tuple of their own."""
    options = {"layers": 2, "heads": 2, "width": 8, "context": 4, "vocabulary": 16}
    options |= {"groups": 2, "hidden": 8} if family is llama else {}
    config = family.Config(**options)

    def model():
        whole = family.FAMILY.model(config, key=KEY)
        return eqx.tree_at(
            lambda model: model.blocks, whole, jax.tree.map(lambda x: x[None], whole.blocks)
        )

    found = rules.specs(jax.eval_shape(model), family.rules(axis, stage="stage"))
    assert (found.wte if family is gpt2 else found.table) == P(("stage", *over))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"groups": 3}, r"heads=4 must be a multiple of groups=3\. Use groups=2"),
        ({"width": 18}, r"width=18 must be a multiple of heads=4\. Use heads=3"),
        ({"width": 18, "heads": 6, "groups": 1}, r"an even head_width, .*; got 3"),
        ({"head_width": 5}, r"an even head_width, .*; got 5"),
        ({"hidden": 0}, r"needs hidden of 1 or more; got 0"),
        ({"theta": 0.0}, r"needs theta of more than 0; got 0"),
        ({"epsilon": -1.0}, r"needs epsilon of 0 or more; got -1\.0"),
        ({"vocabulary_multiple": 2**21}, r"vocabulary_multiple of 1048576 or less"),
    ],
    ids=str,
)
def test_a_configuration_that_means_nothing_is_refused(wrong, message):
    sizes = {"layers": 4, "heads": 4, "groups": 2, "width": 16, "hidden": 24} | wrong
    with pytest.raises(ValueError, match=message):
        llama.Config(**sizes)


def test_a_scaling_that_means_nothing_is_refused():
    for wrong, message in (
        ({"high": 1.0}, "needs high > low"),
        ({"factor": 0.0}, "factor of more than 0"),
        ({"original": 0}, "original"),
    ):
        with pytest.raises(ValueError, match=message):
            llama.Scaling(**wrong)


def test_sizes_are_those_that_were_published():
    published = {
        llama.B1: 1_235_814_400,
        llama.B3: 3_212_749_824,
        llama.B8: 8_030_261_248,
        llama.B70: 70_553_706_496,
    }
    for config, count in published.items():
        assert config.parameters == count
        shapes = jax.eval_shape(lambda config=config: llama.Llama(config, key=KEY))
        padding = (config.rows - config.vocabulary) * config.width * (2 - config.tied)
        assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count + padding


@pytest.mark.sweep(30, "steps")
@pytest.mark.parametrize("comms", [tensor.comms, sequence.comms])
def test_heads_on_every_device_may_be_more_than_are_needed(comms):
    """All keys and values on each device, though they could be split: each picks its own."""
    devices = mesh.make(tensor=2, devices=jax.devices()[:2])
    config = dataclasses.replace(TINY, layers=1)
    model = llama.Llama(config, key=KEY, dtype=jnp.float64)
    specs = rules.specs(
        model,
        rules.first(rules.match("blocks.attention.key.weight", P()), llama.rules("tensor")),
        devices,
    )
    loss = functools.partial(llama.loss, axis=ring("tensor"), comms=comms)
    grad = jax.value_and_grad(loss)
    grad = grads.summed(grad, ring("tensor")) if comms is sequence.comms else grad
    run = mesh.spmd(grad, mesh=devices, in_specs=(specs, P()), out_specs=(P(), specs))
    batch = (np.random.default_rng(0).integers(0, 61, (2, 9)).astype(np.int32), None)
    assert_close(
        jax.jit(run)(mesh.place(model, specs, devices), batch),
        jax.jit(jax.value_and_grad(llama.loss))(model, batch),
        EXACT,
    )
