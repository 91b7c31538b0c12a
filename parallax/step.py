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

from parallax import grads, mesh, rules
from parallax.collectives import ring
from parallax.grads import Grad
from parallax.layout import Layout
from parallax.models import gpt2


class State(eqx.Module):
    """All that a step changes, and all that a run needs to go on: the model, the optimizer's state, the step's number."""

    model: PyTree
    optimizer: PyTree
    step: Int[Array, ""]


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
    all_reduce: Callable = ring.all_reduce,
    max_norm: float | None = None,
    checkpoint: Callable = lambda block: block,
    attend: Callable = jax.nn.dot_product_attention,
    dtype: jnp.dtype = jnp.float32,
    key: Key[Array, ""],
) -> tuple[State, Callable[[Int[Array, "batch window"], State], tuple[State, Info]]]:
    """GPT-2 over data x tensor: the state, and the compiled step `(windows, state) -> (state, info)`, which donates the state.

    `windows` is the global batch, [batch, T + 1] tokens, placed or not. The weights and the dropout masks come from `key`
    and from logical positions, so that every layout computes the same run.

    Raises:
        ValueError: the layout does not divide the model or the batch, or is not the mesh's.
    """
    layout.check(heads=config.heads, rows=config.rows, hidden=4 * config.width, batch=batch)
    weights_key, dropout_key = jax.random.split(key)
    state, specs = init(functools.partial(gpt2.GPT2, config, key=weights_key, dtype=dtype), optimizer, gpt2.rules(), mesh_)

    loss = functools.partial(gpt2.loss, axis_name="tensor", all_reduce=all_reduce, checkpoint=checkpoint, attend=attend)
    grad = grads.accumulated(jax.value_and_grad(loss), microbatches=layout.microbatches)
    grad = grads.averaged(grad, "data", all_reduce=all_reduce)
    local = make(grad, optimizer, max_norm=max_norm, all_reduce=all_reduce)
    step = mesh.spmd(local, mesh=mesh_, in_specs=(specs, P("data")), out_specs=(specs, P()))

    @functools.partial(jax.jit, donate_argnums=1)
    def train(windows, state):
        return step(state, (windows, sequence_keys(dropout_key, state.step, batch) if _drops(config) else None))

    return state, train


def sequence_keys(key: Key[Array, ""], step: Int[Array, ""], batch: int) -> Key[Array, " batch"]:
    """One random key for each sequence of the global batch at `step`: the same wherever the sequence is computed."""
    fold = functools.partial(jax.random.fold_in, jax.random.fold_in(key, step))
    return jax.vmap(fold)(jnp.arange(batch, dtype=jnp.uint32))


def _drops(config: gpt2.Config) -> bool:
    return config.dropout > 0 or config.attention_dropout > 0
