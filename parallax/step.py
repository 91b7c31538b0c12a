"""From a grad arrow to a train step, for any model: `(state, batch) -> (state, info)`."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from parallax import grads, mesh, precision, rules
from parallax.collectives import AxisLike
from parallax.collectives.types import varying_axes
from parallax.grads import Grad
from parallax.rules import Rule
from parallax.typed import PyTree


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
    grad: Grad, optimizer: optax.GradientTransformation, *, max_norm: float | None = None, axes: Sequence[AxisLike] = ()
) -> Step:
    """The train step of `grad` and `optimizer`; it runs on local blocks inside `mesh.spmd`, and as it is on one device.

    A step whose loss or gradient norm is not finite changes nothing but the step's number, and says so in its `Info`.

    Args:
        grad: a grad arrow whose gradients are reduced already.
        optimizer: any that acts leaf by leaf, since each device updates its own shards.
        max_norm: scale the gradients down to this global norm, over all shards, where they exceed it.
        axes: who joins the shards' sums of squares, one scalar for each set of axes in use; by default `jax.lax`.

    Raises:
        ValueError: a gradient varies along an axis along which its parameter is the same: it was not reduced.
    """
    return make_scaled(lambda _: grad, optimizer, max_norm=max_norm, axes=axes)


def make_scaled(
    grad_of: Callable[[Any], Grad],
    optimizer: optax.GradientTransformation,
    *,
    max_norm: float | None = None,
    axes: Sequence[AxisLike] = (),
) -> Step:
    """`make` of a grad arrow that depends on the loss scale, as float16 needs: `grad_of(scale)`, its gradients unscaled.

    The state's `scale`, a `precision.Scale`, follows what becomes of the steps (`precision.adjusted`). Where the state has
    none, `grad_of` is given None. Arguments and errors are otherwise those of `make`.
    """

    def step(state, batch):
        weights = eqx.filter(state.model, eqx.is_inexact_array)
        loss, gradients = grad_of(None if state.scale is None else state.scale.value)(state.model, batch)
        _check_reduced(gradients, weights)
        norm = grads.norm(gradients, axes=axes)
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
    rule: Rule,
    mesh_: Mesh,
    *,
    optimizer_rule: Rule | None = None,
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
    rule: Rule,
    mesh_: Mesh,
    *,
    optimizer_rule: Rule | None = None,
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
