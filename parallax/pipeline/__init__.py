"""Pipeline parallelism: a checked table of jobs, run by all stages in step, without a conditional and in constant memory."""

from parallax.pipeline.arrows import Aux, at_once, from_last, own_chunks, unsplit, value, value_and_grad
from parallax.pipeline.checks import Output
from parallax.pipeline.exchange import WHOLE, Exchange, split_over
from parallax.pipeline.kept import inputs, residuals
from parallax.pipeline.on_disk import stored
from parallax.pipeline.operations import Work, counted
from parallax.pipeline.traced import Misused
from parallax.pipeline.turns import distances
from parallax.pipeline.uneven import arranged, dealt, in_model_order, padded, run_layers, unpadded

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
