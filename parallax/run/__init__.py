"""Modules for long training runs. They start and end the processes of a job together, lock the
run's folder, save checkpoints, compare replicas, detect a step that hangs, and write metrics. Each
module is imported at its first use, so that `job` and `lock` work before JAX is imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallax.run import (
        barriers,
        checkpoint,
        fingerprint,
        job,
        lock,
        metrics,
        peers,
        processes,
        record,
        signals,
        spikes,
        stored,
        watchdog,
    )

__all__ = [
    "barriers",
    "checkpoint",
    "fingerprint",
    "job",
    "lock",
    "metrics",
    "peers",
    "processes",
    "record",
    "signals",
    "spikes",
    "stored",
    "watchdog",
]


def __getattr__(name: str) -> Any:
    """Returns the module `name` of this package, and imports it at its first use."""
    if name in __all__:
        return import_module(f"parallax.run.{name}")
    raise AttributeError(f"module 'parallax.run' has no attribute {name!r}")
