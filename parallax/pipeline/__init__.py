"""Pipeline parallelism: a checked table of jobs, run by all stages in step, without a conditional and in constant memory."""

from parallax.pipeline.arrows import from_last, value, value_and_grad
from parallax.pipeline.executor import Shares

__all__ = ["Shares", "from_last", "value", "value_and_grad"]
