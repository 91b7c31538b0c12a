"""GPT-2 as the three functions of a pipeline, its vocabulary shared out over stages and tensor
devices: see `models.decoder_parts`.
"""

from collections.abc import Callable
from typing import Any

from parallax import pipeline, tensor
from parallax.collectives import AxisLike
from parallax.models import decoder_parts
from parallax.models.gpt2 import forward
from parallax.models.gpt2.model import Config, attention
from parallax.remat import none
from parallax.schedule.places import Placement


def stages(
    config: Config,
    stage_axis: AxisLike = "stage",
    axis: AxisLike = "tensor",
    *,
    comms: Callable[..., Any] = tensor.comms,
    attend: Callable[..., Any] = attention,
    remat: Callable[..., Any] = none,
    unroll: int = 1,
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """`(embed, stage, head)` for `pipeline.value_and_grad` and a `chunked` GPT-2 under
    `rules("tensor", stage="stage")`.

    Args:
        config: the model's sizes and dropout rates.
        stage_axis: the axis of the stages.
        axis: the tensor axis inside each stage.
        comms: as in `gpt2.loss`.
        attend: likewise.
        remat: likewise.
        unroll: likewise.
    """

    options = {"comms": comms, "attend": attend, "remat": remat, "unroll": unroll}
    return decoder_parts.stages(forward.PARTS, config, stage_axis, axis, **options)


def stored(placement: Placement) -> dict[str, Callable[..., Any]]:
    """How a state of this pipeline goes into a checkpoint that any layout can read, and back:
    arguments for `Checkpoints`.

    Wherever the state holds a `chunked` model's blocks (the parameters, the optimizer's moments),
    they are stored as [L, ...]. `placement` is the schedule's `placed`.
    """
    return pipeline.stored(lambda model: model.blocks, placement)
