"""GPT-2 as the three functions of a pipeline, its vocabulary shared out over stages and tensor devices.

Each stage holds 1/P of the rows of the embedding, so each does 1/P of the head on what the last stage hands out, and none is
slower than the others.

Source: Yeung et al., Balancing pipeline parallelism with vocabulary parallelism (arXiv 2411.05288).
"""

import functools
from collections.abc import Callable

from jax import lax

from parallax import pipeline, tensor
from parallax.collectives.replicated import AxisName
from parallax.models.gpt2 import model as gpt2


def stages(
    config: gpt2.Config,
    *,
    stage_axis: str = "stage",
    axis_name: AxisName = "tensor",
    all_reduce: Callable = lax.psum,
    attend: Callable = gpt2.attention,
    checkpoint: Callable = lambda block: block,
) -> tuple[Callable, Callable, Callable]:
    """`(enter, stage, head)` for `pipeline.value_and_grad` and a `chunked` GPT-2 under `rules(axis_name, stage=stage_axis)`.

    Args:
        config: the model's sizes and dropout rates.
        stage_axis: the axis of the stages.
        axis_name: the tensor axis inside each stage.
        all_reduce: joins the shards, over the tensor axis and over both.
        attend: the attention function.
        checkpoint: what becomes of each block, such as `jax.checkpoint`.
    """
    everywhere = {"axis_name": (stage_axis, axis_name), "all_reduce": all_reduce}

    def enter(model, part):
        windows, keys = part
        across = lambda x: tensor.enter(x, stage_axis, all_reduce=all_reduce)
        return gpt2.embed(model, windows[:, :-1], keys, across=across, **everywhere)

    def stage(blocks, x, part, position):
        layers = blocks.mlp.up.bias.shape[0]
        run = functools.partial(gpt2.run_blocks, attend=attend, checkpoint=checkpoint)
        keys = part[1]
        return run(blocks, x, keys, config, first_layer=position * layers, axis_name=axis_name, all_reduce=all_reduce)

    def head(model, x, part):
        across = lambda x: pipeline.from_last(x, stage_axis, all_reduce=all_reduce)
        return gpt2.head(model, x, part[0][:, 1:], across=across, **everywhere)

    return enter, stage, head
