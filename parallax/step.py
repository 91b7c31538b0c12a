"""From a grad arrow to a train step, and the recipe that composes the axes for GPT-2.

A step is `(state, batch) -> (state, info)`. The recipe is short on purpose: copy it, and change a line.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from parallax import grads, mesh, pipeline, precision, remat, rules, sequence, zero
from parallax.collectives import ring
from parallax.collectives.replicated import varying_axes
from parallax.grads import Grad
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.schedule import Schedule


class State(eqx.Module):
    """All that a step changes, and all that a run needs to go on. A tree of specs has this form too.

    Attributes:
        model: the parameters, in a tree that may have leaves of other kinds.
        optimizer: the state of the optimizer.
        step: how many steps were made, the skipped ones too: an int32 scalar.
        scale: a `precision.Scale`, where the loss is scaled.
    """

    model: PyTree
    optimizer: PyTree
    step: PyTree
    scale: PyTree = None


class Info(NamedTuple):
    """What a step measured: scalars.

    Attributes:
        loss: of the global batch, in the unit of the grad arrow's.
        gradient_norm: of all gradients together, before any clipping by `make`.
        skipped: whether one of the two was not finite: model and optimizer are then as they were.
    """

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    skipped: Bool[Array, ""]


Step = Callable[[State, PyTree], tuple[State, Info]]


def make(
    grad: Grad, optimizer: optax.GradientTransformation, *, max_norm: float | None = None, all_reduce: Callable = jax.lax.psum
) -> Step:
    """The train step of `grad` and `optimizer`; it runs on local blocks inside `mesh.spmd`, and as it is on one device.

    A step whose loss or gradient norm is not finite changes nothing but the step's number, and says so in its `Info`.

    Args:
        grad: a grad arrow whose gradients are reduced already.
        optimizer: any that acts leaf by leaf, since each device updates its own shards.
        max_norm: scale the gradients down to this global norm, over all shards, where they exceed it.
        all_reduce: joins the shards' sums of squares, one scalar for each set of axes in use.

    Raises:
        ValueError: a gradient varies along an axis along which its parameter is the same: it was not reduced.
    """
    return make_scaled(lambda _: grad, optimizer, max_norm=max_norm, all_reduce=all_reduce)


def make_scaled(
    grad_of: Callable[[Any], Grad],
    optimizer: optax.GradientTransformation,
    *,
    max_norm: float | None = None,
    all_reduce: Callable = jax.lax.psum,
) -> Step:
    """`make` of a grad arrow that depends on the loss scale, as float16 needs: `grad_of(scale)`, its gradients unscaled.

    The state's `scale`, a `precision.Scale`, follows what becomes of the steps (`precision.adjusted`). Where the state has
    none, `grad_of` is given None. Arguments and errors are otherwise those of `make`.
    """

    def step(state, batch):
        weights = eqx.filter(state.model, eqx.is_inexact_array)
        loss, gradients = grad_of(None if state.scale is None else state.scale.value)(state.model, batch)
        _check_reduced(gradients, weights)
        norm = grads.norm(gradients, all_reduce=all_reduce)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        gradients = gradients if max_norm is None else grads.scaled(gradients, norm, max_norm)
        gradients = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, weights)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, weights)
        new = State(
            precision.select(finite, eqx.apply_updates(state.model, updates), state.model),
            precision.select(finite, optimizer_state, state.optimizer),
            state.step + 1,
            None if state.scale is None else precision.adjusted(state.scale, finite),
        )
        return new, Info(loss, norm, ~finite)

    return step


def _check_reduced(gradients: PyTree, weights: PyTree) -> None:
    def check(path, gradient, weight):
        local = set(varying_axes(gradient)) - set(varying_axes(weight))
        if local and gradient.shape == weight.shape and math.prod(map(jax.lax.axis_size, local)) > 1:
            raise ValueError(
                f"step.make needs gradients that are reduced; that of {mesh.dotted(path)} differs along {sorted(local)}, where "
                f"the parameter is the same. Wrap the grad arrow in grads.averaged or zero.scattered."
            )

    jax.tree.map_with_path(check, gradients, weights)


def init(
    make_model: Callable[[], PyTree],
    optimizer: optax.GradientTransformation,
    rule: Callable,
    mesh_: Mesh,
    *,
    optimizer_rule: Callable | None = None,
    scale: precision.Scale | None = None,
) -> tuple[State, State]:
    """A fresh `State`, made in its place under `jit`: no device ever holds the whole. Also its specs.

    Args:
        make_model: makes the model, of arrays and static fields, from nothing: a function of no arguments, such as
            `functools.partial(gpt2.GPT2, config, key=key)`.
        rule: the sharding rule of the model, for `rules.specs`.
        optimizer_rule: the rule that the optimizer's state follows, where it is split further (ZeRO-1); by default `rule`.
        scale: the first loss scale, for `make_scaled`.

    Raises:
        ValueError: as `rules.specs` and `rules.optimizer_specs` do, of the model and of the optimizer's state.
    """
    make_state, specs = planned(make_model, optimizer, rule, mesh_, optimizer_rule=optimizer_rule, scale=scale)
    return jax.jit(make_state, out_shardings=mesh.shardings(specs, mesh_))(), specs


def planned(
    make_model: Callable[[], PyTree],
    optimizer: optax.GradientTransformation,
    rule: Callable,
    mesh_: Mesh,
    *,
    optimizer_rule: Callable | None = None,
    scale: precision.Scale | None = None,
) -> tuple[Callable[[], State], State]:
    """The function that makes what `init` makes, and its specs; arguments and errors as there. Nothing is computed."""

    def make_state():
        model = make_model()
        return State(model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), jnp.zeros((), jnp.int32), scale)

    shapes = eqx.filter_eval_shape(make_model)
    model_specs = rules.specs(shapes, rule, mesh_)
    owned = model_specs if optimizer_rule is None else rules.specs(shapes, optimizer_rule, mesh_)
    scale_specs = jax.tree.map(lambda _: P(), scale)
    specs = State(model_specs, rules.optimizer_specs(optimizer, shapes, owned), P(), scale_specs)
    return make_state, specs


class Collectives(NamedTuple):
    """Who moves data between devices.

    Attributes:
        all_reduce: a drop-in twin of `lax.psum`.
        reduce_scatter: of `lax.psum_scatter`.
        all_gather: of `lax.all_gather`.
    """

    all_reduce: Callable
    reduce_scatter: Callable
    all_gather: Callable


class Prepared(NamedTuple):
    """A train step that is checked and ready to compile, and the state that it will need: nothing is computed yet.

    Attributes:
        init: makes the state in its place: no device ever holds the whole.
        shapes: its `jax.ShapeDtypeStruct`s, with their shardings, to compile for and to plan with.
        train: the step `(state, windows) -> (state, info)`, under `jit`; it donates the state.
    """

    init: Callable[[], State]
    shapes: State
    train: Callable[[State, Int[Array, "batch window"]], tuple[State, Info]]


def train_step(*arguments, **options) -> tuple[State, Callable[[State, Int[Array, "batch window"]], tuple[State, Info]]]:
    """GPT-2 over data x stage x tensor: the state, and the compiled step `(state, windows) -> (state, info)`.

    Arguments and errors are those of `prepare`, which it calls, to make the state at once.
    """
    prepared = prepare(*arguments, **options)
    return prepared.init(), prepared.train


def prepare(
    config: gpt2.Config,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    mesh_: Mesh,
    *,
    batch: int,
    schedule: Schedule | None = None,
    all_reduce: Callable = ring.all_reduce,
    reduce_scatter: Callable = ring.reduce_scatter,
    all_gather: Callable = ring.all_gather,
    max_norm: float | None = None,
    checkpoint: Callable | None = None,
    attend: Callable = gpt2.attention,
    dtype: DTypeLike = jnp.float32,
    key: Key[Array, ""],
) -> Prepared:
    """GPT-2 over data x stage x tensor: the step `(state, windows) -> (state, info)`, and how its state is made.

    The step donates the state. `windows` is the global batch, [batch, T + 1] tokens, placed or not. The weights and the
    dropout masks come from `key` and from logical positions, so every layout computes the same run.

    Args:
        config: the model's sizes.
        optimizer: any that acts leaf by leaf.
        layout: the sizes of the axes, and what is split, shortened or computed again; with stages, the model in the state is
            `gpt2.chunked`.
        mesh_: its mesh, as `mesh.make(**layout.axes)` makes it.
        batch: sequences in the global batch.
        schedule: the pipeline's, where it is another than `layout.table()`.
        all_reduce: the sum, for every axis.
        reduce_scatter: for ZeRO and sequence parallelism.
        all_gather: for the same.
        max_norm: clip the gradients to this global norm.
        checkpoint: what becomes of each block, instead of what `layout.remat` says.
        attend: the attention function.
        dtype: of the weights.
        key: the seed of the run.

    Raises:
        ValueError: the layout does not divide the model or the batch, or is not the mesh's.
    """
    layout.check(**config.sizes, batch=batch)
    _check_mesh(layout, mesh_)
    collectives = Collectives(all_reduce, reduce_scatter, all_gather)
    weights_key, dropout_key = jax.random.split(key)
    make_model, rule, shared = _model(config, layout, weights_key, dtype)
    specs = rules.specs(eqx.filter_eval_shape(make_model), shared, mesh_)
    scale = precision.Scale() if layout.precision == "float16" else None
    make_state, state_specs = planned(
        make_model, optimizer, shared if layout.zero == 3 else rule, mesh_, optimizer_rule=shared, scale=scale
    )
    if layout.zero in (1, 2):
        optimizer = zero.sharded(optimizer, "data", specs=specs, **collectives._asdict())

    def grad_of(scale):
        options = {"checkpoint": checkpoint or REMAT[layout.remat], "attend": attend}
        loss_scale = (lambda loss: loss) if scale is None else functools.partial(precision.scaled, scale=scale)
        if layout.stage == 1:
            grad = accumulated_grad(layout, specs, collectives, loss_scale, **options)
        else:
            table = schedule or layout.table()
            grad = pipelined_grad(config, layout, table, specs, collectives, loss_scale, **options)
        grad = reduced(grad, layout, specs, collectives)
        return grad if scale is None else precision.unscaled(grad, scale)

    local = make_scaled(grad_of, optimizer, max_norm=max_norm, all_reduce=all_reduce)
    step = mesh.spmd(local, mesh=mesh_, in_specs=(state_specs, P("data")), out_specs=(state_specs, P()))
    drops = config.dropout > 0 or config.attention_dropout > 0

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, windows):
        return step(state, (windows, sequence_keys(dropout_key, state.step, batch) if drops else None))

    placed = mesh.shardings(state_specs, mesh_)
    return Prepared(
        init=jax.jit(make_state, out_shardings=placed),
        shapes=jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            jax.eval_shape(make_state),
            placed,
        ),
        train=train,
    )


REMAT = {
    "none": remat.none,
    "gathers": remat.gathers,
    "attention": remat.none,
    "products": remat.products,
    "block": remat.block,
    "stage": remat.none,
}
DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}


def accumulated_grad(
    layout: Layout, specs: PyTree, collectives: Collectives, loss_scale: Callable, *, checkpoint: Callable, attend: Callable
) -> Grad:
    """GPT-2's grad arrow over data x tensor, microbatches one after another: local to data, or scattered once a microbatch."""
    joined = _blocks(layout, specs.blocks, collectives, checkpoint=checkpoint, attend=attend)
    loss = functools.partial(gpt2.loss, axis_name="tensor", **joined)
    grad = jax.value_and_grad(loss_scale(loss))

    def scattering(params, part):
        loss, gradients = grad(params, part)
        return loss, zero.scatter(gradients, "data", specs=specs, reduce_scatter=collectives.reduce_scatter)

    return grads.accumulated(scattering if layout.zero == 2 else grad, microbatches=layout.microbatches)


def pipelined_grad(
    config: gpt2.Config,
    layout: Layout,
    schedule: Schedule,
    specs: PyTree,
    collectives: Collectives,
    loss_scale: Callable,
    *,
    checkpoint: Callable,
    attend: Callable,
) -> Grad:
    """GPT-2's grad arrow over data x stage x tensor, microbatches one behind another."""
    own_chunk = jax.tree.map(lambda spec: P(*spec[1:]), specs.blocks, is_leaf=mesh.is_spec)  # a stage sees [L/v, ...]
    joined = _blocks(layout, own_chunk, collectives, checkpoint=checkpoint, attend=attend)
    enter, stage, head = gpt2.stages(config, **joined)
    scatter = functools.partial(zero.scatter, axis_name="data", specs=specs, reduce_scatter=collectives.reduce_scatter)
    options = {"scatter": scatter} if layout.zero == 2 else {}
    return pipeline.value_and_grad(
        enter,
        stage,
        loss_scale(head),
        schedule,
        "stage",
        remat=layout.remat == "stage",
        moves_blocks=layout.zero == 3,
        all_reduce=collectives.all_reduce,
        **options,
    )


def reduced(grad: Grad, layout: Layout, specs: PyTree, collectives: Collectives) -> Grad:
    """`grad` joined over tensor (where tokens are split) and data, computed in the layout's precision."""
    over_data = _named(collectives, "all_reduce", "reduce_scatter")
    if layout.sequence:
        grad = grads.summed(grad, "tensor", all_reduce=collectives.all_reduce)
    if layout.zero == 3:
        ends = eqx.tree_at(lambda specs: specs.blocks, specs, None)
        grad = zero.unsharded(grad, "data", specs=ends, **_named(collectives, "all_gather", "reduce_scatter"))
    if layout.precision in DTYPES:
        grad = precision.mixed(grad, DTYPES[layout.precision])
    if layout.zero in (1, 2):
        return zero.scattered(grad, "data", specs=specs, **over_data)
    return grads.averaged(grad, "data", all_reduce=collectives.all_reduce)


def _blocks(layout: Layout, specs: PyTree, collectives: Collectives, *, checkpoint: Callable, attend: Callable) -> dict:
    """How the blocks join and what they keep, for `gpt2.loss` and `gpt2.stages`."""
    options = {"all_reduce": collectives.all_reduce, "checkpoint": checkpoint, "attend": attend}
    if layout.remat == "attention":
        options["attend"] = jax.checkpoint(attend)
    if layout.sequence:
        options["joins"] = functools.partial(sequence.joins, **_named(collectives, "all_gather", "reduce_scatter"))
    if layout.zero == 3:
        one_layer = jax.tree.map(lambda spec: P(*spec[1:]), specs, is_leaf=mesh.is_spec)
        gather = functools.partial(
            zero.gathered, specs=one_layer, axis_name="data", **_named(collectives, "all_gather", "reduce_scatter")
        )
        again = remat.gathers if checkpoint is remat.none else checkpoint  # or every layer's weights would be kept
        # Two layers in the loop's body: the second's gather waits for nothing that the first computes.
        options |= {"checkpoint": lambda block: again(gather(block)), "unroll": 2}
    return options


def _named(collectives: Collectives, *names: str) -> dict[str, Callable]:
    return {name: getattr(collectives, name) for name in names}


def loss_step(
    config: gpt2.Config,
    layout: Layout,
    mesh_: Mesh,
    *,
    schedule: Schedule | None = None,
    all_reduce: Callable = ring.all_reduce,
    reduce_scatter: Callable = ring.reduce_scatter,
    all_gather: Callable = ring.all_gather,
    attend: Callable = gpt2.attention,
) -> Callable[[PyTree, Int[Array, "batch window"]], Float[Array, ""]]:
    """The compiled `(model, windows) -> loss` of `train_step`'s model, without dropout, to evaluate with.

    The batch may be of another size than in training; it must divide by data x microbatches. It computes in the parameters'
    own precision, and gathers a model that lives as shares (ZeRO-3) layer by layer too.
    """
    collectives = Collectives(all_reduce, reduce_scatter, all_gather)
    make_model, rule, shared = _model(config, layout, jax.random.key(0), jnp.dtype(jnp.float32))
    shapes = eqx.filter_eval_shape(make_model)
    specs = rules.specs(shapes, shared if layout.zero == 3 else rule, mesh_)
    drop = 0 if layout.stage == 1 else 1
    blocks = jax.tree.map(lambda spec: P(*spec[drop:]), specs.blocks, is_leaf=mesh.is_spec)
    joined = _blocks(layout, blocks, collectives, checkpoint=remat.none, attend=attend)
    if layout.stage == 1:
        loss = functools.partial(gpt2.loss, axis_name="tensor", **joined)
    else:
        table = schedule or layout.table()
        loss = pipeline.value(*gpt2.stages(config, **joined), table, "stage", all_reduce=all_reduce)
    if layout.zero == 3:
        ends = eqx.tree_at(lambda specs: specs.blocks, specs, None)
        loss = zero.gathered(loss, ends, "data", **_named(collectives, "all_gather", "reduce_scatter"))

    def local(model, windows):
        return all_reduce(loss(model, (windows, None)), "data") / jax.lax.axis_size("data")

    return jax.jit(mesh.spmd(local, mesh=mesh_, in_specs=(specs, P("data")), out_specs=P()))


def _model(config: gpt2.Config, layout: Layout, key, dtype) -> tuple[Callable[[], gpt2.GPT2], Callable, Callable]:
    """How the model of a layout is made, its rule, and the rule of what the replicas share (ZeRO)."""
    whole = functools.partial(gpt2.GPT2, config, key=key, dtype=dtype)
    return whole if layout.stage == 1 else lambda: gpt2.chunked(whole(), layout.chunks), *rules_of(layout)


def rules_of(layout: Layout) -> tuple[Callable, Callable]:
    """The rule of a layout's model, and the rule of what the replicas share (ZeRO)."""
    rule = gpt2.rules() if layout.stage == 1 else gpt2.rules(stage="stage")
    if layout.zero == 0:
        return rule, rule
    layers = (0,) if layout.stage == 1 else (0, 1)  # a loop runs over them
    return rule, rules.fsdp("data", size=layout.data, keep={"blocks.**": layers}, inside=rule)


def sequence_keys(key: Key[Array, ""], step: Int[Array, ""], batch: int) -> Key[Array, " batch"]:
    """One random key for each sequence of the global batch at `step`: the same wherever the sequence is computed."""
    fold = functools.partial(jax.random.fold_in, jax.random.fold_in(key, step))
    return jax.vmap(fold)(jnp.arange(batch, dtype=jnp.uint32))


def _check_mesh(layout: Layout, mesh_: Mesh) -> None:
    for name, size in layout.axes.items():
        if mesh_.shape.get(name) != size:
            raise ValueError(
                f"train_step: the layout has {name}={size}, and the mesh {dict(mesh_.shape)}. Make it with "
                f"mesh.make(**layout.axes)."
            )
