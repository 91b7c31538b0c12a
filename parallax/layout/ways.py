"""The functions that the rows of `words` name: each word's work on a block, an arrow or an optimizer, in a line or two.

`does` is the layout's `Functions`, `placed` the model's `Placed`; `enter`, `stage` and `head` are those of
`pipeline.value_and_grad`, here without a pipeline too.
"""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax
from jax.typing import DTypeLike

from parallax import context, grads, mesh, pipeline, precision, rules, schedule, tensor, zero
from parallax.collectives import Axis
from parallax.grads import Grad
from parallax.layout.rows import Ends, Functions, Order, Placed, Replicas
from parallax.schedule import Schedule
from parallax.typed import PyTree

# The blocks on one stage, or on several


def composed(enter: Callable, stage: Callable, head: Callable, does: Functions, placed: Placed) -> Callable[..., Any]:
    """The loss arrow of all blocks in one go."""
    return pipeline.at_once(enter, stage, head)


def one_after_another(
    enter: Callable, stage: Callable, head: Callable, does: Functions, placed: Placed, trainable: PyTree
) -> Grad:
    """The grad arrow of microbatches that each run through all blocks before the next one begins."""
    grad = differentiated(composed(enter, stage, head, does, placed), trainable)
    return grads.accumulated(does.replicas.each(grad, does.parts, placed), microbatches=does.microbatches)


def one_behind_another(
    enter: Callable, stage: Callable, head: Callable, does: Functions, placed: Placed, trainable: PyTree
) -> Grad:
    """The grad arrow of microbatches that follow each other through the stages."""

    scatter = does.replicas.in_stages(does.parts, placed)
    exchange = does.sends.exchange(does.axes["tensor"])
    options = {"trainable": trainable, "keep": does.again.keep, "exchange": exchange, "scatter": scatter}
    return pipeline.value_and_grad(enter, stage, head, does.table(), does.axes["stage"], where=placed.where, **options)


def pipelined(enter: Callable, stage: Callable, head: Callable, does: Functions, placed: Placed) -> Callable[..., Any]:
    """The loss arrow of a pipeline, for evaluation."""
    exchange = does.sends.exchange(does.axes["tensor"])
    return pipeline.value(enter, stage, head, does.table(), does.axes["stage"], where=placed.where, exchange=exchange)


def in_chunks(blocks: PyTree, chunks: int) -> PyTree:
    """Blocks [L, ...] as [v, L / v, ...]."""
    return jax.tree.map(lambda w: w.reshape(chunks, -1, *w.shape[1:]) if mesh.is_array(w) else w, blocks)


def in_layers(blocks: PyTree) -> PyTree:
    """Blocks [v, L / v, ...] as [L, ...]: the inverse of `in_chunks`."""
    return jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]) if mesh.is_array(w) else w, blocks)


def differentiated(loss: Callable[..., Any], trainable: PyTree = rules.is_inexact) -> Grad:
    """The grad arrow of `loss`, an arrow to a scalar or to `(scalar, aux)`; what is not trained has a gradient of None."""

    def grad(params, batch):
        trained, rest = _apart(params, trainable)

        def both(trained):
            value = loss(eqx.combine(trained, rest), batch)
            return value if isinstance(value, tuple) else (value, None)

        (value, aux), gradients = jax.value_and_grad(both, has_aux=True)(trained)
        return value if aux is None else (value, aux), gradients

    return grad


def _apart(params: PyTree, trainable: PyTree) -> tuple[PyTree, PyTree]:
    """What of `params` is trained, and the rest."""
    chosen, frozen = eqx.partition(params, trainable)
    trained, static = eqx.partition(chosen, rules.is_inexact)
    return trained, eqx.combine(static, frozen)


# What the replicas split


def averaged(grad: Grad, data: Axis, placed: Placed) -> Grad:
    """Data parallelism: gradients all-reduced."""
    return grads.averaged(grad, data)


def summed_in_blocks(does: Functions, sums: Callable[..., Any]) -> Replicas:
    """Data parallelism whose blocks sum their gradients by `sums(block, axis)`; those of the rest are all-reduced last."""
    return does.replicas._replace(
        block=lambda block, axis, placed: sums(block, does.reduced),
        outside=lambda grad, axis, placed: grads.averaged(grad, axis, reduced=placed.where),
    )


def scattered(grad: Grad, data: Axis, placed: Placed) -> Grad:
    """ZeRO-1 and 2: gradients reduced, each replica keeps its share."""
    return zero.reduce_scattered(grad, data, placed.specs)


def scattered_each(grad: Grad, data: Axis, placed: Placed) -> Grad:
    """ZeRO-2: each microbatch's gradients are scattered before they are added up."""

    def scattering(params, part):
        value, gradients = grad(params, part)
        return value, zero.reduce_scatter(gradients, data, placed.specs)

    return scattering


def scattered_in_stages(data: Axis, placed: Placed) -> Callable[[PyTree], PyTree]:
    """The same inside a pipeline."""
    return functools.partial(zero.reduce_scatter, axis=data, specs=placed.specs)


def sharded(optimizer: optax.GradientTransformation, data: Axis, placed: Placed) -> optax.GradientTransformation:
    """ZeRO-1 and 2: each replica updates its share."""
    return zero.sharded(optimizer, data, placed.specs)


def gathered(block: Callable[..., Any], data: Axis, placed: Placed) -> Callable[..., Any]:
    """ZeRO-3: a block's weights are gathered before it runs."""
    return zero.gathered(block, data, placed.parts.layer)


def gathered_ends(grad: Grad, data: Axis, placed: Placed) -> Grad:
    """ZeRO-3: what is no block is gathered once a step."""
    return zero.gathered_once(grad, data, placed.parts.ends)


def gathered_value(loss: Callable[..., Any], data: Axis, placed: Placed) -> Callable[..., Any]:
    """The same for evaluation."""
    return zero.gathered(loss, data, placed.parts.ends)


# The tokens of a sequence


def over_context(joins: Callable[..., tensor.Joins], axis: Axis, around: Callable[..., Any]) -> Callable[..., tensor.Joins]:
    """The tokens of each sequence split over the context axis, before they are split over tensor."""
    return functools.partial(context.joins, context=axis, inner=joins, around=lambda attend: around(attend, axis))


# The types of numbers


def mixed(dtype: DTypeLike) -> Callable[[Grad], Grad]:
    """What computes a grad arrow in `dtype`."""
    return functools.partial(precision.mixed, dtype=dtype)


# The order of a pipeline's jobs: P stages, M microbatches, v chunks


def ticks_of_one_f_one_b(P: int, M: int, v: int) -> tuple[int, int, int, int]:
    """The ticks of the lanes; the last ones alike are backward alone."""
    return M * v + P - 1, M * v + P - 1, M, v * P - 1


def slots_of_one_f_one_b(P: int, M: int, v: int) -> int:
    """2P - 1 in one chunk, whatever M is; fewer where there are few microbatches."""
    return min(M * v + 1, v * P + P - 1)


def one_f_one_b_in_turns(P: int, M: int, v: int) -> Schedule:
    """The table; `Layout` refuses chunks."""
    return schedule.one_f_one_b_in_turns(P, M)


def in_turns(make: Callable[[int, int, int], Schedule]) -> Order:
    """The order in which each stage has its own job in a tick: what a device runs, and what its table says of the rest."""
    table = functools.lru_cache(maxsize=64)(make)

    def ends(ticks: tuple[int, int, int, int], P: int, M: int, v: int) -> Ends:
        """Messages go in each tick, a message for each distance."""
        return Ends(table(P, M, v).ticks * len(pipeline.distances(table(P, M, v))), M, M)

    return Order(
        make,
        ticks=lambda P, M, v: (M * v, M * v, M, table(P, M, v).ticks),
        slots=lambda P, M, v: table(P, M, v).slot_count,
        weights=lambda P, M, v: M * v,
        handed=lambda P, M, v: table(P, M, v).handed_count,
        arrivals=lambda P, M, v: table(P, M, v).arrival_count + 1,
        ends=ends,
        waited=lambda P, M, v, costs: table(P, M, v).timed_ticks(*costs),
        together=False,
    )


def gpipe(P: int, M: int, v: int) -> Schedule:
    """The table; `Layout` refuses chunks."""
    return schedule.gpipe(P, M)


def ticks_of_gpipe(P: int, M: int, v: int) -> tuple[int, int, int, int]:
    """The ticks of the lanes; the last ones alike are all the backward ones."""
    return M + P - 1, M + P - 1, M, M + P - 1


def slots_of_gpipe(P: int, M: int, v: int) -> int:
    """All microbatches wait."""
    return M + 1


def ticks_of_zero_bubble(P: int, M: int, v: int) -> tuple[int, int, int, int]:
    """Those of 1F1B; in the last ones alike both gradients run, or, after few microbatches, all gradients of weights."""
    return M * v + P - 1, M * v + P - 1, M, min(M * v, v * P - 1)


def handed_of_zero_bubble(P: int, M: int, v: int) -> int:
    """The last stage's weights lag P - 1 ticks behind; fewer where there are few microbatches."""
    return min(M * v + 1, P)
