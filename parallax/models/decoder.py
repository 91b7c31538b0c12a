"""The recipe that composes the axes for a decoder: its train step over data x stage x context x tensor, whatever its layers are.

    prepared = decoder.prepare(gpt2.FAMILY, gpt2.SMALL, optax.adamw(3e-4), layout, mesh, batch=64, key=jax.random.key(0))

It is short on purpose: copy it, and change a line. What a layout's words mean is said in `layout.words`, what a model is in
`models.family`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from parallax import context, cross_entropy, experts, islands, mesh, pipeline, precision, remat, rules
from parallax.collectives import Axis, AxisLike
from parallax.collectives.types import varying, wide
from parallax.grads import Grad, map_loss_and_aux
from parallax.layout import Layout, ways, words
from parallax.layout.rows import Functions, Placed
from parallax.models import documents, tapped
from parallax.models.family import Batch, Configuration, Family
from parallax.models.prepared import PLAIN, Compute, Partly, Prepared, Train
from parallax.pipeline import Aux, Output
from parallax.pipeline.checks import output
from parallax.schedule import Schedule
from parallax.step import Planned, State, Step, make_scaled, planned

__all__ = [
    "PLAIN",
    "Batch",
    "Compute",
    "Configuration",
    "Family",
    "Prepared",
    "Train",
    "joined",
    "loss_step",
    "prepare",
    "rules_of",
    "sequence_keys",
    "stored",
    "train_step",
]


def train_step(*arguments: Any, **options: Any) -> tuple[State, Train]:
    """A decoder over data x stage x tensor: the state, and the compiled step `(state, windows) -> (state, info)`.

    Arguments and errors are those of `prepare`, which it calls, to make the state at once.
    """
    prepared = prepare(*arguments, **options)
    return prepared.init(), prepared.train


def prepare(
    family: Family,
    config: Configuration,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    mesh_: mesh.AnyMesh,
    *,
    batch: int,
    key: Key[Array, ""],
    axes: Mapping[str, AxisLike] | None = None,
    compute: Compute = PLAIN,
) -> Prepared:
    """A decoder over data x stage x context x tensor: the step `(state, windows) -> (state, info)`, and how its state is made.

    The step donates the state. `windows` is the global batch, [batch, T + 1] tokens, placed or not. The weights and the
    dropout masks come from `key` and from logical positions, so every layout computes the same run.

    Args:
        family: the kind of decoder, such as `gpt2.FAMILY`.
        config: the model's sizes.
        optimizer: one that acts element by element, or one of `parallax.optimizers`.
        layout: the sizes of the axes, and what is split, shortened or computed again; with stages, the blocks of the model in
            the state are [v, L / v, ...], and `joined` makes them [L, ...] again.
        mesh_: its mesh, as `mesh.make(**layout.axes)` makes it.
        batch: sequences in the global batch.
        key: the seed of the run.
        axes: who moves data along which axis, such as `{"data": bucketed(ring("data")), "tensor": "tensor"}`; along those that
            are left out, rings.
        compute: how the model computes.

    Raises:
        ValueError: the layout does not divide the model or the batch, or is not the mesh's; `axes` names another axis; or a
            context axis splits the tokens, and the attention does not go over it.
    """
    made = local_step(family, config, optimizer, layout, mesh_, batch=batch, key=key, axes=axes, compute=compute)
    keys = lambda number: sequence_keys(made.dropout, number, batch) if family.drops(config) else None
    train = compiled(made.step, made.state, mesh_, keys, split=P(layout.batch_axes))
    return Prepared(made.state.init, made.state.shapes, train)


class Local(NamedTuple):
    """A decoder's step on local blocks, for another wrapper than `mesh.spmd` alone.

    Attributes:
        step: `(state, batch, limit) -> (state, info)`, of a `Batch`.
        state: the state that it changes, which can be made.
        dropout: the key of the dropout masks.
    """

    step: Step
    state: Planned
    dropout: Key[Array, ""]


def local_step(
    family: Family,
    config: Configuration,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    mesh_: mesh.AnyMesh,
    *,
    batch: int,
    key: Key[Array, ""],
    axes: Mapping[str, AxisLike] | None = None,
    compute: Compute = PLAIN,
) -> Local:
    """The step that `prepare` compiles, before it is; arguments and errors as there. The mesh may have more axes."""
    layout.check(**config.sizes, batch=batch)
    _check_mesh(layout, mesh_)
    _check_attention(family, layout, compute)
    does = _functions(layout, axes, compute, platform_of(mesh_))
    weights_key, dropout_key = jax.random.split(key)
    make_model = _maker(family, config, does, compute.schedule, weights_key, compute.dtype)
    rule, shared = rules_of(family, layout)
    placed = _placed(family, make_model, does, shared, mesh_)
    scale = does.numbers.scale()
    of_parameters = does.replicas.parameters(whole=rule, share=shared)
    state = planned(
        *(make_model, optimizer, of_parameters, mesh_),
        optimizer_rule=shared,
        scale=scale,
        trainable=compute.trainable,
        batch_axes=layout.batch_axes,
    )
    attend = attention_of(family, compute, platform_of(mesh_))
    enter, stage, head = _stages(family, config, does, placed, compute, attend)

    def grad_of(scale):
        of_stage, of_loss = (stage, head) if scale is None else (_scaled(stage, scale), precision.scaled(head, scale))
        grad = does.outside(does.grad(enter, of_stage, of_loss, placed, compute.trainable), placed)
        grad = _by_layer(grad if scale is None else precision.unscaled(grad, scale))
        return tapped.gradients(lambda model, batch: grad(model, _weighted(batch, does.sequences, compute)), placed.specs)

    axes_of_norm = tuple(does.axes.values())
    update = does.optimizer(optimizer, placed)
    local = make_scaled(grad_of, update, max_norm=compute.max_norm, reduce_norm_over=axes_of_norm, specs=state.specs.model)
    cut = _on_blocks(family, _into_stages(does, compute.schedule))
    init = lambda model=None: state.init() if model is None else state.init(cut(model))
    return Local(local, state._replace(init=init), dropout_key)


def compiled(
    local: Callable[..., Any],
    state: Planned | islands.Planned,
    mesh_: mesh.AnyMesh,
    keys: Callable[[Array], Any],
    *,
    split: P,
    of_info: P = P(),  # noqa: B008
    options: int = 1,
) -> Train:
    """The compiled step of a local one: it donates the state.

    Args:
        local: `(state, batch, *options) -> (state, info)`, of a `Batch`.
        state: the state that it changes.
        mesh_: the mesh.
        keys: from the step's number to the random keys of the global batch, or to None.
        split: the spec of the batch.
        of_info: the spec of what the step measured.
        options: how many options it takes, each the same on all devices, or None.
    """
    given = (P(),) * options
    step = mesh.spmd(local, mesh=mesh_, in_specs=(state.specs, split, *given), out_specs=(state.specs, of_info))
    static = eqx.filter(state.shapes, mesh.is_array, inverse=True)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(arrays, windows, weights=None, *chosen):
        chosen = (*chosen, *(None,) * (options - len(chosen)))
        new, info = step(eqx.combine(arrays, static), Batch(windows, keys(arrays.step), weights), *chosen)
        return eqx.filter(new, mesh.is_array), info

    made = cast("Train", train)
    return Partly(made, static) if jax.tree.leaves(static) else made


def loss_step(
    family: Family,
    config: Configuration,
    layout: Layout,
    mesh_: mesh.AnyMesh,
    *,
    axes: Mapping[str, AxisLike] | None = None,
    compute: Compute = PLAIN,
) -> Callable[..., Float[Array, ""]]:
    """The compiled `(model, windows, weights=None) -> loss` of `train_step`'s model, to evaluate with.

    Without dropout, and without the auxiliary losses of its blocks.

    The batch may be of another size than in training; it must divide by data x microbatches. It computes in the parameters'
    own precision, and gathers a model that lives as shares (ZeRO-3) layer by layer too. Of `compute` it uses `attend`, `around`,
    `documents`, `dispatch`, `joins` and `schedule`; `axes` as in `prepare`.
    """
    compute = dataclasses.replace(compute, remat=None, sums=None)
    does = _functions(dataclasses.replace(layout, remat="none"), axes, compute, platform_of(mesh_))
    _check_attention(family, layout, compute)
    make_model = _maker(family, config, does, compute.schedule, jax.random.key(0), jnp.dtype(jnp.float32))
    rule, shared = rules_of(family, layout)
    placed = _placed(family, make_model, does, does.replicas.parameters(whole=rule, share=shared), mesh_)
    attend = attention_of(family, compute, platform_of(mesh_))
    enter, stage, head = _stages(family, config, does, placed, compute, attend)

    def loss_alone(*arguments):
        value = head(*arguments)
        return value[0] if isinstance(value, tuple) else value

    def stage_alone(*arguments):
        return output(stage(*arguments)).x

    loss = does.value(enter, stage_alone, loss_alone, placed)
    local = lambda model, batch: does.everywhere.all_mean(loss(model, _weighted(batch, does.sequences, compute)))
    evaluate = mesh.spmd(local, mesh=mesh_, in_specs=(placed.specs, P(layout.batch_axes)), out_specs=P())
    static = eqx.filter(eqx.filter_eval_shape(make_model), mesh.is_array, inverse=True)
    run = lambda arrays, windows, weights=None: evaluate(eqx.combine(arrays, static), Batch(windows, None, weights))
    compiled = jax.jit(run)
    partly = lambda model, windows, weights=None: compiled(eqx.filter(model, mesh.is_array), windows, weights)
    return partly if jax.tree.leaves(static) else compiled


def joined(family: Family, layout: Layout, model: Any, *, schedule: Schedule | None = None) -> Any:
    """The model of a state under `layout` as one device has it: blocks as [L, ...]. Other trees stay as they are.

    `schedule` is that of `Compute`, where the step has one: it says where its chunks are.
    """
    return _on_blocks(family, _out_of_stages(words.read(layout), schedule))(model)


def stored(family: Family, layout: Layout, *, schedule: Schedule | None = None) -> dict[str, Callable[..., Any]]:
    """How a state goes into a checkpoint that any layout can read, and back: arguments for `run.checkpoint.Checkpoints`.

    Wherever the state holds a model of the family (the parameters, the optimizer's moments), its blocks are stored as [L, ...],
    in the order of the model. `schedule` is that of `Compute`, where the step has one: it says where its chunks are.
    """
    does = words.read(layout)
    to_disk, from_disk = _out_of_stages(does, schedule), _into_stages(does, schedule)
    return does.stages.of(alone={}, piped={"to_disk": _on_blocks(family, to_disk), "from_disk": _on_blocks(family, from_disk)})


def rules_of(family: Family, layout: Layout) -> tuple[rules.Rule, rules.Rule]:
    """The rule of a layout's model, and the rule of what the replicas share (ZeRO)."""
    does = words.read(layout)
    split = {"expert": "expert"} if layout.expert > 1 else {}
    rule = family.rules("tensor", stage=does.stages.axis, size=layout.tensor, **split)
    keep = {f"{family.blocks}.**": tuple(range(does.stages.loops))}
    size = layout.data * layout.context
    return rule, does.replicas.state(whole=rule, share=rules.fsdp(does.parts.names, size=size, keep=keep, inside=rule))


def sequence_keys(key: Key[Array, ""], step: Int[Array, ""], batch: int) -> Key[Array, " batch"]:
    """One random key for each sequence of the global batch at `step`: the same wherever the sequence is computed."""
    fold = functools.partial(jax.random.fold_in, jax.random.fold_in(key, step))
    return jax.vmap(fold)(jnp.arange(batch, dtype=jnp.uint32))


def platform_of(mesh_: mesh.AnyMesh) -> str:
    """What kind of devices a mesh has: "cpu", "gpu" or "tpu"; a mesh that is traced alone counts as one of CPUs."""
    return mesh_.devices.flat[0].platform if isinstance(mesh_, Mesh) else "cpu"


def _functions(layout: Layout, axes: Mapping[str, AxisLike] | None, compute: Compute, platform: str) -> Functions:
    """`layout` as functions, with what is fastest on the platform, and what `compute` puts in their place."""
    does, table, block = words.read(layout, axes), compute.schedule, compute.remat
    if platform == "tpu":  # behind a barrier, or with two layers in a loop's body, its compiler copies all that is kept
        does = does._replace(kept=does.kept._replace(block=remat.in_a_loop(does.kept.block)))
        does = does._replace(replicas=does.replicas._replace(unroll=1))
    if compute.sums is not None:
        _check_sums(does, layout)
        does = does._replace(replicas=ways.summed_in_blocks(does, compute.sums))
    if compute.joins is not None:
        _check_joins(does, layout)
        does = does._replace(tokens=does.tokens._replace(joins=compute.joins))
    does = does if table is None else does._replace(table=lambda: table)
    return does if block is None else does._replace(kept=does.kept._replace(block=block))


def _maker(
    family: Family,
    config: Configuration,
    does: Functions,
    schedule: Schedule | None,
    key: Key[Array, ""],
    dtype: DTypeLike,
) -> Callable[[], Any]:
    """How the model of a layout is made."""
    cut = _on_blocks(family, _into_stages(does, schedule))
    return lambda: cut(family.model(config, key=key, dtype=dtype))


def _into_stages(does: Functions, schedule: Schedule | None) -> Callable[[Any], Any]:
    """From blocks [L, ...] to those that the state of a layout holds, by the schedule that was put in the layout's place.

    The schedules of a layout itself are all looped: nothing changes its place.
    """

    def cut(blocks):
        blocks = does.stages.cut(blocks, does.chunks)
        return blocks if schedule is None else pipeline.arranged(blocks, schedule.placed)

    return cut


def _out_of_stages(does: Functions, schedule: Schedule | None) -> Callable[[Any], Any]:
    """The inverse of `_into_stages`."""

    def joined(blocks):
        return does.stages.joined(blocks if schedule is None else pipeline.in_model_order(blocks, schedule.placed))

    return joined


def _on_blocks(family: Family, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """From a tree to the same with the blocks of each model in it changed."""
    is_model = lambda leaf: isinstance(leaf, family.model)
    changed = lambda model: eqx.tree_at(family.where, model, change(family.where(model)))
    return lambda tree: jax.tree.map(lambda leaf: changed(leaf) if is_model(leaf) else leaf, tree, is_leaf=is_model)


def _placed(family: Family, make_model: Callable[[], Any], does: Functions, rule: rules.Rule, mesh_: mesh.AnyMesh) -> Placed:
    """Where the parts of the model live under `rule`."""
    specs = rules.specs(eqx.filter_eval_shape(make_model), rule, mesh_)
    return Placed(specs, family.where, does.stages.loops)


def attention_of(family: Family, compute: Compute, platform: str) -> Callable[..., Any]:
    """The attention function: what was asked for, or the family's, on TPUs by its kernel."""
    own = family.kernel if platform == "tpu" else None
    return compute.attend or own or family.attend


def _stages(family: Family, config: Configuration, does: Functions, placed: Placed, compute: Compute, attend: Callable[..., Any]):
    """The family's `(enter, stage, head)` under a layout."""
    around = compute.around or family.around or context.causal  # `prepare` refuses none where there is a context axis
    enter, stage, head = family.stages(
        config,
        does.stages.of(alone=(), piped=does.axes["stage"]),
        does.axes["tensor"],
        joins=functools.partial(
            experts.joins, experts=does.axes.get("expert", ()), inner=does.joins(around), dispatch=compute.dispatch
        ),
        attend=does.again.attend(attend),
        remat=lambda block: does.block(tapped.block(block, placed), placed),
        unroll=does.replicas.unroll,
    )
    stage = stage if compute.documents is None else documents.minded(stage)
    stage = _own_loss(does.checked(stage), does.everywhere)
    return tapped.ends(enter, "enter", placed), stage, tapped.ends(head, "head", placed)


def _own_loss(stage: Callable[..., Any], over: Axis) -> Callable[..., Any]:
    """`stage` with its terms of the loss typed as each device's own, as the head's loss is: the mean is taken over `over`.

    A term that is the same along such an axis, as a mean over all tokens is, would else be differentiated as one for all devices.
    """

    def wrapped(*arguments):
        made = output(stage(*arguments))
        return Output(made.x, None if made.loss is None else varying(made.loss, over.names), made.aux)

    return wrapped


def _scaled(stage: Callable[..., Any], scale: Float[Array, ""]) -> Callable[..., Any]:
    """`stage` with its terms of the loss times `scale`, as `precision.scaled` makes of the head."""

    def wrapped(*arguments):
        made = output(stage(*arguments))
        loss = None if made.loss is None else made.loss.astype(wide(made.loss.dtype)) * scale.astype(wide(made.loss.dtype))
        return Output(made.x, loss, made.aux)

    return wrapped


def _by_layer(grad: Grad) -> Grad:
    """`grad` whose auxiliary values of stages, [chunks, layers of one, ...], are those of all layers in order, [L, ...]."""
    joined = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
    stages_joined = lambda aux: aux._replace(stages=jax.tree.map(joined, aux.stages)) if isinstance(aux, Aux) else aux

    def wrapped(params, batch):
        value, gradients = grad(params, batch)
        return map_loss_and_aux(value, lambda loss: loss, stages_joined), gradients

    return wrapped


def _weighted(batch: Batch, data: Axis, compute: Compute) -> Batch:
    """The batch with its documents apart, and with weights whose mean over the tokens of all devices is 1, where it has any."""
    batch = batch if compute.documents is None else documents.apart(batch, compute.documents(batch.windows))
    return batch if batch.weights is None else batch._replace(weights=cross_entropy.normalized(batch.weights, data))


def _check_attention(family: Family, layout: Layout, compute: Compute) -> None:
    """Refuse a context axis where nothing says how attention goes over it."""
    by_family = family.around is not None and compute.attend is None
    if layout.context == 1 or compute.around is not None or by_family:
        return
    who = f"{family.model.__name__}'s family has no `around`" if compute.attend is None else "Compute has `attend` alone"
    raise ValueError(
        f"decoder: the layout splits tokens over context={layout.context}, and {who}, so that a token would see those of its own "
        "device alone. Take Compute(around=context.causal) where attention is softmax(q k^T / sqrt(K)) v, or context.ulysses."
    )


def _check_sums(does: Functions, layout: Layout) -> None:
    """Refuse sums inside blocks that would be taken once a microbatch, or of what ZeRO scatters."""
    if does.stages.axis or does.microbatches > 1 or does.replicas.needs:
        raise ValueError(
            "decoder: Compute(sums=...) sums a block's gradients wherever they are made, so it needs stage=1, microbatches=1 and "
            f"zero=0; got Layout({layout}). Leave `sums` out: gradients are then reduced once, or by zero=3 where they are made."
        )


def _check_joins(does: Functions, layout: Layout) -> None:
    """Refuse joins for tokens that no axis splits."""
    if not does.tokens.needs:
        raise ValueError(
            "decoder: Compute(joins=...) says how blocks join whose tokens are split over the tensor axis, so it needs "
            f"sequence=True; got Layout({layout}). Set it, or leave `joins` out."
        )


def _check_mesh(layout: Layout, mesh_: mesh.AnyMesh) -> None:
    for name, size in layout.axes.items():
        if mesh_.shape.get(name) != size:
            raise ValueError(
                f"decoder: the layout has {name}={size}, and the mesh {dict(mesh_.shape)}. Make it with mesh.make(**layout.axes)."
            )
