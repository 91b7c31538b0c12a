"""The memory of a step as its compiler counts it."""

import jax
import jax.numpy as jnp

from parallax.compiled import memory


def test_what_is_donated_makes_room():
    def f(x, w):
        return jnp.tanh(x @ w) @ w, jnp.zeros(())

    x, w = jnp.ones((512, 64)), jnp.ones((64, 64))
    kept, given = (
        memory.of(jax.jit(f, donate_argnums=n).lower(x, w).compile()) for n in ((), (0,))
    )
    assert kept["results"] - given["results"] == x.nbytes
    assert kept["arguments"] == given["arguments"] == x.nbytes + w.nbytes
    assert kept["peak"] == sum(size for kind, size in kept.items() if kind != "peak")
