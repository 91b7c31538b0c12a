"""The collectives of a compiled program, read from its text: what XLA really sends."""

from parallax.compiled.hlo import Op, collectives, parse, unordered

__all__ = ["Op", "collectives", "parse", "unordered"]
