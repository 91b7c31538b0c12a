"""The recipe: a decoder's loss and gradient functions for a layout, over data x stage x context x
tensor.

`functions_of` makes the functions `(embed, stage, head)` of a model, and `grad_of` composes them
into one gradient function. To change the recipe, pass a changed copy of `grad_of` to
`Compute(grad_of=...)`. `models.decoder` makes the state and compiles the step. The *blocks* of a
model are its layers, and its *ends* are the weights outside the blocks. A gradient function takes
`(params, batch)` and returns `(value, gradients)`; the value is the loss, or `(loss, aux)`. A stage
returns its activations x, or an `Output` with three parts: x; the stage's own term of the loss, or
None; and auxiliary values, or None. `family.where(model)` gives the blocks. `axes` maps the name of
each axis to an `Axis`, which is the name with a collective algorithm, and `setup.along(names)`
joins several axes into one. The arrays of the blocks have one leading dim, of layers. In a pipeline
they have two: chunks, and the layers of a chunk. *Loops* run over these leading dims, and `loops`
is the number of these dims.

Sources: Rajbhandari et al. (arXiv 1910.02054) for ZeRO; Korthikanti et al. (arXiv 2205.05198) for
sequence parallelism and for the recomputation of attention; Narayanan et al. (arXiv 2104.04473) for
pipelines.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from parallax.grads import Grad
from parallax.grads.results import loss_part, map_loss_and_aux
from parallax.layout import Layout
from parallax.mesh import platform_of
from parallax.models import decoder_taps
from parallax.models.family import Batch, Configuration, Family, check_weights
from parallax.pipeline import Aux, Output
from parallax.pipeline.checks import output
from parallax.schedule import Schedule
from parallax.trees import AnyMesh

SHARDED_OVER = ("data", "context")  # ZeRO splits over these axes
# A gradient is summed over these axes, except those that split its parameter: "expert" splits the
# experts.
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
    """The choices for a train step that its layout leaves open.

    Args:
        axes: a dict of axes with their collective algorithms, such as `{"data":
            bucketed(ring("data"))}`. Along an axis that is not in the dict, `jax.lax` moves the
            data.
        attention: the attention function; None: the family's attention, which on a mesh of TPUs or
            GPUs is a kernel (`models.flash`).
        context_attention: a function `(attend, axis)` that returns an attention function for tokens
            that are split over `axis`, the context axis. An example is `context.ulysses`. None: the
            family's function.
        documents: a function from windows to the number of each token's document, such as
            `documents.ends_with(token)`. A token then sees only its own document, and the loss
            leaves out each target that is the first token of a document. None: a window is one
            document.
        expert_dispatch: the function that sends tokens to experts on other devices, such as
            `experts.exchanged(1.25)`; None: `experts.gathered`.
        remat: a function that wraps each block, such as one of `parallax.remat`; None: the function
            that the layout's `remat` names.
        unroll: the number of layers in the body of the loop over layers. None: the number is 2 with
            ZeRO-3 on CPUs and GPUs. On GPUs without ZeRO-3 and without a pipeline, a model of at
            most 48 layers has all layers in the body: the step takes longer to compile, and is
            faster. In all other cases the number is 1.
        dtype: the type of the weights.
        schedule: the schedule of the pipeline; None: the schedule that the layout names.
        max_norm: the global norm to which gradients are clipped; None: they are not clipped.
        trainable: the leaves that are trained, as in `step.init`.
        reduce_in_backward: whether each block's gradients are summed over the replicas during the
            backward pass, as soon as they are computed (`grads.reduced_in_backward`). False: they
            are summed at the end of the step.
        comms: how blocks communicate if the tokens are split over the tensor axis. An example is
            `sequence.overlapping`, which computes the matrix product of some tokens while it sends
            others. None: `sequence.comms`, which gathers the tokens first. On a mesh of TPUs
            without a pipeline, None means `sequence.comms` with its argument `on_tpu=True`.
        grad_of: the function that composes the gradient function; None: `recipe.grad_of`.
    """

    axes: Mapping[str, AxisLike] = field(default_factory=dict)
    attention: Callable[..., Any] | None = None
    remat: Callable[..., Any] | None = None
    unroll: int | None = None
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


# Layers that a GPU's program has one after another, without a loop; with more, compiling is slow.
MOST_WITHOUT_LOOP = 48
PLAIN = Compute()
Functions = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]


@dataclass(frozen=True)
class Setup:
    """A decoder, its layout and its `Compute`: all that the functions of this module read.

    Attributes:
        family: the kind of model.
        config: the sizes of the model.
        layout: the sizes of the axes, ZeRO, the precision and rematerialisation.
        mesh: the mesh that the step runs on.
        specs: the specs of the gradients that the optimizer gets.
        compute: the choices that the layout does not make.
    """

    family: Family
    config: Configuration
    layout: Layout
    mesh: AnyMesh
    specs: Specs
    compute: Compute = PLAIN

    @property
    def axes(self) -> dict[str, Axis]:
        """The axes of the layout by name, each with its algorithm."""
        return axes_with_algorithms(self.layout, self.compute)

    def along(self, names: Sequence[str]) -> Axis:
        """Returns one axis that joins the layout's axes among `names`."""
        return along(self.axes, names)

    @property
    def platform(self) -> str:
        """The kind of the mesh's devices: "cpu", "gpu" or "tpu"."""
        return platform_of(self.mesh)

    @property
    def part_specs(self) -> zero.PartSpecs:
        """The parts of `specs` for the weights outside the blocks (`ends`), for a stage's blocks
        (`stage`), and for one layer (`layer`). The specs name all axes that split the weights.
        """
        loops = loops_of(self.layout)  # the leading dims that one layer lacks
        # `zero.part_specs` refuses specs that split one of these leading dims over ZeRO's axes
        # (`SHARDED_OVER`): a device would then have only some of the layers.
        return zero.part_specs(self.specs, SHARDED_OVER, blocks=self.family.where, loops=loops)


def grad_of(functions: Functions, setup: Setup, scale: Float[Array, ""] | None = None) -> Grad:
    """Returns the gradient function `(model, batch) -> (loss, gradients)` on each device's part of
    the model and the batch. The loss and the gradients are those of the global batch; the gradients
    are split as `setup.specs` says.

    Args:
        functions: the functions `(embed, stage, head)` of `functions_of`.
        setup: the decoder, its layout and its `Compute`.
        scale: the scale of the loss, for float16; None: the loss is not scaled.
    """
    embed, stage, head = functions
    layout, axes, family, compute = setup.layout, setup.axes, setup.family, setup.compute
    # ZeRO splits over the axes data and context; gradients are reduced over the experts' axis too.
    sharded_over, reduced_over = setup.along(SHARDED_OVER), setup.along(REDUCED_OVER)
    if scale is not None:
        stage, head = _scaled(stage, scale), precision.scaled(head, scale)
    scatter = _unchanged
    if layout.zero == 2:  # scatters the gradients of each microbatch, before they are added up
        scatter = functools.partial(zero.reduce_scatter, axis=sharded_over, specs=setup.specs)

    if layout.pipelined:
        # `save` says what a stage keeps for its backward pass: its input only, or all residuals.
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

    # With sequence parallelism, weights that all tensor devices have, such as norms, see on each
    # device only its own tokens. `summed` adds these gradients over the devices, and keeps the
    # gradients of split weights.
    if layout.sequence:
        grad = grads.summed(grad, axes["tensor"])
    if layout.zero == 3:  # `functions_of` gathers each block; this gathers the ends once per step
        grad = zero.gathered_once(grad, sharded_over, setup.part_specs.ends)
    # `mixed` casts the weights before all of the above runs: so they are cast once per step, and
    # ZeRO-3 gathers 16 bits. `mixed` returns the gradients in the weights' own type, such as
    # float32, so the averages below get that type. The sums over devices above (ZeRO-2's
    # `scatter`, `summed`, and the transposes of ZeRO-3's gathers) are taken in float32 or wider
    # too, whatever the type of the gradients.
    if layout.precision != "full":
        grad = precision.mixed(grad, DTYPES[layout.precision])
    # Gradients that ZeRO-2 scattered above are not scattered again: here they are only divided, and
    # summed over the experts' axis if the layout has one.
    if layout.zero in (1, 2):
        grad = zero.reduce_scattered(grad, reduced_over, setup.specs)
    else:
        # With `reduce_in_backward`, which `decoder` refuses together with ZeRO, the blocks'
        # gradients are summed already; a second sum would count them n times. Under ZeRO-3 the
        # gradients of shares are summed already over the axes that split the parameters; `averaged`
        # sums them over the other axes only.
        already_summed = family.where if compute.reduce_in_backward else None
        grad = grads.averaged(grad, reduced_over, reduced=already_summed)
    # After the reductions above, so that under ZeRO only a device's share, 1/n of the bytes, goes
    # between the replicas.
    if layout.replica > 1:
        grad = grads.averaged(grad, axes["replica"])
    if scale is not None:
        grad = precision.unscaled(grad, scale)
    return _with_aux_by_layer(grad)


def functions_of(setup: Setup) -> Functions:
    """Returns the functions `(embed, stage, head)` of `setup.family`, a family of models. The
    functions communicate, and recompute in the backward pass, as `setup.layout` says. Under ZeRO-3,
    the stage gathers the weights of its blocks, and `grad_of` gathers the weights outside the
    blocks. `bisect` can record the weights that the three functions use.
    """
    family, layout, specs, axes = setup.family, setup.layout, setup.specs, setup.axes
    compute, layer_specs, loops = setup.compute, setup.part_specs.layer, loops_of(layout)
    rematerialised = remat_of(layout, compute, setup.platform)

    def wrapped(block):
        """Returns a block `(weights, x, layer) -> x` that reduces its gradients, gathers its
        weights and is rematerialised. Each of the three is done only if the layout or `Compute`
        asks for it.
        """
        # The taps, which report weights to `bisect`, are innermost, so they see gathered weights.
        block = decoder_taps.block(block, specs, family.where, loops)
        # At most one of the next two applies: `decoder` refuses `reduce_in_backward` with ZeRO.
        if compute.reduce_in_backward:
            block = grads.reduced_in_backward(block, setup.along(REDUCED_OVER))
        if layout.zero == 3:
            block = zero.gathered(block, setup.along(SHARDED_OVER), layer_specs)
        # Outermost, so that the backward pass can gather the weights again.
        return rematerialised(block)

    attend = attention_of(family, compute, setup.platform)
    embed, stage, head = family.stages(
        setup.config,
        axes["stage"] if layout.pipelined else (),
        axes["tensor"],
        comms=comms_of(setup),
        attend=remat.attention(attend) if layout.remat == "attention" else attend,
        remat=wrapped,
        unroll=unroll_of(setup),
    )
    if compute.documents is not None:
        from parallax.models import documents

        # Refuses a stage that does not read the segments, and a batch that has none.
        stage = documents.requires_segments(stage)
    if layout.context > 1:
        from parallax import context

        # Refuses a stage that attends only to this device's tokens; its types would be right.
        stage = context.must_communicate(stage, axes["context"])
    # Taps of the weights outside the blocks.
    embed = decoder_taps.ends(embed, "embed", specs, family.where)
    head = decoder_taps.ends(head, "head", specs, family.where)
    # The loss is a mean over the devices of `MEAN_OVER`, so the stage's own term of the loss (such
    # as that of a router) gets the type of a value that differs between these devices.
    return embed, _with_local_loss(stage, setup.along(MEAN_OVER)), head


def loss_of(functions: Functions, setup: Setup) -> Callable[..., Any]:
    """Returns the loss for evaluation, a function `(model, batch) -> loss`. Each device calls the
    function with its own parts of the model and the batch, and all devices get the mean loss over
    the whole batch. The auxiliary losses of the blocks, such as those of a router, and auxiliary
    values are left out. The loss computes in the type of the parameters, whatever
    `layout.precision` is.
    """
    embed, stage_with_terms, head_with_aux = functions
    layout, axes, where = setup.layout, setup.axes, setup.family.where

    def stage(*arguments):
        """Returns the stage's output without the auxiliary losses of the stage's blocks."""
        return output(stage_with_terms(*arguments)).x

    def head(*arguments):
        """Returns the head's loss without auxiliary values."""
        return loss_part(head_with_aux(*arguments))

    if layout.pipelined:
        order, exchange = schedule_of(layout, setup.compute), exchange_of(layout, axes)
        loss = pipeline.value(embed, stage, head, order, axes["stage"], blocks=where, send=exchange)
    else:
        loss = pipeline.sequential(embed, stage, head)
    if layout.zero == 3:  # gathers the ends; the stage gathers its blocks
        loss = zero.gathered(loss, setup.along(SHARDED_OVER), setup.part_specs.ends)

    def mean_loss(model, batch):
        """Returns the mean of the loss over the axes in `MEAN_OVER`. Devices along these axes have
        different tokens. Along any other axis, all devices have the same loss.
        """
        return setup.along(MEAN_OVER).all_mean(loss(model, batch))

    return mean_loss


def rules_of(family: Family, layout: Layout) -> tuple[Rule, Rule]:
    """Returns the sharding rule of the parameters, and the rule of the optimizer's state. ZeRO
    splits the state, and ZeRO-3 also the parameters, over `SHARDED_OVER`.
    """
    # Only the rules of a family with experts take this argument.
    expert_axis = {"expert": "expert"} if layout.expert > 1 else {}
    rule = family.rules(
        "tensor", stage="stage" if layout.pipelined else None, size=layout.tensor, **expert_axis
    )
    if layout.zero == 0:
        return rule, rule
    # A rule must not name an axis that the mesh lacks: without a context axis, only "data".
    axis_names = SHARDED_OVER if layout.context > 1 else SHARDED_OVER[0]
    # ZeRO does not split the first dims, of chunks and layers: a device runs all layers of its
    # stage, and would otherwise have only some of them.
    keep = {f"{family.blocks}.**": tuple(range(loops_of(layout)))}
    sharded = rules.fsdp(axis_names, size=layout.optimizer_shards, keep=keep, inside=rule)
    return (sharded if layout.zero == 3 else rule), sharded


def first_scale(layout: Layout) -> precision.Scale | None:
    """Returns the initial loss scale for float16; None for other precisions."""
    return precision.Scale() if layout.precision == "float16" else None


def axes_with_algorithms(layout: Layout, compute: Compute) -> dict[str, Axis]:
    """Returns each axis of the layout, by name, with its collective algorithm.

    Raises:
        ValueError: `compute.axes` names an axis that the layout lacks, or gives an axis an
            algorithm for another axis.
    """
    axes = {name: Axis.of(name) for name in layout.axes}  # a name alone: `jax.lax` moves the data
    for name, axis in compute.axes.items():
        if name not in axes or Axis.of(axis).names != name:
            raise ValueError(
                f"axes: each name must be one of {', '.join(axes)}, with an algorithm along that "
                f"axis, such as axes={{'data': ring('data')}}; got {name!r}: {axis!r}."
            )
        axes[name] = Axis.of(axis)
    return axes


def along(axes: Mapping[str, Axis], names: Sequence[str]) -> Axis:
    """Returns one axis that joins those of `axes` whose names are in `names`, in the order of
    `names`; if there are none, an axis of one device.
    """
    present = [axes[name] for name in names if name in axes]
    return present[0] if len(present) == 1 else combined_axis(*present)


def schedule_of(layout: Layout, compute: Compute = PLAIN) -> Schedule:
    """Returns the schedule of the pipeline: `compute.schedule`, else the layout's schedule."""
    if compute.schedule is not None:
        return compute.schedule
    chunks = (layout.chunks,) if layout.chunks > 1 else ()  # not every schedule has chunks
    return SCHEDULES[layout.schedule](layout.stage, layout.microbatches, *chunks)


def exchange_of(layout: Layout, axes: Mapping[str, Axis]) -> pipeline.Exchange:
    """Returns how activations and cotangents go from stage to stage. With `layout.split_sends`,
    each device of the tensor axis sends one part of the array, and the devices of the receiving
    stage gather the parts along the tensor axis. Otherwise each device sends the whole array.
    """
    return pipeline.split_over(axes["tensor"]) if layout.split_sends else pipeline.whole


def remat_of(layout: Layout, compute: Compute, platform: str) -> Callable[..., Any]:
    """Returns `compute.remat`, or the function of `parallax.remat` for the layout if
    `compute.remat` is None. The returned function wraps a block, so that the block's backward pass
    recomputes the values that are not kept.
    """
    if compute.remat is not None:
        return compute.remat
    if layout.remat in ("gathers", "products", "block"):
        policy = getattr(remat, layout.remat)
    else:
        # The layout wraps no block, but the attention or a whole stage, or nothing. Under ZeRO-3 a
        # block would then keep the weights that it gathers; `remat.gathers` gathers them again.
        policy = remat.gathers if layout.zero == 3 else remat.none
    # On TPUs the barrier of `jax.checkpoint` is left out: with it, the compiler would copy all kept
    # values.
    return remat.in_a_loop(policy) if platform == "tpu" else policy


def unroll_of(setup: Setup) -> int:
    """Returns the number of layers in the body of the loop over layers."""
    layout, platform = setup.layout, setup.platform
    if setup.compute.unroll is not None:
        return setup.compute.unroll
    # Under ZeRO-3, with two layers in the loop's body, the gathers of one layer overlap the work of
    # the other. Not on TPUs: their compiler would then copy all values that are kept for the
    # backward pass.
    if layout.zero == 3:
        return 1 if platform == "tpu" else 2
    # On a GPU the loop copies all kept values into stacks, and nothing is fused across layers. A
    # body of some of the layers gains nothing: only without a loop is the step faster. With a
    # pipeline, whose ticks are a loop anyway, the layers keep their loop.
    layers = setup.config.sizes["layers"]
    without_loop = platform == "gpu" and not layout.pipelined and layers <= MOST_WITHOUT_LOOP
    return layers if without_loop else 1


def attention_of(family: Family, compute: Compute, platform: str) -> Callable[..., Any]:
    """Returns the attention function: `compute.attention`, else the family's kernel for the
    platform, else the family's attention.
    """
    kernels = {"tpu": family.tpu_attention, "gpu": family.gpu_attention}
    return compute.attention or kernels.get(platform) or family.attention


def comms_of(setup: Setup) -> Callable[..., tensor.Comms]:
    """Returns the function from an axis to the `tensor.Comms` with which the blocks communicate.

    The function for the tensor axis, such as `tensor.comms`, is the innermost. If the layout has a
    context axis, `context.comms` wraps that function. If the layout has an axis of experts, or
    `Compute` has an `expert_dispatch`, `experts.comms` wraps the result. A module such as `context`
    is imported only for a layout that needs it.
    """
    layout, axes, compute = setup.layout, setup.axes, setup.compute
    comms = compute.comms
    if comms is None:
        comms = tensor.comms
        if layout.sequence:
            from parallax import sequence

            comms = sequence.comms
        # With `on_tpu`, queries, keys and values have a matmul each, which is faster on TPUs. Not
        # in a pipeline: it copies the arrays that a stage keeps into a buffer and out of it, which
        # would be three arrays in place of one.
        if setup.platform == "tpu" and not layout.pipelined:
            comms = functools.partial(comms, on_tpu=True)
    if layout.context > 1:
        from parallax import context

        context_attention = compute.context_attention or setup.family.context_attention
        assert context_attention is not None  # `decoder` refuses a context axis without one

        def attend_around(attend):
            """Wraps `attend` so that it attends to the tokens of all devices along the context
            axis."""
            return context_attention(attend, axes["context"])

        comms = functools.partial(
            context.comms, context=axes["context"], inner=comms, around=attend_around
        )
    if layout.expert > 1 or compute.expert_dispatch is not None:
        from parallax import experts

        dispatch: Any = compute.expert_dispatch or experts.gathered
        # Without an axis of experts, `()`, each device has all of them.
        comms = functools.partial(
            experts.comms, experts=axes.get("expert", ()), inner=comms, dispatch=dispatch
        )
    return comms


def loops_of(layout: Layout) -> int:
    """Returns the number of leading dims of the blocks' arrays over which loops run: 1 (layers), or
    2 in a pipeline (chunks, and the layers of a chunk).
    """
    return 2 if layout.pipelined else 1


def weighted(batch: Batch, setup: Setup) -> Batch:
    """Returns the batch with normalised weights. If `Compute` has `documents`, the batch first gets
    segments and weights for its documents.

    Weights, if there are any, are scaled so that their mean over the tokens of all devices is 1.
    The mean of the devices' losses is then the weighted mean over all tokens.

    Raises:
        ValueError: the windows or the weights have another shape than `Batch` says.
    """
    check_weights(batch)
    if setup.compute.documents is not None:
        from parallax.models import documents

        # `compute.documents` returns the number of each token's document, as in segments.
        batch = documents.with_segments(batch, setup.compute.documents(batch.windows))
    if batch.weights is None:
        return batch
    # Devices along other axes have the same windows: a context axis splits their tokens later.
    batch_axis = setup.along(setup.layout.batch_axes)
    return batch._replace(weights=cross_entropy.normalized(batch.weights, batch_axis))


def differentiated(loss: Callable[..., Any], trainable: PyTree = rules.is_inexact) -> Grad:
    """Returns the gradient function of `loss`. `loss` returns a scalar or `(scalar, aux)`. A leaf
    that is not trained has the gradient None.
    """

    def grad(params, batch):
        """Returns the loss, or `(loss, aux)`, and the gradients."""
        # `trainable` may also choose leaves without a derivative, such as integers. They are the
        # tree `static`.
        chosen, frozen = eqx.partition(params, trainable)
        trained, static = eqx.partition(chosen, rules.is_inexact)
        others = eqx.combine(static, frozen)

        def loss_and_aux(trained):
            """Returns the result of `loss` as a pair. A scalar becomes `(scalar, None)`."""
            value = loss(eqx.combine(trained, others), batch)
            return value if isinstance(value, tuple) else (value, None)

        (value, aux), gradients = jax.value_and_grad(loss_and_aux, has_aux=True)(trained)
        # Without aux the value is a bare loss: wrappers of gradient functions test for a tuple.
        return value if aux is None else (value, aux), gradients

    return grad


def _unchanged(gradients: PyTree) -> PyTree:
    """Returns the gradients unchanged. `grad_of` uses this function as `scatter` in every case but
    ZeRO-2. With ZeRO-3, `zero.gathered` and `zero.gathered_once` scatter the gradients.
    """
    return gradients


def _with_gradients(grad: Grad, change: Callable[[PyTree], PyTree]) -> Grad:
    """Returns `grad` with `change` applied to its gradients."""

    def wrapped(params, batch):
        """Returns the loss (or `(loss, aux)`), and the gradients with `change` applied."""
        value, gradients = grad(params, batch)
        return value, change(gradients)

    return wrapped


def _with_local_loss(stage: Callable[..., Any], axis: Axis) -> Callable[..., Any]:
    """Returns `stage` with its term of the loss typed as varying along `axis`, as the head's loss
    is typed.

    The step sums the gradients over the n devices of `axis` and divides them by n. A term that is
    the same on all devices, such as a mean over all tokens, may be typed as not varying. JAX would
    then count the term's gradient once in that sum, not n times, so this gradient would be n times
    too small.
    """

    def wrapped(*arguments):
        """Returns the stage's `Output`. Its loss, if there is one, is typed as varying along
        `axis`, so that the sum of gradients over `axis` counts each device's loss.
        """
        result = output(stage(*arguments))  # `output` makes an `Output` also of a bare x
        loss = None if result.loss is None else varying(result.loss, axis.names)
        return Output(result.x, loss, result.aux)

    return wrapped


def _scaled(stage: Callable[..., Any], scale: Float[Array, ""]) -> Callable[..., Any]:
    """Returns a function like `stage`, with the stage's own term of the loss multiplied by `scale`.
    A stage without such a term is not changed. With float16, the loss is scaled so that small
    gradients do not become 0; `precision.scaled` scales the head's loss.
    """

    def wrapped(*arguments):
        """Returns the stage's `Output`. Its loss, if there is one, is multiplied by `scale`."""
        result = output(stage(*arguments))
        if result.loss is None:
            return result
        dtype = accumulation_dtype(result.loss.dtype)  # float32 or wider: float16 could overflow
        return Output(result.x, result.loss.astype(dtype) * scale.astype(dtype), result.aux)

    return wrapped


def _with_aux_by_layer(grad: Grad) -> Grad:
    """Returns `grad` with the auxiliary values of the stages as [L, ...], in the order of the
    layers.

    `grad` gives the auxiliary values of the L layers as [C, L / C, ...]. The C chunks of all stages
    are already in the order of the model, so the two dims only have to be joined. Without a
    pipeline, C is 1.
    """

    def by_layer(aux):
        """Returns `aux` with the values of its stages reshaped to [L, ...]. If the stages have no
        values, `aux` is no `Aux` but the value of the head alone, and is returned unchanged.
        """
        if not isinstance(aux, Aux):
            return aux
        return aux._replace(
            stages=jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), aux.stages)
        )

    def wrapped(params, batch):
        """Returns the loss, its auxiliary values by layer, and the gradients."""
        value, gradients = grad(params, batch)
        return map_loss_and_aux(value, lambda loss: loss, by_layer), gradients

    return wrapped
