"""Mistakes that a traced program shows: nothing is compiled, nothing is run."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.typing import DTypeLike

from parallax.lint import values
from parallax.lint.finding import Finding
from parallax.lint.jaxprs import opened
from parallax.lint.walk import Walk


def program(f: Callable[..., Any] | ClosedJaxpr, *args: Any, compute: DTypeLike | None = None) -> list[Finding]:
    """The mistakes in `f(*args)` that run in silence, in the order of the program. It is traced only.

    * `collective-under-a-predicate`: a `ppermute`, ours too, in a `cond`, `switch` or `while` whose predicate differs between
      devices. It waits for all devices of the program, and hangs. So does another collective whose own axis it differs along.
    * `lost-varying-mark`: a `cond` with such a predicate, and operands or results that are typed as the same everywhere: wrong
      gradients (jax #40823).
    * `summed-twice`: a sum over devices of what is the same on all of them.
    * `sum-in-a-loop`: a sum whose result is only added to a loop's carry; one sum of that carry after the loop is the same.
    * `same-every-trip`: a collective in a loop, of something that the loop does not change.
    * `wide-product`: a matrix product or convolution in 32 bits or more, of numbers that came from bfloat16 or float16.

    Devices differ along the axes of `in_specs` and of `lax.axis_index`; what a sum, a maximum or a gather gives is the same
    again, even where it is typed as varying. Axes of one device do not count.

    Args:
        f: a function, usually a whole step made by `mesh.spmd`, or what `jax.make_jaxpr` gave, then without `args`.
        args: as `f` takes them; `jax.ShapeDtypeStruct`s will do for arrays.
        compute: the 16-bit type that all products should be in; then each wider one is a finding, whatever it multiplies.

    Raises:
        ValueError: `compute` is a wider type.
    """
    if compute is not None and not values.is_narrow(jnp.dtype(compute)):
        raise ValueError(
            f"lint.program: compute is the 16-bit type of a region; got {compute}. Take jnp.bfloat16, or leave it out."
        )
    jaxpr = f if isinstance(f, ClosedJaxpr) else eqx.filter_make_jaxpr(f)(*args)[0]
    walk = Walk(narrow=compute is not None)
    walk(opened(jaxpr), [values.Value()] * len(jaxpr.in_avals))
    return list(walk.findings.values())
