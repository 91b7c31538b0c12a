"""Pipeline parallelism: a checked table of jobs, run without a conditional and in constant memory.

Four files run a microbatch, from `value_and_grad` to the traced function of the user:

    gradient -> lockstep | per_stage -> jobs -> traced

`programs` traces the user's functions, once each, before the first tick. `buffers` stores arrays
between ticks.
"""

from parallax.pipeline.checks import Output
from parallax.pipeline.exchange import Exchange, split_over, whole
from parallax.pipeline.gradient import from_last, value, value_and_grad
from parallax.pipeline.layers import (
    from_placement,
    layers_per_stage,
    local_chunks,
    pad_layers,
    run_layers,
    stored,
    to_placement,
    unpad_layers,
)
from parallax.pipeline.one_device import Aux, sequential, unpipelined
from parallax.pipeline.rows import distances
from parallax.pipeline.save import inputs, residuals
from parallax.pipeline.traced import Misused

__all__ = [
    "Aux",
    "Exchange",
    "Misused",
    "Output",
    "distances",
    "from_last",
    "from_placement",
    "inputs",
    "layers_per_stage",
    "local_chunks",
    "pad_layers",
    "residuals",
    "run_layers",
    "sequential",
    "split_over",
    "stored",
    "to_placement",
    "unpad_layers",
    "unpipelined",
    "value",
    "value_and_grad",
    "whole",
]
