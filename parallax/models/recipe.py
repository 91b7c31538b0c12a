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
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
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
from parallax.grads import Grad
from parallax.grads.results import loss_part, map_loss_and_aux
from parallax.layout import Layout
from parallax.models import decoder_taps
from parallax.models.family import Batch, Configuration, Family
from parallax.pipeline import Aux, Output
from parallax.pipeline.checks import output
from parallax.schedule import Schedule
from parallax.trees import AnyMesh

SHARDED_OVER = ("data", "context")  # ZeRO splits over these axes
# A gradient is summed over those of these axes along which its parameter is the same.
REDUCED_OVER = ("data", "expert", "context")
MEAN_OVER = ("replica", *REDUCED_OVER)  # the loss is a mean over the devices of these axes
DTYPES = {"full": None, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "one_f_one_b_lockstep": schedule.one_f_one_b_lockstep,
    "gpipe": schedule.gpipe,
    "zero_bubble_lockstep": schedule.zero_bubble_lockstep,
    "one_f_one_b": schedule.one_f_one_b,
    "zero_bubble": schedule.zero_bubble,
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


PLAIN = Compute()
Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


@dataclass(frozen=True)
class Setup:
    """A decoder, its layout and how it computes: all that the recipe reads.

    Attributes:
        family: the kind of model.
        config: its sizes.
        layout: what is split, and how.
        mesh: the mesh that the step runs on.
        specs: of the model's arrays, as gradients and the optimizer have them.
        compute: how the model computes, beside what the layout says.
    """

    family: Family
    config: Configuration
    layout: Layout
    mesh: AnyMesh
    specs: Specs
    compute: Compute = PLAIN

    @property
    def axes(self) -> dict[str, Axis]:
        """Each axis of the layout with its algorithm."""
        return axes_with_algorithms(self.layout, self.compute)

    def along(self, names: Sequence[str]) -> Axis:
        """Returns the axes among these that the layout has, as one axis."""
        return along(self.axes, names)

    @property
    def platform(self) -> str:
        """The kind of the mesh's devices."""
        return platform_of(self.mesh)

    @property
    def part_specs(self) -> zero.PartSpecs:
        """The specs of the ends, of a stage and of one layer."""
        loops = loops_of(self.layout)
        return zero.part_specs(self.specs, SHARDED_OVER, blocks=self.family.where, loops=loops)


def grad_of(functions: Functions, setup: Setup, scale: Float[Array, ""] | None = None) -> Grad:
    """Returns the gradient function `(model, batch) -> (loss, gradients)` on local blocks: the
    whole composition.

    Args:
        functions: the model's three, as `functions_of` makes them.
        setup: the decoder, its layout and how it computes.
        scale: of the loss; None: it is not scaled.
    """
    embed, stage, head = functions
    layout, axes, family, compute = setup.layout, setup.axes, setup.family, setup.compute
    shards, replicas = setup.along(SHARDED_OVER), setup.along(REDUCED_OVER)
    if scale is not None:
        stage, head = _scaled(stage, scale), precision.scaled(head, scale)
    scatter = _unchanged
    if layout.zero == 2:  # each microbatch's gradients, before they are added up
        scatter = functools.partial(zero.reduce_scatter, axis=shards, specs=setup.specs)

    if layout.pipelined:
        grad = pipeline.value_and_grad(
            *(embed, stage, head),
            schedule_of(layout, compute),
            axes["stage"],
            blocks=family.where,
            trainable=compute.trainable,
            save=pipeline.inputs if layout.remat == "stage" else pipeline.residuals,
            send=exchange_of(layout, axes),
            scatter=scatter,
        )
    else:
        grad = differentiated(pipeline.sequential(embed, stage, head), compute.trainable)
        grad = _with_gradients(grad, scatter)
        grad = grads.accumulated(grad, microbatches=layout.microbatches)

    if layout.sequence:  # each device has the gradients of its own tokens
        grad = grads.summed(grad, axes["tensor"])
    if layout.zero == 3:  # `functions_of` gathers block by block, this the rest once a step
        grad = zero.gathered_once(grad, shards, setup.part_specs.ends)
    # Outside the accumulation, which adds in float32, and inside the averages, which then reduce
    # float32.
    if layout.precision != "full":
        grad = precision.mixed(grad, DTYPES[layout.precision])
    if layout.zero in (1, 2):
        grad = zero.reduce_scattered(grad, replicas, setup.specs)
    else:
        # The blocks' gradients were summed where they were made; to sum them again would count them
        # n times.
        already_summed = family.where if compute.reduce_in_backward else None
        grad = grads.averaged(grad, replicas, reduced=already_summed)
    # Shares are reduced between the groups, 1/n of the bytes.
    if layout.replica > 1:
        grad = grads.averaged(grad, axes["replica"])
    if scale is not None:
        grad = precision.unscaled(grad, scale)
    return _with_aux_by_layer(grad)


def functions_of(setup: Setup) -> Functions:
    """Returns the family's functions `(embed, stage, head)` under a layout: blocks that gather
    their weights and are computed again, and communicate."""
    family, layout, specs, axes = setup.family, setup.layout, setup.specs, setup.axes
    compute, layer_specs, loops = setup.compute, setup.part_specs.layer, loops_of(layout)
    keep = remat_of(layout, compute, setup.platform)

    def wrapped(block):
        # The taps stand innermost, on the weights as the block sees them.
        block = decoder_taps.block(block, specs, family.where, loops)
        if compute.reduce_in_backward:
            block = grads.reduced_in_backward(block, setup.along(REDUCED_OVER))
        if layout.zero == 3:
            block = zero.gathered(block, setup.along(SHARDED_OVER), layer_specs)
        # Outermost, so that what the block gathers can be gathered again in the backward pass.
        return keep(block)

    attend = attention_of(family, compute, setup.platform)
    embed, stage, head = family.stages(
        setup.config,
        axes["stage"] if layout.pipelined else (),
        axes["tensor"],
        comms=comms_of(setup),
        attend=jax.checkpoint(attend) if layout.remat == "attention" else attend,
        remat=wrapped,
        # Two layers in a loop's body let the gathers of one overlap the other. The TPU compiler
        # then copies all that is kept.
        unroll=2 if layout.zero == 3 and setup.platform != "tpu" else 1,
    )
    if compute.documents is not None:
        from parallax.models import documents

        stage = documents.requires_segments(stage)
    if layout.context > 1:
        from parallax import context

        # The one mistake that no type shows: a stage that attends to its own tokens alone.
        stage = context.must_communicate(stage, axes["context"])
    embed = decoder_taps.ends(embed, "embed", specs, family.where)
    head = decoder_taps.ends(head, "head", specs, family.where)
    return embed, _with_local_loss(stage, setup.along(MEAN_OVER)), head


def loss_of(functions: Functions, setup: Setup) -> Callable[..., Any]:
    """Returns the loss `(model, batch) -> loss` on local blocks, to evaluate with.

    Terms of the loss and auxiliary values of the blocks are left out.
    """
    embed, stage_with_terms, head_with_aux = functions
    layout, axes, where = setup.layout, setup.axes, setup.family.where

    def stage(*arguments):
        return output(stage_with_terms(*arguments)).x

    def head(*arguments):
        return loss_part(head_with_aux(*arguments))

    if layout.pipelined:
        table, exchange = schedule_of(layout, setup.compute), exchange_of(layout, axes)
        loss = pipeline.value(embed, stage, head, table, axes["stage"], blocks=where, send=exchange)
    else:
        loss = pipeline.sequential(embed, stage, head)
    if layout.zero == 3:
        loss = zero.gathered(loss, setup.along(SHARDED_OVER), setup.part_specs.ends)

    def mean_loss(model, batch):
        return setup.along(MEAN_OVER).all_mean(loss(model, batch))

    return mean_loss


def rules_of(family: Family, layout: Layout) -> tuple[Rule, Rule]:
    """Returns the sharding rule of the parameters, and that of the optimizer's state."""
    expert_axis = {"expert": "expert"} if layout.expert > 1 else {}
    rule = family.rules(
        "tensor", stage="stage" if layout.pipelined else None, size=layout.tensor, **expert_axis
    )
    if layout.zero == 0:
        return rule, rule
    # A rule names the axes of the mesh, and a mesh without a context axis lacks the second.
    axis_names = SHARDED_OVER if layout.context > 1 else SHARDED_OVER[0]
    # No device runs only some of the layers.
    keep = {f"{family.blocks}.**": tuple(range(loops_of(layout)))}
    sharded = rules.fsdp(axis_names, size=layout.optimizer_shards, keep=keep, inside=rule)
    return (sharded if layout.zero == 3 else rule), sharded


def first_scale(layout: Layout) -> precision.Scale | None:
    """Returns the first scale of the loss, which float16 needs."""
    return precision.Scale() if layout.precision == "float16" else None


def axes_with_algorithms(layout: Layout, compute: Compute) -> dict[str, Axis]:
    """Returns each axis of the layout with its algorithm.

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
    """Returns the axes among these that the layout has, as one axis."""
    present = [axes[name] for name in names if name in axes]
    return present[0] if len(present) == 1 else combined_axis(*present)


def platform_of(mesh: AnyMesh) -> str:
    """Returns the kind of a mesh's devices: "cpu", "gpu" or "tpu". A mesh for tracing alone counts
    as one of CPUs, unless it names its devices (`jax.sharding.AbstractDevice`)."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return mesh.abstract_device.platform if mesh.abstract_device is not None else "cpu"


def schedule_of(layout: Layout, compute: Compute = PLAIN) -> Schedule:
    """Returns the pipeline's schedule."""
    if compute.schedule is not None:
        return compute.schedule
    chunks = (layout.chunks,) if layout.chunks > 1 else ()  # not every schedule has chunks
    return SCHEDULES[layout.schedule](layout.stage, layout.microbatches, *chunks)


def exchange_of(layout: Layout, axes: Mapping[str, Axis]) -> pipeline.Exchange:
    """Returns how activations and cotangents go from stage to stage."""
    return pipeline.split_over(axes["tensor"]) if layout.split_sends else pipeline.whole


def remat_of(layout: Layout, compute: Compute, platform: str) -> Callable[..., Any]:
    """Returns the function that wraps a block, so that parts of it are computed again in its
    backward pass."""
    if compute.remat is not None:
        return compute.remat
    if layout.remat in ("gathers", "products", "block"):
        policy = getattr(remat, layout.remat)
    else:  # a block that gathers its weights would keep all of them
        policy = remat.gathers if layout.zero == 3 else remat.none
    # Behind the barrier of `jax.checkpoint` the TPU compiler copies all that is kept.
    return remat.in_a_loop(policy) if platform == "tpu" else policy


def attention_of(family: Family, compute: Compute, platform: str) -> Callable[..., Any]:
    """Returns the attention function: the one of `compute`, else the family's, on TPUs its
    kernel."""
    kernel = family.tpu_attention if platform == "tpu" else None
    return compute.attention or kernel or family.attention


def comms_of(setup: Setup) -> Callable[..., tensor.Comms]:
    """Returns how the blocks communicate. A layout imports only the modules of its axes."""
    layout, axes, compute = setup.layout, setup.axes, setup.compute
    comms = compute.comms or tensor.comms
    if layout.sequence and compute.comms is None:
        from parallax import sequence

        comms = sequence.comms
    if layout.context > 1:
        from parallax import context

        around = compute.context_attention or setup.family.context_attention
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
    """Returns the first dims of the blocks' arrays that are looped over: layers, or chunks and
    layers."""
    return 2 if layout.pipelined else 1


def weighted(batch: Batch, setup: Setup) -> Batch:
    """Returns the batch with its documents apart, and with weights whose mean over all devices'
    tokens is 1, where it has any."""
    if setup.compute.documents is not None:
        from parallax.models import documents

        batch = documents.with_segments(batch, setup.compute.documents(batch.windows))
    if batch.weights is None:
        return batch
    sequences = setup.along(setup.layout.batch_axes)
    return batch._replace(weights=cross_entropy.normalized(batch.weights, sequences))


def differentiated(loss: Callable[..., Any], trainable: PyTree = rules.is_inexact) -> Grad:
    """Returns the gradient function of a loss, to a scalar or to `(scalar, aux)`; a leaf that is
    not trained has a gradient of None.
    """

    def grad(params, batch):
        # `trainable` may pick leaves that have no derivative, such as whole numbers.
        chosen, frozen = eqx.partition(params, trainable)
        trained, static = eqx.partition(chosen, rules.is_inexact)
        others = eqx.combine(static, frozen)

        def loss_and_aux(trained):
            value = loss(eqx.combine(trained, others), batch)
            return value if isinstance(value, tuple) else (value, None)

        (value, aux), gradients = jax.value_and_grad(loss_and_aux, has_aux=True)(trained)
        # A loss alone comes back alone: wrappers tell the two forms apart by the tuple.
        return value if aux is None else (value, aux), gradients

    return grad


def _unchanged(gradients: PyTree) -> PyTree:
    return gradients


def _with_gradients(grad: Grad, change: Callable[[PyTree], PyTree]) -> Grad:
    """Returns `grad` with its gradients changed."""

    def wrapped(params, batch):
        value, gradients = grad(params, batch)
        return value, change(gradients)

    return wrapped


def _with_local_loss(stage: Callable[..., Any], axis: Axis) -> Callable[..., Any]:
    """Returns `stage` with its terms of the loss typed as each device's own along `axis`, as the
    head's loss is.

    A term that is the same along the axis, such as a mean over all tokens, would else count as one
    for all devices.
    """

    def wrapped(*arguments):
        result = output(stage(*arguments))
        loss = None if result.loss is None else varying(result.loss, axis.names)
        return Output(result.x, loss, result.aux)

    return wrapped


def _scaled(stage: Callable[..., Any], scale: Float[Array, ""]) -> Callable[..., Any]:
    """Returns `stage` with its terms of the loss times `scale`, as `precision.scaled` makes of the
    head."""

    def wrapped(*arguments):
        result = output(stage(*arguments))
        if result.loss is None:
            return result
        dtype = accumulation_dtype(result.loss.dtype)
        return Output(result.x, result.loss.astype(dtype) * scale.astype(dtype), result.aux)

    return wrapped


def _with_aux_by_layer(grad: Grad) -> Grad:
    """Returns `grad` with the stages' auxiliary values [chunks, layers of one, ...] as those of all
    layers in order, [L, ...].
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
