"""Reads from compiled programs how much memory they use and which messages the devices exchange.
Compiles programs for accelerators that this machine does not have, and estimates the time that they
take."""

from parallax.compiled import (
    async_fusions,
    certificate,
    hlo,
    links,
    loop_counts,
    memory,
    report,
    seconds,
    slices,
    source_lines,
    targets,
    timeline,
)

__all__ = [
    "async_fusions",
    "certificate",
    "hlo",
    "links",
    "loop_counts",
    "memory",
    "report",
    "seconds",
    "slices",
    "source_lines",
    "targets",
    "timeline",
]
