"""Pipeline parallelism: a checked table of jobs, run by all stages in step, without a conditional and in constant memory."""

from parallax.pipeline.checks import Output
from parallax.pipeline.exchange import WHOLE, Exchange, split_over
from parallax.pipeline.gradient import from_last, value, value_and_grad
from parallax.pipeline.layers import (
    arranged,
    dealt,
    in_model_order,
    own_chunks,
    padded,
    run_layers,
    stored,
    unpadded,
)
from parallax.pipeline.one_device import Aux, at_once, unsplit
from parallax.pipeline.operations import Work, counted
from parallax.pipeline.rows import distances
from parallax.pipeline.save import inputs, residuals
from parallax.pipeline.traced import Misused

__all__ = [
    "WHOLE",
    "Aux",
    "Exchange",
    "Misused",
    "Output",
    "Work",
    "arranged",
    "at_once",
    "counted",
    "dealt",
    "distances",
    "from_last",
    "in_model_order",
    "inputs",
    "own_chunks",
    "padded",
    "residuals",
    "run_layers",
    "split_over",
    "stored",
    "unpadded",
    "unsplit",
    "value",
    "value_and_grad",
]
