"""What a training run needs to survive faults: many processes as one job, a lock on the run's
folder, checkpoints, a comparison of replicas, a watchdog, and metrics. Each module is imported at
its first use, so that `job` and `lock` work before JAX is imported.
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
