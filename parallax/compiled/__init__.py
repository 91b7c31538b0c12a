"""What a compiled program does, read from its text: what it sends, which buffers live when, its memory over time."""

from parallax.compiled import buffers, certificate, hlo, memory

__all__ = ["buffers", "certificate", "hlo", "memory"]
