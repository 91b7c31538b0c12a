"""GPT-2 as the three functions of a pipeline, its vocabulary shared out over stages and tensor devices.

Each stage holds 1/P of the rows of the embedding, so each does 1/P of the head on what the last stage hands out, and none is
slower than the others.

Source: Yeung et al., Balancing pipeline parallelism with vocabulary parallelism (arXiv 2411.05288).
"""

import functools
from collections.abc import Callable

import jax
from jax import lax

from parallax import pipeline, remat, tensor
from parallax.collectives.replicated import AxisName, axes
from parallax.models.gpt2 import model as gpt2


def stages(
    config: gpt2.Config,
    *,
    stage_axis: str = "stage",
    axis_name: AxisName = "tensor",
    all_reduce: Callable = lax.psum,
    joins: Callable = tensor.joins,
    attend: Callable = gpt2.attention,
    checkpoint: Callable = remat.none,
    unroll: int = 1,
) -> tuple[Callable, Callable, Callable]:
    """`(enter, stage, head)` for `pipeline.value_and_grad` and a `chunked` GPT-2 under `rules(axis_name, stage=stage_axis)`.

    Args:
        config: the model's sizes and dropout rates.
        stage_axis: the axis of the stages.
        axis_name: the tensor axis inside each stage.
        all_reduce: joins the shards, over the tensor axis and over both.
        joins: as in `gpt2.loss`.
        attend: likewise.
        checkpoint: likewise.
        unroll: likewise.
    """
    both = (stage_axis, *axes(axis_name))
    inside = functools.partial(joins, axis_name, all_reduce=all_reduce)
    everywhere = functools.partial(joins, axis_name, shared=stage_axis, all_reduce=all_reduce)

    def enter(model, part):
        windows, keys = part
        across = functools.partial(tensor.enter, axis_name=stage_axis, all_reduce=all_reduce)
        return gpt2.embed(model, windows[:, :-1], keys, axis_name=both, joins=everywhere(), across=across)

    def stage(blocks, x, part, position):
        layers = blocks.mlp.up.bias.shape[0]
        return gpt2.run_blocks(
            blocks,
            x,
            part[1],
            config,
            first_layer=position * layers,
            axis_name=axis_name,
            joins=inside(),
            attend=attend,
            checkpoint=checkpoint,
            unroll=unroll,
        )

    def head(model, x, part):
        across = functools.partial(pipeline.from_last, axis_name=stage_axis, all_reduce=all_reduce)
        targets = part[0][:, 1:]
        return gpt2.head(model, x, targets, axis_name=both, joins=everywhere(), all_reduce=all_reduce, across=across)

    return enter, stage, head


def stored(chunks: int) -> dict[str, Callable]:
    """How a state of this pipeline goes into a checkpoint that any layout can read, and back: arguments for `Checkpoints`.

    Wherever the state holds a `chunked` model (the parameters, the optimizer's moments), its blocks are stored as [L, ...].
    """
    is_model = lambda x: isinstance(x, gpt2.GPT2)
    over = lambda f: lambda state: jax.tree.map(lambda x: f(x) if is_model(x) else x, state, is_leaf=is_model)
    return {"to_disk": over(gpt2.unchunked), "from_disk": over(functools.partial(gpt2.chunked, chunks=chunks))}
