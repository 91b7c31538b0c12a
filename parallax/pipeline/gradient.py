"""Computes the loss and the gradients of a pipeline: one program on all devices runs a schedule,
which is a checked table of jobs.

Legend: P stages, M microbatches, v chunks per stage, F forward, B backward. A collective would hang
inside a conditional whose condition differs between devices, so the program has no conditionals. A
slot holds the arrays that the backward job of a chunk needs from the forward job, for one
microbatch. The number of slots is the largest number of forward jobs of a stage that wait for their
backward jobs at the same time. In 1F1B this number does not grow with M.

Each kind of job is a method of the class `Jobs` (in jobs.py), and calls the user's functions.
`lockstep` and `per_stage` are two ways to run the jobs of a schedule, tick by tick. Both return a
`Sums` over all microbatches. Its `loss` is the head's loss. Its `terms` are the stages' own terms
of the loss, or None. Its `blocks` are the gradients of the blocks, the layers that are split over
the stages. Its `ends` are the gradients of all other parameters. Its `of_head` and `of_stages` are
the auxiliary values to log. An array varies along an axis if its type says that the array may
differ between the devices. `sequence_after(x, y)` returns `x`; on a CPU, code that uses the result
waits until `y` is computed.

Source: Narayanan et al., Efficient large-scale language model training on GPU clusters (arXiv
2104.04473), section 2.2, for 1F1B and its interleaved form; Yeung et al., Balancing pipeline
parallelism with vocabulary parallelism (arXiv 2411.05288), for the shared vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from parallax import trees
from parallax._typing import PyTree
from parallax.collectives import Axis, AxisLike
from parallax.collectives.cpu import sequence_after
from parallax.grads import Grad, mean_over_microbatches
from parallax.grads.axes import axes_of, replicated_axes, varies_along
from parallax.grads.devices import summed_over
from parallax.grads.results import matching_parameters
from parallax.pipeline import checks, lockstep, per_stage
from parallax.pipeline.buffers import masked
from parallax.pipeline.exchange import Exchange, whole
from parallax.pipeline.jobs import Jobs, Sums
from parallax.pipeline.one_device import Aux, with_aux
from parallax.pipeline.programs import Functions
from parallax.pipeline.save import Save, residuals
from parallax.schedule import Schedule


def value_and_grad(  # noqa: PLR0913
    embed: Callable[..., Any],
    stage: Callable[..., Any],
    head: Callable[..., Any],
    schedule: Schedule,
    axis: AxisLike,
    *,
    blocks: Callable[[PyTree], PyTree] = checks.blocks_of,
    trainable: PyTree = trees.is_inexact,
    save: Save = residuals,
    send: Exchange = whole,
    scatter: Callable[[PyTree], PyTree] = lambda gradients: gradients,
    aux: Callable[[Any], Any] = mean_over_microbatches,
) -> Grad:
    """Returns a function that computes the loss `head(stage(... stage(embed(batch))))` and its
    gradients, and runs the stages as `schedule` says. Call it inside `mesh.spmd`.

    On one device, `jax.value_and_grad` of the mean of this loss over M equal microbatches gives the
    same results. The first dim of every leaf of the batch runs over the sequences, and is cut into
    M parts in order. Gradients are summed, and returned, in float32 or wider. The gradients of
    parameters that are the same on all stages are all-reduced over the stages once, at the end.

    `params`, the first argument of `embed`, `stage` and `head`, is the tree of this device's
    parameters. In `stage`, the tree has only one chunk of the blocks, without the dim of chunks. If
    several functions read a parameter, its gradient is the sum over all these functions.

    Each tick sends one activation to the next stage and one cotangent to the stage before, by one
    `ppermute` per array. `schedule.makespan()` returns the total time of the ticks. A device
    has `schedule.slot_count` slots; each slot holds the arrays that `save` saves of one chunk for
    one microbatch.

    Args:
        embed: `(params, microbatch) -> x`: the input of the first stage, a tree of arrays. Arrays
            of floating-point numbers have a cotangent; other arrays, such as masks, have none.
            `embed` runs on all stages in each forward tick, and only the first stage's result is
            used. The stages may share the work, with collectives over `axis` inside `embed`.
        stage: `(params, x, microbatch, position) -> x`: one chunk of layers. `position` is the
            chunk's place in the model, 0 to v * P - 1 for v chunks on each of P stages. `stage`
            returns a tree like `x`, or an `Output` that also has a term of the loss or auxiliary
            values. `stage` has no collective over `axis`. The exception is a schedule that runs in
            lockstep: there, `stage` may gather parameters that are not trained.
        head: `(params, x, microbatch) -> loss`, or `(loss, aux)`: a microbatch's mean loss. `head`
            runs on all stages, in each tick in which the output of the last layer for a microbatch
            is ready. If the loss is typed as varying over `axis`, the last stage's loss is used.
            Otherwise all stages must have computed the loss together, in a head that begins with
            `from_last`.
        schedule: the table; its number of stages is the size of `axis`.
        axis: the axis of the stages, or several axes as one. Its algorithm, `Axis.algorithm`,
            all-reduces the gradients of parameters that are the same on all stages.
        blocks: picks from `params` the blocks that are split over the stages, by default
            `params.blocks`. For L layers and v chunks per stage, each array of the blocks has the
            global shape [v, L / v, ...], whose dim 1 is split over the P stages. An array of global
            shape [v P, L / (v P), ...] whose dim 0 is split gives the devices shards of the same
            shape, so no error is raised. But if v > 1, its layers run in another order.
        trainable: chooses the leaves that have a gradient, as in `step.init`: it is a function of a
            leaf, or a tree of booleans that is a prefix of the parameters. Other leaves have the
            gradient None, which takes no memory.
        save: which arrays wait for the backward tick: `residuals`, or `inputs`, which saves only
            the stage's input and computes the rest again.
        send: how the stages' messages are sent: `whole`, or `split_over` an axis whose devices all
            have the same messages.
        scatter: a function that is applied to each microbatch's gradients before they are added up.
            With `zero.reduce_scatter`, each replica keeps only the sums of its shard (ZeRO-2). It
            runs after each job that computes gradients. It takes a tree like the parameters, with
            blocks of one chunk, of shape [1, ...], and None for leaves of which this job computes
            no gradient. It returns a tree of the same structure, whose arrays may be smaller; the
            final gradients then have these smaller shapes.
        aux: a function that is applied to the stacked auxiliary values. An array of the head is
            stacked as [microbatches, ...]. An array of the stages is stacked as [microbatches,
            chunks of all stages, ...]. If stages have auxiliary values, the result is `((loss,
            Aux(head, stages)), gradients)`. If only the head has some, the result is `((loss,
            aux), gradients)`.

    Raises:
        ValueError: the schedule's number of stages is not the size of the axis. The number of
            sequences is 0, or is not a multiple of the number of microbatches. `params` has no
            `blocks`, and no `blocks` is given. An array of `blocks(params)` is not split over
            `axis`, or its first dim is not the number of chunks per stage. `stage` returns a tree
            of another structure, shape or dtype than its input, or has a collective over `axis`
            that is not allowed (see `stage` above). A function reads a trained parameter by
            closure: the parameter's gradient would miss this use. `embed` or `head` reads blocks:
            both run on all stages, and the stages have different blocks.
    """
    axis = Axis.of(axis)
    functions = Functions(embed, stage, head, blocks, trainable)
    # If the schedule has W jobs, a backward pass runs in two halves: I computes the cotangent of x,
    # and W, often in a later tick, the gradients of the weights.
    in_halves = schedule.weight is not None

    def grad(params, batch):
        """Returns `(value, gradients)`, as `jax.value_and_grad` does; the value is the loss, or
        `(loss, aux)`."""
        jobs = Jobs(
            functions,
            schedule,
            axis,
            params,
            batch,
            save=save,
            send=send,
            scatter=scatter,
            in_halves=in_halves,
        )
        return _run(jobs, params, aux)

    return grad


def value(
    embed: Callable[..., Any],
    stage: Callable[..., Any],
    head: Callable[..., Any],
    schedule: Schedule,
    axis: AxisLike,
    *,
    blocks: Callable[[PyTree], PyTree] = checks.blocks_of,
    send: Exchange = whole,
    aux: Callable[[Any], Any] = mean_over_microbatches,
) -> Callable[[PyTree, PyTree], Float[Array, ""] | tuple[Float[Array, ""], Any]]:
    """Returns the loss function that `value_and_grad` differentiates, for evaluation: it runs only
    the schedule's forward jobs, and saves nothing.

    The returned function takes `(params, batch)`, and returns the mean loss over the microbatches,
    or `(loss, aux)` if there are auxiliary values. Call it inside `mesh.spmd`. The user's functions
    may read parameters by closure, since no gradient is taken.

    Args:
        embed: `(params, microbatch) -> x`: the input of the first stage.
        stage: `(params, x, microbatch, position) -> x`: one chunk of layers.
        head: `(params, x, microbatch) -> loss`, or `(loss, aux)`.
        schedule: the table; its number of stages is the size of `axis`.
        axis: the axis of the stages, or several axes as one.
        blocks: picks from `params` the blocks that are split over the stages.
        send: how the stages' messages are sent: `whole`, or `split_over` an axis.
        aux: applied to the auxiliary values, stacked over microbatches.

    Raises:
        ValueError: as for `value_and_grad`, except that functions may read parameters by closure.
    """
    axis = Axis.of(axis)
    # `trainable=False`: no leaf is differentiated.
    functions = Functions(embed, stage, head, blocks, trainable=False)

    def loss(params, batch):
        # `save=None`: only the forward jobs run, so there are no gradients to return.
        jobs = Jobs(functions, schedule, axis, params, batch, save=None, send=send)
        loss_and_aux, _ = _run(jobs, params, aux)
        return loss_and_aux

    return loss


def from_last(x: PyTree, axis: AxisLike) -> PyTree:
    """Returns the last stage's `x` on all stages, for a head that the stages compute together.

    This is one all-reduce. The transpose of this function sends nothing: the cotangent of `x` is
    the result's cotangent on the last stage, and 0 on the other stages.
    """
    axis = Axis.of(axis)
    # A sum in which all other stages add 0.
    of_last = axis.all_reduce(masked(axis.index() == axis.size() - 1, x))
    # The sum of booleans is a count.
    return jax.tree.map(lambda summed, x: summed.astype(x.dtype), of_last, x)


def _run(jobs: Jobs, params: PyTree, aux: Callable[[Any], Any]) -> tuple[Any, PyTree]:
    """Runs the schedule of `jobs`. Returns (value, gradients): the value is the loss, or
    `(loss, aux)`. Loss and gradients are means over the microbatches; the function `aux` is applied
    to the stacked auxiliary values.
    """
    schedule, axis = jobs.schedule, jobs.axis
    # Each schedule can run in only one of the two ways, and says in which.
    sums = (per_stage if schedule.per_stage else lockstep).run(jobs)
    # The head's loss, and the stages' own terms of it if they have some.
    losses = (sums.loss,) if sums.terms is None else (sums.loss, sums.terms)
    # One tree like the parameters: each of these two has None where the other has arrays.
    gradients = eqx.combine(sums.ends, sums.blocks)
    # The axes over which each loss and each gradient is still to be summed; `()` for none. If all
    # stages have a parameter, each has a part of its gradient, and the parts are summed over the
    # stages. The gradients of the blocks are complete: each block is on one stage. A varying loss
    # is summed over the stages: the head's is 0 on all stages but the last, and each stage has its
    # own terms. The axes are read from the parameters, since the types of all gradients vary.
    loss_axes = tuple(axes_of(axis) if varies_along(loss, axis) else () for loss in losses)
    gradient_axes = jax.tree.map(
        lambda w: replicated_axes(w, axis), matching_parameters(gradients, params)
    )
    means = jax.tree.map(lambda total: total / schedule.microbatches, (losses, gradients))
    losses, gradients = summed_over(means, (loss_axes, gradient_axes), axis)
    # The auxiliary values wait for the gradients: on a CPU all devices must run their all-reduces
    # in one order.
    aux_values = _stacked_aux(jobs, sums, (losses, gradients))
    return with_aux(functools.reduce(jnp.add, losses), aux_values, aux), gradients


def _stacked_aux(jobs: Jobs, sums: Sums, after: PyTree) -> Aux:
    """Returns the auxiliary values, the same on every stage: those of the head, [M, ...] each, and
    those of all v * P chunks, [M, vP, ...] each, in the order of the chunks in the model.

    `sums` has the values that this stage computed: those of the head in `sums.of_head`, [M, ...]
    each, and those of its own chunks in `sums.of_stages`, [M, v, ...] each. Every stage runs the
    head. Unless the stages compute the head together, only the last stage's values of the head are
    used. On a CPU, the all-reduces of this function wait until the arrays of `after` are computed.
    """
    axis, schedule = jobs.axis, jobs.schedule

    def of_head(values):
        """Returns on all stages the last stage's `values`, an array of the head's auxiliary values,
        [M, ...]."""
        # If the stages computed the head together (`shared_out`), all of them have its value.
        if jobs.shared_out(values):
            return values
        return axis.all_reduce(masked(jobs.last, sequence_after(values, after)))

    def of_stages(values):
        """Returns on all stages the auxiliary values of all chunks, [M, vP, ...]; dim 1 is in the
        order of the model. `values`, [M, v, ...], has the values of this stage's chunks."""
        # Each stage writes its values into its own column of [M, v, P, ...] zeros, so that the sum
        # over the stages stacks the values.
        M, v, *shape = values.shape
        by_stage = jnp.zeros((M, v, schedule.stages, *shape), values.dtype)
        by_stage = lax.dynamic_update_index_in_dim(
            by_stage, sequence_after(values, after), jobs.index, 2
        )
        by_chunk = axis.all_reduce(by_stage).reshape(M, v * schedule.stages, *shape)
        # From the order (chunk, stage) to the order of the model: `placed` has the place of each
        # chunk, and `argsort` gives the chunk of each place.
        return by_chunk[:, np.argsort(schedule.placed, axis=None)]

    return Aux(jax.tree.map(of_head, sums.of_head), jax.tree.map(of_stages, sums.of_stages))
