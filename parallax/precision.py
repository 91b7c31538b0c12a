"""Which floating-point type a number is kept in."""

import jax.numpy as jnp


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """The type to add up values of `dtype` in: itself where it has 32 bits or more, else float32."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)
