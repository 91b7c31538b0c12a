"""What a compiled program does, read from its text: what it sends and needs; and programs
compiled for accelerators that are not there, with the time that they take by estimate."""

from parallax.compiled import (
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
