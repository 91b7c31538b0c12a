"""GPT-2 as the three functions of a pipeline, its vocabulary shared out over stages and tensor devices.

Each stage holds 1/P of the rows of the embedding, so each does 1/P of the head on what the last stage hands out, and none is
slower than the others.

Source: Yeung et al., Balancing pipeline parallelism with vocabulary parallelism (arXiv 2411.05288).
"""

import functools
from collections.abc import Callable
from typing import Any

from parallax import pipeline, tensor
from parallax.collectives import AxisLike
from parallax.models.gpt2 import forward
from parallax.models.gpt2.model import Config, attention
from parallax.remat import none


def stages(
    config: Config,
    stage_axis: AxisLike = "stage",
    axis: AxisLike = "tensor",
    *,
    joins: Callable[..., Any] = tensor.joins,
    attend: Callable[..., Any] = attention,
    remat: Callable[..., Any] = none,
    unroll: int = 1,
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """`(enter, stage, head)` for `pipeline.value_and_grad` and a `chunked` GPT-2 under `rules("tensor", stage="stage")`.

    Args:
        config: the model's sizes and dropout rates.
        stage_axis: the axis of the stages.
        axis: the tensor axis inside each stage.
        joins: as in `gpt2.loss`.
        attend: likewise.
        remat: likewise.
        unroll: likewise.
    """

    def enter(model, part):
        windows, keys, weights = forward.Batch(*part)
        across = functools.partial(tensor.enter, axis=stage_axis)
        made = joins(axis, shared=stage_axis)
        return forward.embed(model, windows[:, :-1], keys, weights=weights, joins=made, across=across)

    def stage(model, x, part, position):
        layers = model.blocks.mlp.up.bias.shape[0]
        apply = functools.partial(forward.block, config=config, joins=joins(axis), attend=attend)
        first = position * layers
        return forward.run_blocks(model.blocks, x, part[1], apply, first_layer=first, remat=remat, unroll=unroll)

    def head(model, x, part):
        across = functools.partial(pipeline.from_last, axis=stage_axis)
        windows, _, weights = forward.Batch(*part)
        return forward.head(model, x, windows[:, 1:], weights=weights, joins=joins(axis, shared=stage_axis), across=across)

    return enter, stage, head


def stored(chunks: int) -> dict[str, Callable[..., Any]]:
    """How a state of this pipeline goes into a checkpoint that any layout can read, and back: arguments for `Checkpoints`.

    Wherever the state holds a `chunked` model's blocks (the parameters, the optimizer's moments), they are stored as [L, ...].
    """
    return pipeline.stored(lambda model: model.blocks, chunks)
