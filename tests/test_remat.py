"""`remat.of_arguments`: the values and gradients of the function, of which only the arguments are
kept."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import mesh, remat
from parallax.models import gpt2


def steps(x, weights):
    """Five operations, each of whose results JAX keeps."""
    for name, sign in (("shift", 1.0), ("scale", -1.0)):
        x = jnp.tanh(x + sign * weights[name][None])
        x = x * jnp.exp(x)
    return x


@pytest.fixture
def arguments():
    keys = jax.random.split(jax.random.key(3), 3)
    x = jax.random.normal(keys[0], (8, 6))
    return x, {
        name: jax.random.normal(key, (6,))
        for name, key in zip(("shift", "scale"), keys[1:], strict=True)
    }


def value_and_gradients(f, *arguments):
    return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), argnums=(0, 1))(*arguments)


WAYS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: jax.vmap(lambda row, w: f(row[None], w)[0], in_axes=(0, None)),
    "checkpoint": remat.gathers,
    "scan": lambda f: lambda x, w: lax.scan(lambda x, _: (f(x, w), None), x, None, length=2)[0],
    "devices": lambda f: mesh.spmd(
        f, mesh=mesh.make(data=8), in_specs=(P("data"), P()), out_specs=P("data")
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_the_function(arguments, way):
    mine, plain = (
        value_and_gradients(WAYS[way](f), *arguments) for f in (remat.of_arguments(steps), steps)
    )
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("around", [remat.none, remat.gathers])
def test_only_the_arguments_are_kept(arguments, around):
    """`jax.checkpoint` would keep all results inside another checkpoint that keeps results."""

    def kept(f):
        looped = lambda x, w: lax.scan(lambda x, _: (around(f)(x, w), None), x, None, length=5)[0]
        leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(looped, *a)[1], *arguments))
        return sum(leaf.shape[:2] == (5, 8) for leaf in leaves)  # stacked over the loop

    assert kept(remat.of_arguments(steps)) == 1
    assert kept(functools.partial(steps)) > 3


@pytest.mark.parametrize(
    "around", [remat.gathers, remat.products, remat.block, remat.attention, remat.of_arguments]
)
def test_a_block_takes_any_module(around):
    """An MLP has functions as leaves, and Dropout a Python number and a bool."""
    keys = jax.random.split(jax.random.key(5), 7)
    model = eqx.nn.MLP(4, 4, 8, 1, key=keys[0]), eqx.nn.Dropout(0.3)
    x = jax.random.normal(keys[1], (5, 4))

    def block(model, x, keys, scale):
        mlp, dropout = model
        return x + scale * jax.vmap(lambda row, key: dropout(mlp(row), key=key))(x, keys)

    def found(f):
        loss = lambda model, x: jnp.sum(jnp.sin(f(model, x, keys[2:], 0.5)))
        return eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, x)

    ours, plain = found(around(block)), found(block)
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


def test_attention_with_dropout_is_recomputed_with_the_same_masks():
    """GPT-2 takes its own attention in place of `attend`."""
    T = 24
    config = gpt2.Config(
        layers=2, heads=2, width=16, context=T, vocabulary=32, attention_dropout=0.5
    )
    model = gpt2.GPT2(config, key=jax.random.key(0))
    windows = jnp.arange(4 * (T + 1), dtype=jnp.int32).reshape(4, T + 1) % 32
    batch = windows, jax.random.split(jax.random.key(1), 4)

    def found(attend):
        """Returns the loss, the gradients, and the number of kept arrays with T x T scores."""
        loss = functools.partial(gpt2.loss, attend=attend)
        kept = jax.tree.leaves(jax.eval_shape(lambda m: jax.vjp(loss, m, batch)[1], model))
        of_scores = sum(leaf.shape[-2:] == (T, T) for leaf in kept)
        return jax.jit(jax.value_and_grad(loss))(model, batch), of_scores

    ours, of_ours = found(remat.attention(gpt2.attention))
    plain, of_plain = found(gpt2.attention)
    assert of_ours == 0 < of_plain
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
