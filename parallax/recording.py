"""Whether a record of a model's values is made, and the layer and microbatch that are traced now.

The module `taps` makes the record; a *tap* is a place in the model that reports a value. A loop
over layers or microbatches traces the model inside `with at(...)`, a function of this file that
sets the number of the layer or microbatch. The code of the loop imports only this file, not `taps`.
Outside of `with taps.recording()`, this file adds nothing to a program.
"""

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Bool, Int

# The `taps.Recorder` to which taps report.
RECORDER: ContextVar[Any] = ContextVar("recorder", default=None)
_ENTERED = itertools.count()  # a new number for each `at`
# The numbers that `at` has set, by "layer" and "microbatch". The default, a dict, is never changed
# in place.
AT: ContextVar[dict[str, Any]] = ContextVar("at", default={})  # noqa: B039


def is_on() -> bool:
    """Returns whether a record is being made."""
    return RECORDER.get() is not None


@contextlib.contextmanager
def at(**tags: Any) -> Iterator[None]:
    """Sets the `layer` or the `microbatch` of the values that taps report in the `with` block. A
    tap is a place in the model that reports a value.

    `layer` and `microbatch` are integers or arrays. None keeps the number that an enclosing `at`
    has set. Outside of `with taps.recording()`, `at` does nothing.
    """
    if not is_on():
        yield
        return
    token = AT.set(AT.get() | {name: tag for name, tag in tags.items() if tag is not None})
    try:
        # A function under `jit` or `checkpoint` must be traced again for each layer, since the
        # trace holds the number. JAX's cache of traces also compares this metadata, so a new number
        # forces a new trace.
        with set_xla_metadata(tapped_at=str(next(_ENTERED))):
            yield
    finally:
        AT.reset(token)


def numbered(count: int) -> Int[Array, " count"] | None:
    """Returns the microbatches' numbers 0 to count - 1, for a loop that passes each to `at`.

    Returns None outside of `with taps.recording()`.
    """
    return jnp.arange(count, dtype=jnp.int32) if is_on() else None


def job(microbatch: Int[Array, ""] | int, valid: Bool[Array, ""] | bool) -> Int[Array, ""] | None:
    """Returns the microbatch of a pipeline stage's job, or -1 if `valid` is false. The result is an
    argument for the function `at`.

    `valid` is false if the stage has no job in this tick. Outside of `with taps.recording()`, the
    result is None.
    """
    return jnp.where(valid, microbatch, -1).astype(jnp.int32) if is_on() else None


@contextlib.contextmanager
def only_if(valid: Bool[Array, ""] | bool) -> Iterator[None]:
    """Sets the number of the microbatch to -1 in the `with` block, on devices on which `valid` is
    false. `bisect` ignores the values that taps report with the number -1."""
    with at(microbatch=job(AT.get().get("microbatch", 0), valid)):
        yield
