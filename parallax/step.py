"""From a grad arrow to a train step, and the recipe that composes the axes for GPT-2.

A step is `(state, batch) -> (state, info)`. The recipe is short on purpose: copy it, and change a line.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Key, PyTree

from parallax import grads, mesh, pipeline, rules
from parallax.collectives import ring
from parallax.grads import Grad
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.schedule import Schedule, one_f_one_b


class State(eqx.Module):
    """All that a step changes, and all that a run needs to go on: the model, the optimizer's state, the step's number."""

    model: PyTree
    optimizer: PyTree
    step: PyTree  # an int32 scalar; in a tree of specs, its spec


class Info(NamedTuple):
    """What a step measured: the mean loss, and the global norm of the gradients before any clipping by `make`."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]


def make(
    grad: Grad, optimizer: optax.GradientTransformation, *, max_norm: float | None = None, all_reduce: Callable = jax.lax.psum
) -> Callable[[State, PyTree], tuple[State, Info]]:
    """The train step of `grad` and `optimizer`; it runs on local blocks inside `mesh.spmd`, and as it is on one device.

    Args:
        grad: a grad arrow whose gradients are reduced already.
        optimizer: any that acts leaf by leaf, since each device updates its own shards.
        max_norm: scale the gradients down to this global norm, over all shards, where they exceed it.
        all_reduce: joins the shards' sums of squares, one scalar for each set of axes in use.
    """

    def step(state, batch):
        loss, gradients = grad(state.model, batch)
        norm = grads.norm(gradients, all_reduce=all_reduce)
        gradients = gradients if max_norm is None else grads.scaled(gradients, norm, max_norm)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, eqx.filter(state.model, eqx.is_inexact_array))
        return State(eqx.apply_updates(state.model, updates), optimizer_state, state.step + 1), Info(loss, norm)

    return step


def init(
    make_model: Callable[[], PyTree], optimizer: optax.GradientTransformation, rule: Callable, mesh_: Mesh
) -> tuple[State, State]:
    """A fresh `State`, made in its place under `jit`: no device ever holds the whole. Also its specs.

    Args:
        make_model: makes the model, of arrays and static fields, from nothing: a function of no arguments, such as
            `functools.partial(gpt2.GPT2, config, key=key)`.
        rule: the sharding rule of the model, for `rules.specs`; the optimizer's state follows it.
    """

    def make_state():
        model = make_model()
        return State(model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), jnp.zeros((), jnp.int32))

    shapes = eqx.filter_eval_shape(make_model)
    model_specs = rules.specs(shapes, rule, mesh_)
    specs = State(model_specs, rules.optimizer_specs(optimizer, shapes, model_specs), P())
    return jax.jit(make_state, out_shardings=mesh.shardings(specs, mesh_))(), specs


def train_step(
    config: gpt2.Config,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    mesh_: Mesh,
    *,
    batch: int,
    schedule: Schedule | None = None,
    remat: bool = False,
    all_reduce: Callable = ring.all_reduce,
    max_norm: float | None = None,
    checkpoint: Callable = lambda block: block,
    attend: Callable = gpt2.attention,
    dtype: jnp.dtype = jnp.float32,
    key: Key[Array, ""],
) -> tuple[State, Callable[[State, Int[Array, "batch window"]], tuple[State, Info]]]:
    """GPT-2 over data x stage x tensor: the state, and the compiled step `(state, windows) -> (state, info)`.

    The step donates the state. `windows` is the global batch, [batch, T + 1] tokens, placed or not. The weights and the
    dropout masks come from `key` and from logical positions, so every layout computes the same run.

    Args:
        config: the model's sizes.
        optimizer: any that acts leaf by leaf.
        layout: the sizes of the axes; with stages, the model in the state is `gpt2.chunked`.
        mesh_: its mesh, as `mesh.make(**layout.axes)` makes it.
        batch: sequences in the global batch.
        schedule: the pipeline's; `one_f_one_b` by default.
        remat: whether pipeline stages keep their inputs alone.
        all_reduce: the collective, for every axis.
        max_norm: clip the gradients to this global norm.
        checkpoint: what becomes of each block, such as `jax.checkpoint`.
        attend: the attention function.
        dtype: of the weights.
        key: the seed of the run.

    Raises:
        ValueError: the layout does not divide the model or the batch, or is not the mesh's.
    """
    layout.check(layers=config.layers, heads=config.heads, hidden=4 * config.width, rows=config.rows, batch=batch)
    _check_mesh(layout, mesh_)
    weights_key, dropout_key = jax.random.split(key)
    if layout.stage == 1:
        loss = functools.partial(gpt2.loss, axis_name="tensor", all_reduce=all_reduce, checkpoint=checkpoint, attend=attend)
        grad = grads.accumulated(jax.value_and_grad(loss), microbatches=layout.microbatches)
    else:
        parts = gpt2.stages(config, all_reduce=all_reduce, checkpoint=checkpoint, attend=attend)
        table = schedule or one_f_one_b(layout.stage, layout.microbatches, layout.chunks)
        grad = pipeline.value_and_grad(*parts, table, "stage", remat=remat, all_reduce=all_reduce)
    grad = grads.averaged(grad, "data", all_reduce=all_reduce)

    make_model, rule = _model(config, layout, weights_key, dtype)
    state, specs = init(make_model, optimizer, rule, mesh_)
    local = make(grad, optimizer, max_norm=max_norm, all_reduce=all_reduce)
    step = mesh.spmd(local, mesh=mesh_, in_specs=(specs, P("data")), out_specs=(specs, P()))
    drops = config.dropout > 0 or config.attention_dropout > 0

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, windows):
        return step(state, (windows, sequence_keys(dropout_key, state.step, batch) if drops else None))

    return state, train


def loss_step(
    config: gpt2.Config,
    layout: Layout,
    mesh_: Mesh,
    *,
    schedule: Schedule | None = None,
    all_reduce: Callable = ring.all_reduce,
    attend: Callable = gpt2.attention,
) -> Callable[[PyTree, Int[Array, "batch window"]], Float[Array, ""]]:
    """The compiled `(model, windows) -> loss` of `train_step`'s model, without dropout, to evaluate with.

    The batch may be of another size than in training; it must divide by data x microbatches.
    """
    if layout.stage == 1:
        loss = functools.partial(gpt2.loss, axis_name="tensor", all_reduce=all_reduce, attend=attend)
    else:
        parts = gpt2.stages(config, all_reduce=all_reduce, attend=attend)
        table = schedule or one_f_one_b(layout.stage, layout.microbatches, layout.chunks)
        loss = pipeline.value(*parts, table, "stage", all_reduce=all_reduce)

    def local(model, windows):
        return all_reduce(loss(model, (windows, None)), "data") / jax.lax.axis_size("data")

    make_model, rule = _model(config, layout, jax.random.key(0), jnp.dtype(jnp.float32))
    specs = rules.specs(eqx.filter_eval_shape(make_model), rule, mesh_)
    return jax.jit(mesh.spmd(local, mesh=mesh_, in_specs=(specs, P("data")), out_specs=P()))


def _model(config: gpt2.Config, layout: Layout, key, dtype) -> tuple[Callable[[], gpt2.GPT2], Callable]:
    """How the model of a layout is made, and its rule."""
    whole = functools.partial(gpt2.GPT2, config, key=key, dtype=dtype)
    if layout.stage == 1:
        return whole, gpt2.rules()
    return lambda: gpt2.chunked(whole(), layout.chunks), gpt2.rules(stage="stage")


def sequence_keys(key: Key[Array, ""], step: Int[Array, ""], batch: int) -> Key[Array, " batch"]:
    """One random key for each sequence of the global batch at `step`: the same wherever the sequence is computed."""
    fold = functools.partial(jax.random.fold_in, jax.random.fold_in(key, step))
    return jax.vmap(fold)(jnp.arange(batch, dtype=jnp.uint32))


def _check_mesh(layout: Layout, mesh_: Mesh) -> None:
    for name, size in layout.axes.items():
        if mesh_.shape.get(name, 1) != size:
            raise ValueError(
                f"train_step: the layout has {name}={size}, and the mesh {dict(mesh_.shape)}. Make it with "
                f"mesh.make(**layout.axes)."
            )
