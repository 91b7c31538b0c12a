"""Makes a train step, `(state, batch) -> (state, info)`, from a gradient function, for any model.

An array varies along a mesh axis if the array's type says that it may differ between the devices of
the axis; otherwise the array is the same on all devices of the axis. A parameter that varies is a
shard. `checked` refuses an optimizer whose updates would be wrong on shards. Auxiliary values,
`aux`, are a tree of values to log or to use in `after_update`. The loss scale (`precision.Scale`)
is a factor that keeps gradients of 16 bits in range.
"""

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
    """The state that a step changes, from which a run can continue. The specs of a state are
    another `State`, which has a spec in place of each array.

    Attributes:
        model: a tree with the parameters, and perhaps with leaves of other kinds.
        optimizer: the state of the optimizer.
        step: the number of steps, skipped ones included, as an int32 scalar.
        scale: a `precision.Scale` if the loss is scaled, else None.
    """

    model: PyTree
    optimizer: PyTree
    step: PyTree
    scale: PyTree = None


class Info(NamedTuple):
    """The measurements of a step.

    Attributes:
        loss: the loss of the global batch, a scalar, as the gradient function returned it.
        gradient_norm: the norm of all gradients together, a scalar, before the step clips the
            gradients.
        skipped: whether the step left the model and the optimizer's state unchanged, a scalar. A
            step is skipped if the loss or the norm is not finite, or if the update would turn a
            finite number into infinity or NaN. A step that gets the argument `limit` is also
            skipped if the loss is above `limit`.
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
    """Returns the model as it is. `make` uses this function as `after_update` by default."""
    return model


def value_of(info: Info) -> dict[str, Any]:
    """Returns `{"value": loss}`, the extra argument of some optimizers, such as
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
    """Returns the train step of `grad` and `optimizer`. Inside `mesh.spmd` the step runs on each
    device's blocks of the arrays; on one device the step runs without `mesh.spmd`.

    A step is skipped if the loss or the gradient norm is infinite or NaN. A step is also skipped if
    the update would turn a finite number in the model or in the optimizer's state into infinity or
    NaN. A skipped step changes only the number of the step (and the loss scale), and its `Info` has
    `skipped` set. `step(state, batch, limit)` also skips a step whose loss is above `limit`, a
    scalar (`run.spikes` computes such a limit). A leaf without a gradient stays unchanged. The
    model and the optimizer's state keep their dtypes: the sum of a weight and a wider update is
    rounded, as in `optax.apply_updates`.

    Args:
        grad: a gradient function whose gradients are already reduced. For a scaled loss it is a
            `precision.ScaledGrad`, and the step adjusts the state's `scale`.
        optimizer: an optimizer of `parallax.optimizers`, or one that acts element by element, since
            each device updates only its shards.
        max_norm: the largest global norm of the gradients, over all shards; larger gradients are
            scaled down to this norm.
        reduce_norm_over: axes with an algorithm, such as `ring("data")`. For the norm, the shards'
            sums of squares are added over these axes by this algorithm, and over all other axes by
            `lax.psum`.
        after_update: `(model, aux) -> model`, run after the update to set arrays that no gradient
            changes, such as batch statistics.
        extra_args: makes the extra arguments of `optimizer.update` from the step's `Info`. By
            default the extra argument `value` is the loss; an optimizer without extra arguments
            ignores it.
        specs: the specs of the model, which say which dim of a leaf is split. An optimizer may be
            right on shards of one dim and wrong on shards of another.

    Raises:
        ValueError: in each of these cases. The loss or a gradient was not reduced over an axis
            whose devices have the same model. A gradient was reduced over an axis that shards its
            parameter. A Python number has a gradient. The auxiliary values differ between devices.
            The optimizer would be wrong on these shards, or does not fit the gradients
            (`optimizers.elementwise.UnfitOptimizer`). `after_update` changes the form of the model,
            or a leaf that is not an array.
    """
    if max_norm is not None:
        check_max_norm("step.make", max_norm)
    by_path = {} if specs is None else trees.by_path(specs)
    update = checked(with_extra(optimizer).update, by_path, at="step.make")

    def step(state, batch, limit=None):
        """Returns the state after one step on this device's rows of the batch, and the step's
        `Info`."""
        grad_at_scale = _at_scale(grad, state.scale)
        # `value` is the loss, or `(loss, aux)`.
        value, gradients = loss_and_gradients(grad_at_scale, state.model, batch)
        loss, aux = value if isinstance(value, tuple) else (value, None)
        # The parameters that have a gradient.
        weights = matching_parameters(gradients, state.model)
        _check_reduced(gradients, weights)
        _check_own(loss, state)  # refuses a loss of only this device's rows
        _check_joined(aux)
        # The norm has three uses: it is reported, it clips, and it shows whether all gradients are
        # finite.
        norm = grads.norm(gradients, axes=reduce_norm_over)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        if max_norm is not None:
            gradients = grads.scaled(gradients, norm, max_norm)
        # Gradients may have a wider dtype than their parameters, since they are summed in float32
        # or wider. The optimizer's state has the dtypes of the parameters, so the gradients are
        # cast to these.
        gradients = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, weights)
        # This `skipped` is not final: the update may overflow, or the loss be above the limit.
        extra = extra_args(Info(loss, norm, skipped=~finite, aux=aux))
        updates, optimizer_state = update(gradients, state.optimizer, state.model, **extra)
        model = _in_dtypes_of(state.model, eqx.apply_updates(state.model, updates))
        optimizer_state = _in_dtypes_of(state.optimizer, optimizer_state)
        # The default, `unchanged`, needs no check.
        if after_update is not unchanged:
            model = _same_form(after_update(model, aux), state.model)
        new, old = (model, optimizer_state), (state.model, state.optimizer)
        # The update of finite gradients can still overflow, such as in Adam's squares. `_lost`
        # counts in the dtype of `norm`, and adds up the devices' counts as for the norm.
        finite &= ~_lost(new, old, norm, reduce_norm_over)
        taken = finite  # whether the model and the optimizer's state change
        if limit is not None:
            # In float32 or wider, as `run.spikes` compares on the host. Both are cast, since under
            # strict promotion JAX refuses to compare two dtypes.
            wide = precision.accumulation_dtype(loss.dtype)
            taken &= loss.astype(wide) <= jnp.asarray(limit).astype(wide)
        model, optimizer_state = precision.select(taken, new, old)
        count = state.step + 1
        # Only an overflow lowers the scale of the loss, not a loss above the limit.
        scale = None if state.scale is None else precision.adjusted(state.scale, finite)
        return State(model, optimizer_state, count, scale), Info(loss, norm, ~taken, aux)

    return step


def _in_dtypes_of(old: PyTree, new: PyTree) -> PyTree:
    """Returns the tree `new`, with each array of floats cast to the dtype of its leaf in `old`."""

    def cast(old, new):
        # Most leaves have the dtype already, and stay the same object (see `_lost`).
        is_other = trees.is_inexact(old) and trees.is_array(new) and new.dtype != old.dtype
        return new.astype(old.dtype) if is_other else new

    return jax.tree.map(cast, old, new)


def _at_scale(grad: Grad | precision.ScaledGrad, scale: precision.Scale | None) -> Grad:
    """Returns the gradient function for a step; `scale` is the loss scale in the step's state, or
    None if the loss is not scaled. Only a `precision.ScaledGrad` uses the scale; any other `grad`
    is returned as it is."""
    if not isinstance(grad, precision.ScaledGrad):
        return grad
    return grad.grad_of(None if scale is None else scale.value)


def _lost(
    new: PyTree, old: PyTree, norm: Float[Array, ""], axes: Sequence[AxisLike]
) -> Bool[Array, ""]:
    """Returns whether any number is finite in `old` and not in `new`, on any device: one scalar,
    the same on all devices.

    A number that was already not finite in `old`, such as in a mask of -inf, does not count. `norm`
    is used only for its dtype, in which each device counts the leaves with a number that became
    infinite or NaN. The devices' counts are added as in `grads.norm`: along the axes in `axes` by
    the algorithms of these axes, and along all other axes by `lax.psum`.
    """
    # The floating-point leaves of each tree.
    numbers = (
        [leaf for leaf in jax.tree.leaves(tree) if trees.is_inexact(leaf)] for tree in (new, old)
    )
    # A leaf that the step did not change, such as a frozen one, is the same object: it is skipped.
    changed = ((a, b) for a, b in zip(*numbers, strict=True) if a is not b)
    # Each leaf gives 0 or 1, as a float, and these are added up to one number per device.
    # `grads.norm` sums the square of this number over exactly the axes along which it varies: the
    # result is above 0 if any device has lost a number.
    lost = [jnp.any(~jnp.isfinite(a) & jnp.isfinite(b)).astype(norm.dtype) for a, b in changed]
    if not lost:  # the optimizer gave no leaf an update
        return jnp.asarray(False)
    return grads.norm([sum(lost[1:], start=lost[0])], axes=axes) > 0


def _check_reduced(gradients: PyTree, weights: PyTree) -> None:
    """Raises `ValueError` if a gradient was not reduced, or was summed over the shards of its
    parameter."""

    def check(path, gradient, weight):
        """Raises `ValueError` if only one of the two varies along some axis: the gradient or its
        parameter. A share of a gradient (ZeRO) may vary where the parameter does not.
        """
        # `local` are axes along which only the gradient differs: the gradient was not reduced
        # there. `mixed` are axes along which only the parameter differs: the parameter is sharded
        # there. Axes of one device do not count: types may differ there, and nothing is wrong.
        of_gradient, of_weight = set(varying_axes(gradient)), set(varying_axes(weight))
        local, mixed = (
            axes_of_several_devices(of_gradient - of_weight),
            axes_of_several_devices(of_weight - of_gradient),
        )
        # Under ZeRO a gradient is one device's share of the whole gradient. The gradient's shape is
        # then not that of the parameter, and the gradient may differ where the parameter is the
        # same.
        if local and gradient.shape == weight.shape:
            raise ValueError(
                f"step.make needs gradients that are reduced; the gradient of {trees.dotted(path)} "
                f"differs along {local}, where the parameter is the same. Wrap the gradient "
                f"function in {REDUCING}."
            )
        if mixed:
            raise ValueError(
                f"step.make: the parameter {trees.dotted(path)} differs along {mixed}, and its "
                "gradient is the same there, so the gradients of different shards were summed. "
                "Reduce the gradient only along the axes along which the parameter is the same, as "
                "grads.averaged and grads.summed do."
            )

    jax.tree.map_with_path(check, gradients, weights)


def _check_own(loss: Array, state: State) -> None:
    """Raises `ValueError` if the loss varies along an axis, and some leaf of the state is the same
    on all devices of that axis."""
    # The leaves of the model may all vary because they are shards of one model, or because each
    # device trains a model of its own. The state's step number is no shard: only if it varies too,
    # each device has its own model, and the loss may vary.
    leaves = jax.tree.leaves(eqx.filter(state, trees.is_array))
    split = [varying_axes(leaf) for leaf in leaves]
    local = [
        name
        for name in axes_of_several_devices(varying_axes(loss))
        if any(name not in axes for axes in split)
    ]
    if local:
        raise ValueError(
            "step.make needs the loss of the global batch, since the devices train one model; the "
            f"loss differs along {local}, so each device has the loss of only its own rows. Wrap "
            f"the gradient function in {REDUCING} over that axis."
        )


def _check_joined(aux: PyTree) -> None:
    """Raises `ValueError` if an auxiliary value varies along an axis of several devices."""
    for path, leaf in jax.tree.leaves_with_path(eqx.filter(aux, trees.is_array)):
        if local := axes_of_several_devices(varying_axes(leaf)):
            raise ValueError(
                f"step.make: the auxiliary value {trees.dotted(path) or 'itself'} differs along "
                f"{local}, but every value of Info must be the same on all devices. Average or sum "
                "it over the devices, in a function f(values, axis) that you pass as "
                "grads.averaged(grad, axis, aux=f)."
            )


def _same_form(model: PyTree, before: PyTree) -> PyTree:
    """Returns `model`, the result of `after_update`. Raises `ValueError` if the structure of
    `model`, or the shape, dtype or varying axes of a leaf, differ from those of the model
    `before`."""
    new, old = (dict(jax.tree.leaves_with_path(tree)) for tree in (model, before))
    if jax.tree.structure(model) != jax.tree.structure(before):
        gone = [f"{trees.dotted(path)} is gone" for path in old if path not in new]
        differences = gone + [f"{trees.dotted(path)} is new" for path in new if path not in old]
        raise ValueError(
            "step.make: after_update must return a model of the structure that it takes, as "
            "eqx.tree_at does; in the returned model "
            f"{', '.join(differences[:3]) or 'the static fields or the containers differ'}."
        )
    for path, leaf in old.items():
        _check_form(trees.dotted(path) or "the model", new[path], leaf)
    return model


def _check_form(path: str, new: Any, old: Any) -> None:
    """Raises `ValueError` if the shape, the dtype or the varying axes of the leaf `new` are not
    those of the leaf `old`. A leaf that is not an array must be the same object, or equal."""
    # `is` comes first, since some values, such as NaN, do not equal themselves.
    if trees.is_array(new) != trees.is_array(old) or (
        not trees.is_array(old) and not (new is old or new == old)
    ):

        def shown(leaf):
            return f"{leaf.dtype}{list(leaf.shape)}" if trees.is_array(leaf) else repr(leaf)

        raise ValueError(
            f"step.make: after_update must return {path} as {shown(old)}; it returned "
            f"{shown(new)}. A leaf that is not an array is a constant of the compiled step, so no "
            "step can change the leaf. Make the leaf an array in the model."
        )

    def form(x):
        return jnp.shape(x), x.dtype, varying_axes(x)

    if trees.is_array(old) and form(new) != form(old):
        raise ValueError(
            f"step.make: after_update must keep three things of {path}: the shape, the dtype, and "
            f"the axes along which the devices' values differ. It got {form(old)} and "
            f"returned {form(new)}. If the axes differ, average the array over the new axes, as "
            "grads.averaged does with auxiliary values."
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
    """Returns a new `State` and its specs. Each device makes only its own shards, under `jit`, so
    no device holds all of an array that is split.

    Args:
        make_model: a function without arguments that makes the model, such as
            `functools.partial(gpt2.GPT2, config, key=key)`. The model's arrays, NumPy arrays
            included, go to the devices; other leaves (functions, Python numbers, None) stay as they
            are.
        optimizer: the optimizer that `make` gets.
        rule: the sharding rule of the model, for `rules.specs`.
        mesh: the mesh of the devices.
        optimizer_rule: the rule of the optimizer's state, if it is split further (ZeRO-1); by
            default `rule`.
        scale: the first loss scale, for a `precision.ScaledGrad`.
        trainable: chooses the leaves for which the optimizer has state. It is a function of a leaf
            (a traced array), or a tree of booleans that is a prefix of the model. For all other
            leaves the gradient function must give None.
        batch_axes: the mesh axes that split the batch. Only `rules.fsdp` and `rules.experts` may
            split a parameter over these axes; `rules.specs` refuses any other rule that splits a
            parameter over them.

    Raises:
        ValueError: as `rules.specs` does for the model, and `rules.optimizer_specs` for the
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
    """A state that is planned but not made yet.

    Attributes:
        init: a function that makes the state, each shard on its device. `init()` makes a new model.
            `init(model)` takes the arrays of `model` instead, which must be whole (not shards).
        shapes: the state, in which a `jax.ShapeDtypeStruct` with a sharding stands for each array.
        specs: the state, in which a spec stands for each array.
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
    """Returns the shapes and specs of a new `State`, and `Planned.init`, a function that makes the
    state.

    No array is computed yet.

    Args:
        make_model: a function without arguments that makes the model.
        optimizer: the optimizer that `make` gets.
        rule: the sharding rule of the model, for `rules.specs`.
        mesh: the mesh of the devices, or an `AbstractMesh` without devices.
        optimizer_rule: the rule of the optimizer's state, if it is split further (ZeRO-1); by
            default `rule`.
        scale: the first loss scale, for a `precision.ScaledGrad`.
        trainable: chooses the leaves for which the optimizer has state. It is a function of a leaf
            (a traced array), or a tree of booleans that is a prefix of the model.
        batch_axes: the mesh axes that split the batch, over which only `rules.fsdp` and
            `rules.experts` may split a parameter.

    Raises:
        ValueError: as `rules.specs` does for the model, and `rules.optimizer_specs` for the
            optimizer's state.
    """
    # The model's static leaves, one entry for each trace. The first entry is used, since it belongs
    # to the trace that gives the shapes; later traces may have other functions.
    statics = []

    def make_arrays():
        """Returns a new model with None in place of its static leaves, and adds these to
        `statics`."""
        arrays, static = eqx.partition(make_model(), trees.is_array)
        # `jax.eval_shape` returns only arrays, so the static leaves are stored in this list.
        statics.append(static)
        return jax.tree.map(jnp.asarray, arrays)

    def trained(model):
        return eqx.filter(eqx.filter(model, trainable), trees.is_inexact)

    def state_of(model):
        return State(model, optimizer.init(trained(model)), jnp.zeros((), jnp.int32), scale)

    def state_and_trained():
        # `trainable` may test whether a leaf is an array. So `trained` runs here, inside
        # `eval_shape`, where leaves are arrays; outside they are `ShapeDtypeStruct`s.
        model = make_arrays()
        return state_of(model), trained(model)

    state, trained_leaves = jax.eval_shape(state_and_trained)
    model_specs = rules.specs(state.model, rule, mesh, batch_axes=batch_axes)
    # The specs by which the optimizer's state is split. With ZeRO a device owns a part of the
    # state.
    owner_specs = model_specs
    if optimizer_rule is not None:
        owner_specs = rules.specs(state.model, optimizer_rule, mesh, batch_axes=batch_axes)
    optimizer_specs = rules.optimizer_specs(optimizer, trained_leaves, owner_specs, mesh)
    # The step's number and the loss scale are the same on all devices.
    specs = State(model_specs, optimizer_specs, P(), jax.tree.map(lambda _: P(), scale))
    shapes = jax.tree.map(_placed_shape, state, trees.shardings(specs, mesh))
    # A function that takes None or a model, as `init` below does, and makes the state's arrays on
    # their devices.
    make_in_place = _in_place(lambda: state_of(make_arrays()), state_of, shapes)

    def with_static(state):
        return dataclasses.replace(state, model=eqx.combine(state.model, statics[0]))

    def init(given=None):
        """Returns the state of the model `given`, whose arrays are whole; if `given` is None, the
        state of a new model. Only the arrays of `given` are used: the static leaves are those of
        `make_model` in any case."""
        return with_static(make_in_place(given))

    return Planned(init, with_static(shapes), specs)


def _in_place(
    make: Callable[[], State], begin: Callable[[PyTree], State], shapes: State
) -> Callable[..., State]:
    """Returns a function that makes a state under `jit`. If its argument is None, the function
    makes the state by `make()`. Else the argument is a model with whole arrays, and the function
    makes the state by `begin(model)`. `shapes` is a state of `ShapeDtypeStruct`s, and gives the
    shardings."""
    # The compiled functions return leaves, and `in_place` puts them into the tree of `shapes`: the
    # tree of a new model may have another structure, which `jit` would return. For example, static
    # fields that are functions may be new functions in each model.
    leaves, structure = jax.tree.flatten(shapes)
    target_shardings = [leaf.sharding for leaf in leaves]
    # Under `jit` each device makes its own shards, so no device holds a whole array.
    compiled_make = jax.jit(lambda: jax.tree.leaves(make()), out_shardings=target_shardings)
    # Donated: the state keeps the memory of the placed arrays, which `_placed_as` makes for this
    # call only. So no second copy is made.
    compiled_begin = jax.jit(
        lambda model: jax.tree.leaves(begin(model)),
        out_shardings=target_shardings,
        donate_argnums=0,
    )

    def in_place(given):
        if given is None:
            return jax.tree.unflatten(structure, compiled_make())
        return jax.tree.unflatten(structure, compiled_begin(_placed_as(given, shapes.model)))

    return in_place


def _placed_shape(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of a leaf with its sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _placed_as(given: PyTree, shapes: PyTree) -> PyTree:
    """Returns the arrays of `given` on the devices, with the shardings of `shapes`, in a tree like
    `shapes`. `shapes` is a model with a `jax.ShapeDtypeStruct` in place of each array, and None in
    place of each other leaf. Each process must have every array of `given` as a whole. Raises
    `ValueError` if the number, the paths, the shapes or the dtypes of the arrays are not those of
    `shapes`."""
    arrays = [
        (trees.dotted(path), leaf)
        for path, leaf in jax.tree.leaves_with_path(given)
        if trees.is_array(leaf)
    ]
    needed = jax.tree.leaves_with_path(shapes)
    if len(arrays) != len(needed):
        raise ValueError(
            f"init: the model has {len(arrays)} arrays; it must have {len(needed)}, as the "
            "result of make_model has. Pass a model of the same configuration."
        )
    placed = []
    for (given_path, leaf), (path, like) in zip(arrays, needed, strict=True):
        if given_path != trees.dotted(path):
            raise ValueError(
                f"init: the model has the array {given_path} where the result of make_model has "
                f"{trees.dotted(path)}. Pass a model of the same class and configuration."
            )
        if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"init: {trees.dotted(path)} must be of shape {like.shape} and {like.dtype}; it is "
                f"{leaf.shape} and {leaf.dtype}. Pass a model of the same configuration and dtype "
                "as the result of make_model."
            )
        # A random key has no NumPy array to cut into shards.
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            # A copy, since the result is donated and the caller may go on to use the key.
            placed.append(jax.device_put(leaf, like.sharding, may_alias=False))
        else:
            # The callback gets the slices of one device's shard, so each device gets only its
            # shard.
            host = np.asarray(leaf)
            placed.append(jax.make_array_from_callback(like.shape, like.sharding, host.__getitem__))
    return jax.tree.unflatten(jax.tree.structure(shapes), placed)
