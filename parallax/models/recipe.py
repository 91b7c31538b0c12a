"""The recipe: a decoder's loss and gradients over data x stage x context x tensor, read from a
layout in a straight line.

`functions_of` makes the model's three functions, `grad_of` composes them to one gradient function.
To change a line, copy `grad_of`, and give the copy to `Compute(grad_of=...)`. `models.decoder`
makes the state and compiles the step.

Sources: Rajbhandari et al. (arXiv 1910.02054) for ZeRO; Korthikanti et al. (arXiv 2205.05198) for
sequence parallelism and attention computed again; Narayanan et al. (arXiv 2104.04473) for
pipelines.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from parallax import (
    cross_entropy,
    grads,
    pipeline,
    precision,
    remat,
    rules,
    schedule,
    tensor,
    zero,
)
from parallax._typing import PyTree, Rule, Specs
from parallax.collectives import Axis, AxisLike, combined_axis
from parallax.collectives.types import accumulation_dtype, varying
from parallax.grads import Grad, map_loss_and_aux
from parallax.layout import Layout
from parallax.models import decoder_taps
from parallax.models.family import Batch, Configuration, Family
from parallax.pipeline import Aux, Output
from parallax.pipeline.checks import output
from parallax.schedule import Schedule

SHARDED_OVER = ("data", "context")  # ZeRO splits over these axes
REDUCED_OVER = (
    "data",
    "expert",
    "context",
)  # a gradient is summed over those along which its parameter is the same
MEAN_OVER = (
    "replica",
    "data",
    "expert",
    "context",
)  # the loss is a mean over the devices of these axes
SPLIT_BY_SEQUENCES = ("replica", "data", "expert")
DTYPES = {"full": None, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
SCHEDULES: dict[str, Callable[[Layout], Schedule]] = {
    "one_f_one_b_lockstep": lambda layout: schedule.one_f_one_b_lockstep(
        layout.stage, layout.microbatches, layout.chunks
    ),
    "gpipe": lambda layout: schedule.gpipe(layout.stage, layout.microbatches),
    "zero_bubble_lockstep": lambda layout: schedule.zero_bubble_lockstep(
        layout.stage, layout.microbatches, layout.chunks
    ),
    "one_f_one_b": lambda layout: schedule.one_f_one_b(layout.stage, layout.microbatches),
    "zero_bubble": lambda layout: schedule.zero_bubble(
        layout.stage, layout.microbatches, layout.chunks
    ),
}


@dataclass(frozen=True)
class Compute:
    """How a step computes, beside what its layout says.

    Args:
        axes: the algorithm along each axis, such as `{"data": bucketed(ring("data")), "tensor":
            ring("tensor")}`; along the others `jax.lax` moves the data.
        attention: the attention function, instead of the family's, which on a mesh of TPUs is a
            kernel (`models.flash`).
        context_attention: where a context axis splits the tokens, `(attend, axis)` to the function
            that attends over it, such as `context.ulysses`, instead of the family's.
        documents: from windows to the number of each token's document, such as
            `documents.ends_with(token)`: tokens see those of their own, and the loss leaves out a
            target that follows a cut. By default a window is one document.
        expert_dispatch: how tokens come to the experts that a layout splits, such as
            `experts.exchanged(1.25)`. None: `experts.gathered`.
        remat: wraps each block, instead of the layout's `remat`; one of `parallax.remat`, or a
            policy of your own.
        dtype: of the weights.
        schedule: the pipeline's, where it is another than the layout's.
        max_norm: clip the gradients to this global norm.
        trainable: the leaves that are trained, as `step.init` takes it.
        reduce_in_backward: sum the gradients of each block over the replicas where they are made,
            while the backward pass runs: `grads.reduced_in_backward`. False: they are summed at the
            end of the step.
        comms: how blocks communicate whose tokens are split over the tensor axis:
            `sequence.overlapping` multiplies while they travel. None: `sequence.comms`, which
            gathers them first.
        grad_of: composes the gradient function; None: `recipe.grad_of`.
    """

    axes: Mapping[str, AxisLike] = field(default_factory=dict)
    attention: Callable[..., Any] | None = None
    remat: Callable[..., Any] | None = None
    dtype: DTypeLike = jnp.float32
    schedule: Schedule | None = None
    max_norm: float | None = None
    trainable: PyTree = rules.is_inexact
    context_attention: Callable[..., Any] | None = None
    documents: Callable[..., Any] | None = None
    expert_dispatch: Callable[..., Any] | None = None
    reduce_in_backward: bool = False
    comms: Callable[..., tensor.Comms] | None = None
    grad_of: Callable[..., Grad] | None = None


class Functions(NamedTuple):
    """The model's three functions, as `pipeline.value_and_grad` takes them.

    Attributes:
        embed: `(model, part) -> x`.
        stage: `(model, x, part, position) -> x`, or to a `pipeline.Output`.
        head: `(model, x, part) -> loss`.
    """

    embed: Callable[..., Any]
    stage: Callable[..., Any]
    head: Callable[..., Any]


def grad_of(
    functions: Functions,
    layout: Layout,
    family: Family,
    specs: Specs,
    axes: Mapping[str, Axis],
    compute: Compute,
    scale: Float[Array, ""] | None = None,
) -> Grad:
    """The gradient function `(model, batch) -> (loss, gradients)` on local blocks: the whole
    composition.

    Args:
        functions: the model's, as `functions_of` makes them.
        layout: says what is split, and how.
        family: the kind of model.
        specs: of the model's arrays.
        axes: each axis of the layout with its algorithm.
        compute: how the model computes, beside what the layout says.
        scale: of the loss; None: it is not scaled.
    """
    shards = along(axes, SHARDED_OVER)
    scatter = functools.partial(zero.reduce_scatter, axis=shards, specs=specs)
    embed, stage, head = functions
    if scale is not None:
        stage, head = _scaled(stage, scale), precision.scaled(head, scale)

    if layout.pipelined:
        grad = pipeline.value_and_grad(
            *(embed, stage, head),
            schedule_of(layout, compute),
            axes["stage"],
            blocks=family.where,
            trainable=compute.trainable,
            save=pipeline.inputs if layout.remat == "stage" else pipeline.residuals,
            send=exchange_of(layout, axes),
            scatter=scatter if layout.zero == 2 else _unchanged,
        )
    else:
        grad = differentiated(pipeline.sequential(embed, stage, head), compute.trainable)
        if layout.zero == 2:
            grad = _with_gradients(grad, scatter)
        grad = grads.accumulated(grad, microbatches=layout.microbatches)

    if layout.sequence:  # each device has the gradients of its own tokens
        grad = grads.summed(grad, axes["tensor"])
    if (
        layout.zero == 3
    ):  # the blocks are gathered one by one, by `functions_of`; the rest once a step
        grad = zero.gathered_once(grad, shards, shard_specs(layout, family, specs).ends)
    if layout.precision != "full":
        grad = precision.mixed(grad, DTYPES[layout.precision])
    if layout.zero in (1, 2):
        grad = zero.reduce_scattered(grad, along(axes, REDUCED_OVER), specs)
    else:
        already_summed = family.where if compute.reduce_in_backward else None
        grad = grads.averaged(grad, along(axes, REDUCED_OVER), reduced=already_summed)
    if layout.replica > 1:
        grad = grads.averaged(grad, axes["replica"])
    if scale is not None:
        grad = precision.unscaled(grad, scale)
    return _with_aux_by_layer(grad)


def functions_of(
    family: Family,
    config: Configuration,
    layout: Layout,
    specs: Specs,
    axes: Mapping[str, Axis],
    compute: Compute,
    platform: str,
) -> Functions:
    """The family's three functions under a layout: blocks that gather their weights and are
    computed again, and communicate.
    """
    shards, loops = along(axes, SHARDED_OVER), loops_of(layout)
    layer_specs = shard_specs(layout, family, specs).layer
    keep = remat_of(layout, compute, platform)

    def wrapped(block):
        block = decoder_taps.block(block, specs, family.where, loops)
        if compute.reduce_in_backward:
            block = grads.reduced_in_backward(block, along(axes, REDUCED_OVER))
        if layout.zero == 3:
            block = zero.gathered(block, shards, layer_specs)
        return keep(block)

    attend = attention_of(family, compute, platform)
    embed, stage, head = family.stages(
        config,
        axes["stage"] if layout.pipelined else (),
        axes["tensor"],
        comms=joins_of(layout, family, axes, compute),
        attend=jax.checkpoint(attend) if layout.remat == "attention" else attend,
        remat=wrapped,
        # Two layers in a loop's body let the gathers of one overlap the other. The TPU compiler
        # then copies all that is kept.
        unroll=2 if layout.zero == 3 and platform != "tpu" else 1,
    )
    if compute.documents is not None:
        from parallax.models import documents

        stage = documents.requires_segments(stage)
    if layout.context > 1:
        from parallax import context

        stage = context.must_communicate(stage, axes["context"])
    embed = decoder_taps.ends(embed, "embed", specs, family.where)
    head = decoder_taps.ends(head, "head", specs, family.where)
    return Functions(embed, _with_local_loss(stage, along(axes, MEAN_OVER)), head)


def loss_of(
    functions: Functions,
    layout: Layout,
    family: Family,
    specs: Specs,
    axes: Mapping[str, Axis],
    compute: Compute,
) -> Callable[..., Any]:
    """The loss `(model, batch) -> loss` on local blocks, to evaluate with; arguments are those of
    `grad_of`.

    Terms of the loss and auxiliary values of the blocks are left out.
    """

    def stage(*arguments):
        return output(functions.stage(*arguments)).x

    def head(*arguments):
        value = functions.head(*arguments)
        return value[0] if isinstance(value, tuple) else value

    if layout.pipelined:
        table, exchange = schedule_of(layout, compute), exchange_of(layout, axes)
        loss = pipeline.value(
            functions.embed, stage, head, table, axes["stage"], blocks=family.where, send=exchange
        )
    else:
        loss = pipeline.sequential(functions.embed, stage, head)
    if layout.zero == 3:
        loss = zero.gathered(
            loss, along(axes, SHARDED_OVER), shard_specs(layout, family, specs).ends
        )
    return lambda model, batch: along(axes, MEAN_OVER).all_mean(loss(model, batch))


def rules_of(family: Family, layout: Layout) -> tuple[Rule, Rule]:
    """The sharding rule of the parameters, and that of the optimizer's state."""
    expert_axis = {"expert": "expert"} if layout.expert > 1 else {}
    rule = family.rules(
        "tensor", stage="stage" if layout.pipelined else None, size=layout.tensor, **expert_axis
    )
    if layout.zero == 0:
        return rule, rule
    over = SHARDED_OVER if layout.context > 1 else SHARDED_OVER[0]
    keep = {
        f"{family.blocks}.**": tuple(range(loops_of(layout)))
    }  # no device runs only some of the layers
    sharded = rules.fsdp(over, size=layout.optimizer_shards, keep=keep, inside=rule)
    return (sharded if layout.zero == 3 else rule), sharded


def first_scale(layout: Layout) -> precision.Scale | None:
    """The first scale of the loss, which float16 needs."""
    return precision.Scale() if layout.precision == "float16" else None


def axes_with_algorithms(layout: Layout, compute: Compute) -> dict[str, Axis]:
    """Each axis of the layout with its algorithm.

    Raises:
        ValueError: `compute.axes` has an axis that the layout has not, or one that is bound to
            another name.
    """
    axes = {name: Axis.of(name) for name in layout.axes}
    for name, axis in compute.axes.items():
        if name not in axes or Axis.of(axis).names != name:
            raise ValueError(
                f"axes needs algorithms along {', '.join(axes)}, such as "
                f"axes={{'data': ring('data')}}; got {name!r}: {axis!r}."
            )
        axes[name] = Axis.of(axis)
    return axes


def along(axes: Mapping[str, Axis], names: Sequence[str]) -> Axis:
    """Those of these axes that the layout has, as one axis."""
    present = [axes[name] for name in names if name in axes]
    return present[0] if len(present) == 1 else combined_axis(*present)


def schedule_of(layout: Layout, compute: Compute) -> Schedule:
    """The pipeline's schedule."""
    return SCHEDULES[layout.schedule](layout) if compute.schedule is None else compute.schedule


def exchange_of(layout: Layout, axes: Mapping[str, Axis]) -> pipeline.Exchange:
    """How activations and cotangents go from stage to stage."""
    return pipeline.split_over(axes["tensor"]) if layout.split_sends else pipeline.whole


def remat_of(layout: Layout, compute: Compute, platform: str) -> Callable[..., Any]:
    """What wraps a block, so that parts of it are computed again in its backward pass."""
    if compute.remat is not None:
        return compute.remat
    if layout.remat in ("gathers", "products", "block"):
        policy = getattr(remat, layout.remat)
    else:  # a block that gathers its weights would keep all of them
        policy = remat.gathers if layout.zero == 3 else remat.none
    # Behind the barrier of `jax.checkpoint` the TPU compiler copies all that is kept.
    return remat.in_a_loop(policy) if platform == "tpu" else policy


def attention_of(family: Family, compute: Compute, platform: str) -> Callable[..., Any]:
    """The attention function: the one of `compute`, else the family's, on TPUs its kernel."""
    kernel = family.tpu_attention if platform == "tpu" else None
    return compute.attention or kernel or family.attention


def joins_of(
    layout: Layout, family: Family, axes: Mapping[str, Axis], compute: Compute
) -> Callable[..., tensor.Comms]:
    """How the blocks communicate. A layout imports only the modules of its axes."""
    comms = compute.comms or tensor.comms
    if layout.sequence and compute.comms is None:
        from parallax import sequence

        comms = sequence.comms
    if layout.context > 1:
        from parallax import context

        around = compute.context_attention or family.context_attention
        assert around is not None  # `decoder` refuses a context axis without one

        def attend_around(attend):
            return around(attend, axes["context"])

        comms = functools.partial(
            context.comms, context=axes["context"], inner=comms, around=attend_around
        )
    if layout.expert > 1 or compute.expert_dispatch is not None:
        from parallax import experts

        dispatch: Any = compute.expert_dispatch or experts.gathered
        comms = functools.partial(
            experts.comms, experts=axes.get("expert", ()), inner=comms, dispatch=dispatch
        )
    return comms


def loops_of(layout: Layout) -> int:
    """The first dims of the blocks' arrays that are looped over: layers, or chunks and layers."""
    return 2 if layout.pipelined else 1


def shard_specs(layout: Layout, family: Family, specs: Specs) -> zero.PartSpecs:
    """The specs of the ends, of a stage and of one layer."""
    return zero.part_specs(specs, SHARDED_OVER, blocks=family.where, loops=loops_of(layout))


def weighted(batch: Batch, axes: Mapping[str, Axis], compute: Compute) -> Batch:
    """The batch with its documents apart, and with weights whose mean over all devices' tokens is
    1, where it has any.
    """
    if compute.documents is not None:
        from parallax.models import documents

        batch = documents.with_segments(batch, compute.documents(batch.windows))
    if batch.weights is None:
        return batch
    return batch._replace(
        weights=cross_entropy.normalized(batch.weights, along(axes, SPLIT_BY_SEQUENCES))
    )


def differentiated(loss: Callable[..., Any], trainable: PyTree = rules.is_inexact) -> Grad:
    """The gradient function of a loss, to a scalar or to `(scalar, aux)`; a leaf that is not
    trained has a gradient of None.
    """

    def grad(params, batch):
        chosen, frozen = eqx.partition(params, trainable)
        trained, static = eqx.partition(chosen, rules.is_inexact)
        others = eqx.combine(static, frozen)

        def loss_and_aux(trained):
            value = loss(eqx.combine(trained, others), batch)
            return value if isinstance(value, tuple) else (value, None)

        (value, aux), gradients = jax.value_and_grad(loss_and_aux, has_aux=True)(trained)
        return value if aux is None else (value, aux), gradients

    return grad


def _unchanged(gradients: PyTree) -> PyTree:
    return gradients


def _with_gradients(grad: Grad, change: Callable[[PyTree], PyTree]) -> Grad:
    """`grad` with its gradients changed."""

    def wrapped(params, batch):
        value, gradients = grad(params, batch)
        return value, change(gradients)

    return wrapped


def _with_local_loss(stage: Callable[..., Any], axis: Axis) -> Callable[..., Any]:
    """`stage` with its terms of the loss typed as each device's own along `axis`, as the head's
    loss is.

    A term that is the same along the axis, such as a mean over all tokens, would else count as one
    for all devices.
    """

    def wrapped(*arguments):
        result = output(stage(*arguments))
        loss = None if result.loss is None else varying(result.loss, axis.names)
        return Output(result.x, loss, result.aux)

    return wrapped


def _scaled(stage: Callable[..., Any], scale: Float[Array, ""]) -> Callable[..., Any]:
    """`stage` with its terms of the loss times `scale`, as `precision.scaled` makes of the head."""

    def wrapped(*arguments):
        result = output(stage(*arguments))
        if result.loss is None:
            return result
        dtype = accumulation_dtype(result.loss.dtype)
        return Output(result.x, result.loss.astype(dtype) * scale.astype(dtype), result.aux)

    return wrapped


def _with_aux_by_layer(grad: Grad) -> Grad:
    """`grad` with the stages' auxiliary values [chunks, layers of one, ...] as those of all layers
    in order, [L, ...].
    """

    def by_layer(aux):
        if not isinstance(aux, Aux):
            return aux
        return aux._replace(
            stages=jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), aux.stages)
        )

    def wrapped(params, batch):
        value, gradients = grad(params, batch)
        return map_loss_and_aux(value, lambda loss: loss, by_layer), gradients

    return wrapped
