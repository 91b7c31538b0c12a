"""What a compiled program does, read from its text: what it sends and needs; and programs
compiled for accelerators that are not there, with the time that they take by estimate."""

from parallax.compiled import (
    certificate,
    hlo,
    links,
    memory,
    report,
    seconds,
    slices,
    sources,
    targets,
    timeline,
    trips,
)

__all__ = [
    "certificate",
    "hlo",
    "links",
    "memory",
    "report",
    "seconds",
    "slices",
    "sources",
    "targets",
    "timeline",
    "trips",
]
