"""Runs that outlive what goes wrong: many processes as one job, a lock on the folder, checkpoints,
copies compared, a watchdog, and what a loop measures. Each module is imported when it is first
asked for: `job` and `lock` work before JAX is imported.
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
    if name in __all__:
        return import_module(f"parallax.run.{name}")
    raise AttributeError(f"module 'parallax.run' has no attribute {name!r}")
