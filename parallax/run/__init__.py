"""Runs that outlive what goes wrong: many processes as one job, checkpoints, a watchdog, and what a loop measures."""

from parallax.run import checkpoint, metrics, processes, stored, watchdog

__all__ = ["checkpoint", "metrics", "processes", "stored", "watchdog"]
