"""From a gradient function to a step function, for any model: `(state, batch) -> (state, info)`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from parallax import grads, precision, rules, trees
from parallax._typing import PyTree, Rule, Specs
from parallax.collectives.axis import AxisLike
from parallax.collectives.types import varying_axes
from parallax.grads import Grad
from parallax.grads.axes import axes_of_several_devices
from parallax.grads.norms import check_max_norm
from parallax.grads.results import loss_and_gradients, matching_parameters
from parallax.optimizers.elementwise import checked, with_extra


class State(eqx.Module):
    """All that a step changes, and all that a run needs to go on. A tree of specs has this form
    too.

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
    """What a step measured.

    Attributes:
        loss: of the global batch, in the unit of the gradient function's: a scalar.
        gradient_norm: of all gradients together, before `make` clips them: a scalar.
        skipped: whether one of the two, or a number that the step would have changed in the model
            or the optimizer's state, was not finite, or the loss was above the limit: model and
            optimizer are then as they were. A scalar.
        aux: the auxiliary values of the gradient function, if it has any.
    """

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    skipped: Bool[Array, ""]
    aux: PyTree = None


Step = Callable[..., tuple[State, Info]]  # of a state, a batch and perhaps a limit
AfterUpdate = Callable[[Any, Any], Any]
REDUCING = "grads.averaged, zero.reduce_scattered or ZeRO.grad"


def unchanged(model: PyTree, aux: PyTree) -> PyTree:
    """Returns the model: nothing but gradients changes it."""
    return model


def value_of(info: Info) -> dict[str, Any]:
    """Returns the loss as `value`, which optimizers that look at it take, such as
    `optax.polyak_sgd`."""
    return {"value": info.loss}


def make(
    grad: Grad | precision.ScaledGrad,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    max_norm: float | None = None,
    reduce_norm_over: Sequence[AxisLike] = (),
    after_update: AfterUpdate = unchanged,
    extra_args: Callable[[Any], dict[str, Any]] = value_of,
    specs: Specs | None = None,
) -> Step:
    """Returns the train step of `grad` and `optimizer`; it runs on local blocks inside `mesh.spmd`,
    and as it is on one device.

    A step that would make the loss, the gradient norm, or a finite number of the model or of the
    optimizer's state infinite or NaN changes nothing but the step's number, and its `Info` says so.
    `step(state, batch, limit)`, with a scalar, also skips a step whose loss is above `limit`
    (`run.spikes` gives one). A leaf without a gradient stays as it is.

    Args:
        grad: a gradient function whose gradients are reduced already. That of a scaled loss is a
            `precision.ScaledGrad`: the step adjusts the state's `scale`.
        optimizer: one that acts element by element, since each device updates its own shards, or
            one of `parallax.optimizers`.
        max_norm: scale the gradients down to this global norm, over all shards, where they exceed
            it.
        reduce_norm_over: the axes, with their algorithms, over which the shards' sums of squares
            are added; by default `jax.lax` adds them.
        after_update: `(model, aux) -> model`, after the update, for what no gradient changes, such
            as batch statistics.
        extra_args: the extra arguments of `optimizer.update`, from the step's `Info`.
        specs: of the model. With them it is known which dim of a leaf is split, which an
            optimizer's choice may depend on.

    Raises:
        ValueError: the loss or a gradient varies along an axis along which the model is the same,
            since it was not reduced; a gradient is the same where its parameter differs, or is that
            of a Python number; the auxiliary values differ between devices; the optimizer is not
            right on these shards, or does not fit the gradients
            (`optimizers.elementwise.UnfitOptimizer`); or `after_update` changes the form of the
            model, or a leaf of it that is no array.
    """
    if max_norm is not None:
        check_max_norm("step.make", max_norm)
    by_path = {} if specs is None else trees.by_path(specs)
    update = checked(with_extra(optimizer).update, by_path, at="step.make")

    def step(state, batch, limit=None):
        grad_at_scale = _at_scale(grad, state.scale)
        value, gradients = loss_and_gradients(grad_at_scale, state.model, batch)
        loss, aux = value if isinstance(value, tuple) else (value, None)
        weights = matching_parameters(gradients, state.model)
        _check_reduced(gradients, weights)
        _check_own(loss, state)
        _check_joined(aux)
        # One norm for three uses: it is reported, it clips, and it is not finite if any gradient is
        # not.
        norm = grads.norm(gradients, axes=reduce_norm_over)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        if max_norm is not None:
            gradients = grads.scaled(gradients, norm, max_norm)
        # Sums are wide up to here. The optimizer's state has the types of the parameters.
        gradients = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, weights)
        extra = extra_args(Info(loss, norm, ~finite, aux))
        updates, optimizer_state = update(gradients, state.optimizer, state.model, **extra)
        model = eqx.apply_updates(state.model, updates)
        if after_update is not unchanged:
            model = _same_form(after_update(model, aux), state.model)
        new, old = (model, optimizer_state), (state.model, state.optimizer)
        # A finite gradient can still overflow in the update, such as in a square of Adam's.
        finite &= ~_lost(new, old, norm, reduce_norm_over)
        taken = finite
        if limit is not None:
            taken &= loss <= jnp.asarray(limit).astype(loss.dtype)
        model, optimizer_state = precision.select(taken, new, old)
        count = state.step + 1
        scale = None if state.scale is None else precision.adjusted(state.scale, finite)
        return State(model, optimizer_state, count, scale), Info(loss, norm, ~taken, aux)

    return step


def _at_scale(grad: Grad | precision.ScaledGrad, scale: precision.Scale | None) -> Grad:
    """Returns the gradient function of a step whose state has this loss scale."""
    if not isinstance(grad, precision.ScaledGrad):
        return grad
    return grad.grad_of(None if scale is None else scale.value)


def _lost(
    new: PyTree, old: PyTree, norm: Float[Array, ""], axes: Sequence[AxisLike]
) -> Bool[Array, ""]:
    """Returns whether a number that was finite is not any more, on any device: one scalar, over all
    axes in use.

    A number that never was finite, such as a mask of -inf, may stay so.
    """
    # A leaf that the step returned as it was, such as a frozen one, is the same object and is not
    # read.
    numbers = (
        [leaf for leaf in jax.tree.leaves(tree) if trees.is_inexact(leaf)] for tree in (new, old)
    )
    changed = (
        (a, b) for a, b in zip(*numbers, strict=True) if a is not b
    )  # a frozen leaf is not read
    # As a number, so that `grads.norm` sums it over exactly the axes along which the leaves differ.
    lost = [jnp.any(~jnp.isfinite(a) & jnp.isfinite(b)).astype(norm.dtype) for a, b in changed]
    return grads.norm([sum(lost[1:], start=lost[0])], axes=axes) > 0


def _check_reduced(gradients: PyTree, weights: PyTree) -> None:
    """Refuses gradients that are each device's own, and gradients that were summed over different
    shards."""

    def check(path, gradient, weight):
        # An axis of one device makes no copies, and types may differ along it.
        of_gradient, of_weight = set(varying_axes(gradient)), set(varying_axes(weight))
        local, mixed = (
            axes_of_several_devices(of_gradient - of_weight),
            axes_of_several_devices(of_weight - of_gradient),
        )
        if local and gradient.shape == weight.shape:
            raise ValueError(
                f"step.make needs gradients that are reduced; that of {trees.dotted(path)} differs "
                f"along {local}, where the parameter is the same. Wrap the gradient function in "
                f"{REDUCING}."
            )
        if mixed:
            raise ValueError(
                f"step.make: the parameter {trees.dotted(path)} differs along {mixed}, and its "
                "gradient is the same there, so the gradients of different shards were summed. "
                "Reduce it along the axes alone along which the parameter is the same, as "
                "grads.averaged and grads.summed do."
            )

    jax.tree.map_with_path(check, gradients, weights)


def _check_own(loss: Array, state: State) -> None:
    """Refuses a loss that is each device's own, where something of the state is the same on all of
    them."""
    leaves = jax.tree.leaves(eqx.filter((state.model, state.optimizer), trees.is_array))
    # Where every leaf of the state differs along an axis, as on islands, so may the loss.
    split = [varying_axes(leaf) for leaf in leaves]
    local = [
        name
        for name in axes_of_several_devices(varying_axes(loss))
        if any(name not in axes for axes in split)
    ]
    if local:
        raise ValueError(
            f"step.make: the loss differs along {local}, so it is that of one device's rows, and "
            f"the model is the same there. Wrap the gradient function in {REDUCING} over that axis."
        )


def _check_joined(aux: PyTree) -> None:
    """Refuses auxiliary values that differ between devices."""
    for path, leaf in jax.tree.leaves_with_path(eqx.filter(aux, trees.is_array)):
        if local := axes_of_several_devices(varying_axes(leaf)):
            raise ValueError(
                f"step.make: the auxiliary value {trees.dotted(path) or 'itself'} differs along "
                f"{local}, and Info is the same on all devices. Join it: grads.averaged(grad, "
                "axis, aux=...) takes a function of the values and the axis."
            )


def _same_form(model: PyTree, before: PyTree) -> PyTree:
    """Returns `model`, which `after_update` returned: refused where a leaf is of another form than
    before."""
    new, old = (dict(jax.tree.leaves_with_path(tree)) for tree in (model, before))
    if jax.tree.structure(model) != jax.tree.structure(before):
        gone = [f"{trees.dotted(path)} is gone" for path in old if path not in new]
        apart = gone + [f"{trees.dotted(path)} is new" for path in new if path not in old]
        raise ValueError(
            "step.make: after_update must return a model of the structure that it takes, as "
            "eqx.tree_at does; of what it returned "
            f"{', '.join(apart[:3]) or 'the static fields or the containers differ'}."
        )
    for path, leaf in old.items():
        _check_form(trees.dotted(path) or "the model", new[path], leaf)
    return model


def _check_form(path: str, new: Any, old: Any) -> None:
    if trees.is_array(new) != trees.is_array(old) or (
        not trees.is_array(old) and not (new is old or new == old)
    ):

        def shown(leaf):
            return f"{leaf.dtype}{list(leaf.shape)}" if trees.is_array(leaf) else repr(leaf)

        raise ValueError(
            f"step.make: after_update must keep {path}, which is {shown(old)}; it returned "
            f"{shown(new)}. A leaf that is no array is static: it is part of the program, and no "
            "step changes it. Make it an array in the model, so that it can change."
        )

    def form(x):
        return jnp.shape(x), jnp.dtype(x.dtype), varying_axes(x)

    if trees.is_array(old) and form(new) != form(old):
        raise ValueError(
            f"step.make: after_update must keep the form of {path}, (shape, type, axes along which "
            f"it differs) = {form(old)}; it returned {form(new)}. Take means over the axes first: "
            "aux=... of grads.averaged does."
        )


def init(
    make_model: Callable[[], PyTree],
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    rule: Rule,
    mesh: Mesh,
    *,
    optimizer_rule: Rule | None = None,
    scale: precision.Scale | None = None,
    trainable: PyTree = trees.is_inexact,
    batch_axes: Sequence[str] = (),
) -> tuple[State, State]:
    """Returns a fresh `State`, made in its place under `jit`: no device ever holds the whole. Also
    its specs.

    Args:
        make_model: makes the model from nothing: a function of no arguments, such as
            `functools.partial(gpt2.GPT2, config, key=key)`. Its arrays, NumPy's too, go to the
            devices; other leaves (functions, Python numbers, None) stay as they are.
        rule: the sharding rule of the model, for `rules.specs`.
        optimizer_rule: the rule that the optimizer's state follows, where it is split further
            (ZeRO-1); by default `rule`.
        scale: the first loss scale, for a `precision.ScaledGrad`.
        trainable: which leaves the optimizer has state for: a function of a leaf (an array or its
            shape), or a tree of truth values, a prefix of the model. The gradient function gives
            None for the others.
        batch_axes: the mesh axes that split the batch, for `rules.specs`.

    Raises:
        ValueError: as `rules.specs` and `rules.optimizer_specs` do, of the model and of the
            optimizer's state.
    """
    plan = planned(
        make_model,
        optimizer,
        rule,
        mesh,
        optimizer_rule=optimizer_rule,
        scale=scale,
        trainable=trainable,
        batch_axes=batch_axes,
    )
    return plan.init(), plan.specs


class Planned(NamedTuple):
    """A state that can be made.

    Attributes:
        init: makes it, in its place; `init(model)` makes it of the arrays of that model, which is
            whole.
        shapes: its `jax.ShapeDtypeStruct`s, with their shardings; leaves that are no arrays are
            those of the state.
        specs: the spec of each array.
    """

    init: Callable[..., State]
    shapes: State
    specs: State


def planned(
    make_model: Callable[[], PyTree],
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    rule: Rule,
    mesh: trees.AnyMesh,
    *,
    optimizer_rule: Rule | None = None,
    scale: precision.Scale | None = None,
    trainable: PyTree = trees.is_inexact,
    batch_axes: Sequence[str] = (),
) -> Planned:
    """Returns the shapes of the state that `init` makes, before it is made; arguments and errors as
    there. Nothing is computed."""
    statics = []

    def make_arrays():
        arrays, static = eqx.partition(make_model(), trees.is_array)
        # Static leaves cannot leave `jax.eval_shape` as results, so they leave by a list.
        statics.append(static)
        return jax.tree.map(jnp.asarray, arrays)

    def trained(model):
        return eqx.filter(eqx.filter(model, trainable), trees.is_inexact)

    def state_of(model):
        return State(model, optimizer.init(trained(model)), jnp.zeros((), jnp.int32), scale)

    def state_and_trained():
        # `trainable` may ask whether a leaf is an array, which a shape is not.
        model = make_arrays()
        return state_of(model), trained(model)

    state, trained_leaves = jax.eval_shape(state_and_trained)
    model_specs = rules.specs(state.model, rule, mesh, batch_axes=batch_axes)
    owner_specs = model_specs
    if optimizer_rule is not None:
        owner_specs = rules.specs(state.model, optimizer_rule, mesh, batch_axes=batch_axes)
    optimizer_specs = rules.optimizer_specs(optimizer, trained_leaves, owner_specs, mesh)
    specs = State(model_specs, optimizer_specs, P(), jax.tree.map(lambda _: P(), scale))
    shapes = jax.tree.map(_placed_shape, state, trees.shardings(specs, mesh))
    make_in_place = _in_place(lambda: state_of(make_arrays()), state_of, shapes)

    def with_static(state):
        return dataclasses.replace(state, model=eqx.combine(state.model, statics[0]))

    def init(given=None):
        return with_static(make_in_place(given))

    return Planned(init, with_static(shapes), specs)


def _in_place(
    make: Callable[[], State], begin: Callable[[PyTree], State], shapes: State
) -> Callable[..., State]:
    """Returns `make()`, or `begin(model)` of a given model, compiled to make a state where its
    `shapes` live."""
    # As leaves: a model whose static fields are functions made anew by each `make_model()` has
    # another structure each time.
    leaves, structure = jax.tree.flatten(shapes)
    places = [leaf.sharding for leaf in leaves]
    # Under `jit` each device makes its own shards, so no device holds a whole array.
    compiled_make = jax.jit(lambda: jax.tree.leaves(make()), out_shardings=places)
    compiled_begin = jax.jit(
        lambda model: jax.tree.leaves(begin(model)), out_shardings=places, donate_argnums=0
    )

    def in_place(given):
        if given is None:
            return jax.tree.unflatten(structure, compiled_make())
        return jax.tree.unflatten(structure, compiled_begin(_placed_as(given, shapes.model)))

    return in_place


def _placed_shape(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _placed_as(given: PyTree, shapes: PyTree) -> PyTree:
    """Returns the arrays of `given`, in the places of `shapes`. Each process has them all. Raises
    `ValueError` for others."""
    arrays = [leaf for leaf in jax.tree.leaves(given) if trees.is_array(leaf)]
    needed = jax.tree.leaves_with_path(shapes)
    if len(arrays) != len(needed):
        raise ValueError(
            f"init: the model has {len(arrays)} arrays; needed {len(needed)}. Give the model that "
            "was prepared."
        )
    placed = []
    for leaf, (path, like) in zip(arrays, needed, strict=True):
        if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"init: {trees.dotted(path)} must be of shape {like.shape} and {like.dtype}; it is "
                f"{leaf.shape} and {leaf.dtype}. Prepare for the configuration and the dtype of "
                "this model."
            )
        # A random key has no NumPy array to be cut into shards.
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # keys, which NumPy does not have
            placed.append(jax.device_put(leaf, like.sharding))
        else:
            # Each device is handed its shard of the host's array: nothing whole is placed first.
            host = np.asarray(leaf)
            placed.append(jax.make_array_from_callback(like.shape, like.sharding, host.__getitem__))
    return jax.tree.unflatten(jax.tree.structure(shapes), placed)
