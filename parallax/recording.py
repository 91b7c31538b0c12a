"""Whether a record of a model's values is being made, and the layer and microbatch at which a
program is traced.

`taps` reports the values. A loop that only says its place needs this file alone, and while no
record is made, nothing of it is in a program.
"""

import contextlib
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Bool, Int

# What taps report to, a `taps.Recorder`.
RECORDER: ContextVar[Any] = ContextVar("recorder", default=None)
_ENTERED = itertools.count()
# The default is never changed in place.
AT: ContextVar[dict[str, Any]] = ContextVar("at", default={})  # noqa: B039


def is_on() -> bool:
    """Returns whether a record is being made."""
    return RECORDER.get() is not None


@contextlib.contextmanager
def at(**tags: Any) -> Iterator[None]:
    """Taps inside are at this `layer` or `microbatch`, whole numbers or arrays; None leaves it as
    it is."""
    if not is_on():
        yield
        return
    token = AT.set(AT.get() | {name: tag for name, tag in tags.items() if tag is not None})
    try:
        # A function under `jit` or `checkpoint` that was traced at another layer must be traced
        # again. JAX looks a trace up by the metadata around it too.
        with set_xla_metadata(tapped_at=str(next(_ENTERED))):
            yield
    finally:
        AT.reset(token)


def numbered(count: int) -> Int[Array, " count"] | None:
    """Returns the numbers of microbatches, for a loop that says them to `at`; None while no record
    is made."""
    return jnp.arange(count, dtype=jnp.int32) if is_on() else None


def job(microbatch: Int[Array, ""], valid: Bool[Array, ""] | bool) -> Int[Array, ""] | None:
    """Returns the number of a microbatch where there is a job, and otherwise -1; None while no
    record is made."""
    return jnp.where(valid, microbatch, -1).astype(jnp.int32) if is_on() else None
