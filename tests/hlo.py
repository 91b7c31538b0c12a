"""The collectives of a compiled program, read from its text: what XLA really sends."""

from parallax.hlo import Op, collectives, parse

__all__ = ["Op", "collectives", "parse"]
