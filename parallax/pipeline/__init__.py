"""Pipeline parallelism: runs a schedule, which is a checked table of jobs, as one program without
conditionals.

A microbatch passes through four files, from `value_and_grad` to the user's traced functions:

    gradient -> lockstep | per_stage -> jobs -> traced

A schedule runs in steps, which are called ticks. Before the first tick, `programs` traces the
user's functions. `buffers` stores arrays between ticks.
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
