"""What a compiled program does, read from its text: what it sends, which buffers live when, its memory over
time; and programs compiled for accelerators that are not there, with the time that they take by estimate."""

from parallax.compiled import (
    buffers,
    certificate,
    hlo,
    links,
    memory,
    rates,
    report,
    seconds,
    slices,
    sources,
    targets,
    timeline,
    trips,
)

__all__ = [
    "buffers",
    "certificate",
    "hlo",
    "links",
    "memory",
    "rates",
    "report",
    "seconds",
    "slices",
    "sources",
    "targets",
    "timeline",
    "trips",
]
