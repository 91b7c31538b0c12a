"""Counts the work of a pipeline's jobs (forward F, input's cotangent I, weights' gradients W) and
of the pipeline's head: the floating-point operations of the matmuls in their traces.

Legend: F a chunk's forward pass, I the cotangent of its input, W the gradients of its weights. A
stage has one or more chunks; each chunk is a group of the model's layers.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jax.extend.core import Jaxpr
from jax.sharding import Mesh

from parallax import arithmetic, trees
from parallax import mesh as meshes
from parallax._typing import PyTree
from parallax.collectives import Axis, AxisLike
from parallax.jaxprs import inner, opened
from parallax.pipeline.exchange import whole
from parallax.pipeline.jobs import Jobs
from parallax.pipeline.programs import Functions
from parallax.pipeline.save import Save, residuals
from parallax.schedule import Schedule


class StageWork(NamedTuple):
    """Operations in matmuls, for one microbatch on one device. Each multiplication in a matmul,
    with its addition, counts as 2 operations.

    Attributes:
        forward: operations of the forward pass of one chunk.
        backward: operations for the cotangent of one chunk's input; with `save=inputs` they include
            the operations of the forward pass, which then runs again.
        weight: operations for the gradients of one chunk's weights.
        head: operations of the head and its gradient.
    """

    forward: int
    backward: int
    weight: int
    head: int

    def costs(self, chunks: int = 1) -> tuple[int, int, int]:
        """Returns the numbers of operations of the forward pass (F), of the input's cotangent (I)
        and of the weights' gradients (W) in a stage of `chunks` chunks. `Schedule.makespan` takes
        these numbers as the times of the jobs."""
        return self.forward * chunks, self.backward * chunks, self.weight * chunks


def stage_work(
    embed: Callable[..., Any],
    stage: Callable[..., Any],
    head: Callable[..., Any],
    schedule: Schedule,
    axis: AxisLike,
    *,
    blocks: Callable[[PyTree], PyTree] = lambda params: params.blocks,
    trainable: PyTree = trees.is_inexact,
    save: Save = residuals,
) -> Callable[..., StageWork]:
    """Returns a function `(params, batch, *, mesh, in_specs) -> StageWork` for a pipeline.

    The function only traces the pipeline's parts, so arrays may be `jax.ShapeDtypeStruct`s. Give it
    the same `in_specs` as the `mesh.spmd` around the pipeline. The two halves of the backward pass,
    I (the input's cotangent) and W (the weights' gradients), together have the operations of the
    whole backward pass: no matmul is counted twice.

    `pipeline.value_and_grad` takes the following arguments too.

    Args:
        embed: `(params, microbatch) -> x`, the input of the first stage.
        stage: `(params, x, microbatch, position) -> x`, one chunk of layers; `position` is the
            index of the chunk among all chunks of the model.
        head: `(params, x, microbatch) -> loss`.
        schedule: the table of the pipeline's jobs.
        axis: the axis of the stages.
        blocks: picks from `params` the layers that are split over the stages.
        trainable: the leaves of `params` that have a gradient.
        save: which arrays wait for the backward pass: `residuals`, or `inputs`, which saves only a
            stage's input.
    """
    functions = Functions(embed, stage, head, blocks, trainable)

    def work_of(params: PyTree, batch: PyTree, *, mesh: Mesh, in_specs: Any) -> StageWork:
        """Traces the jobs of one stage under `mesh.spmd`, and counts their operations."""
        counts: list[int] = []
        arrays, static = eqx.partition(params, trees.is_array)

        def traced(arrays, batch):
            """Adds the operations of the forward pass, of both halves of the backward pass and of
            the head to `counts`. Returns `()`, since only the counts matter.

            `in_halves` splits the backward pass into its two halves, even if the schedule does not.
            `send` says how stages send activations, which does not change the matmuls.
            """
            params = eqx.combine(arrays, static)
            jobs = Jobs(
                *(functions, schedule, Axis.of(axis), params, batch),
                save=save,
                send=whole,
                in_halves=True,
            )
            for name in ("forward", "backward", "weight", "head"):
                # `programs[name].program` is the jaxpr of the job.
                counts.append(_products(opened(jobs.programs[name].program)))
            return ()

        mapped = meshes.spmd(traced, mesh=mesh, in_specs=in_specs, out_specs=())
        jax.eval_shape(mapped, arrays, batch)
        return StageWork(*counts)

    return work_of


def _products(jaxpr: Jaxpr) -> int:
    """Returns the number of floating-point operations of a program's matmuls, in all trips of its
    loops. A loop of unknown length counts as one trip. For a conditional, the operations of all
    branches are added up. For a Pallas kernel, the operations of its cost estimate are counted. If
    it has no estimate, the matmuls of its body are counted once for each point of its grid."""
    total = 0
    for eqn in jaxpr.eqns:
        kernel = eqn.primitive.name == "pallas_call"
        if eqn.primitive.name in arithmetic.PRODUCTS or (kernel and arithmetic.is_product(eqn)):
            total += arithmetic.operations(eqn)
            continue
        trips = 1
        if kernel:
            # A dim of the grid whose size is known only at run time counts once.
            grid = eqn.params["grid_mapping"].grid
            trips = math.prod(size for size in grid if isinstance(size, int))
        elif eqn.primitive.name == "scan":
            trips = eqn.params["length"]
        total += trips * sum(map(_products, inner(eqn)))
    return total
