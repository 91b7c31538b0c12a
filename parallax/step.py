"""From a grad arrow to a train step, for any model: `(state, batch) -> (state, info)`."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from parallax import elementwise, grads, precision, rules, trees
from parallax.collectives.axis import AxisLike
from parallax.collectives.types import varying_axes
from parallax.grads import Grad
from parallax.typed import PyTree, Rule, Specs


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
        skipped: whether one of the two, or what the step would have made of model and optimizer, was not finite, or the loss was
            above the limit: model and optimizer are then as they were.
    """

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    skipped: Bool[Array, ""]

    @property
    def aux(self) -> None:
        """None: the grad arrow has no auxiliary values."""
        return None


class InfoWithAux(NamedTuple):
    """`Info` of a grad arrow with auxiliary values.

    Attributes:
        loss: as there, and so the next two.
        gradient_norm: likewise.
        skipped: likewise.
        aux: the auxiliary values.
    """

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    skipped: Bool[Array, ""]
    aux: PyTree


Step = Callable[..., tuple[State, Info | InfoWithAux]]  # of a state, a batch and perhaps a limit
AfterUpdate = Callable[[Any, Any], Any]


def unchanged(model: PyTree, aux: PyTree) -> PyTree:
    """The model: nothing but gradients changes it."""
    return model


def value_of(info: Info | InfoWithAux) -> dict[str, Any]:
    """The loss as `value`, which optimizers that look at it take, such as `optax.polyak_sgd`."""
    return {"value": info.loss}


def make(
    grad: Grad,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    max_norm: float | None = None,
    reduce_norm_over: Sequence[AxisLike] = (),
    after_update: AfterUpdate = unchanged,
    extra_args: Callable[[Any], dict[str, Any]] = value_of,
    specs: Specs | None = None,
) -> Step:
    """The train step of `grad` and `optimizer`; it runs on local blocks inside `mesh.spmd`, and as it is on one device.

    A step whose loss or gradient norm is not finite, or by which a finite number of the model or of the optimizer's state would
    cease to be so, changes nothing but the step's number, and says so in its `Info`. `step(state, batch, limit)`, with a scalar,
    does the same where the loss is above `limit` (`run.spikes` gives one). A leaf without a gradient stays as it is.

    Args:
        grad: a grad arrow whose gradients are reduced already.
        optimizer: one that acts element by element, since each device updates its own shards, or one of
            `parallax.optimizers`.
        max_norm: scale the gradients down to this global norm, over all shards, where they exceed it.
        reduce_norm_over: who joins the shards' sums of squares, one scalar for each set of axes in use; by default `jax.lax`.
        after_update: `(model, aux) -> model`, after the update, for what no gradient changes, such as batch statistics.
        extra_args: the extra arguments of `optimizer.update`, from the step's `Info`.
        specs: of the model. With them it is known which dim of a leaf is split, which an optimizer's choice may depend on.

    Raises:
        ValueError: the loss or a gradient varies along an axis along which the model is the same, since it was not reduced; a
            gradient is the same where its parameter differs, or is one of a Python number, or a share that the optimizer does
            not take; other leaves have gradients than have optimizer state;
            auxiliary values differ between devices; the optimizer mixes the elements of a leaf that is split; or `after_update`
            changes the form of the model, or a leaf of it that is no array.
    """
    return make_scaled(
        lambda _: grad,
        optimizer,
        max_norm=max_norm,
        reduce_norm_over=reduce_norm_over,
        after_update=after_update,
        extra_args=extra_args,
        specs=specs,
    )


def make_scaled(
    grad_of: Callable[[Any], Grad],
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    *,
    max_norm: float | None = None,
    reduce_norm_over: Sequence[AxisLike] = (),
    after_update: AfterUpdate = unchanged,
    extra_args: Callable[[Any], dict[str, Any]] = value_of,
    specs: Specs | None = None,
) -> Step:
    """`make` of a grad arrow that depends on the loss scale, as float16 needs: `grad_of(scale)`, its gradients unscaled.

    The state's `scale`, a `precision.Scale`, follows what becomes of the steps (`precision.adjusted`). Where the state has
    none, `grad_of` is given None. Arguments and errors are otherwise those of `make`.
    """
    optimizer = elementwise.with_extra(optimizer)

    def step(state, batch, limit=None):
        value, gradients = grad_of(None if state.scale is None else state.scale.value)(state.model, batch)
        loss, aux = value if isinstance(value, tuple) else (value, None)
        weights = grads.matching_parameters(gradients, state.model)
        _check_reduced(gradients, weights)
        _check_own(loss, state)
        _check_joined(aux)
        norm = grads.norm(gradients, axes=reduce_norm_over)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        with_aux = isinstance(value, tuple)
        info = lambda finite: InfoWithAux(loss, norm, ~finite, aux) if with_aux else Info(loss, norm, ~finite)
        gradients = gradients if max_norm is None else grads.scaled(gradients, norm, max_norm)
        gradients = jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, weights)
        also = extra_args(info(finite))
        update = lambda g, s, w: optimizer.update(g, s, w, **also)
        _check_trained(update, gradients, state, weights)
        _check_shapes(update, gradients, state, weights)
        wholes = elementwise.wholes(weights, {} if specs is None else trees.by_path(specs))
        elementwise.check(update, gradients, state.optimizer, weights, wholes=wholes, at="step.make")
        updates, optimizer_state = update(gradients, state.optimizer, weights)
        model = eqx.apply_updates(state.model, updates)
        if after_update is not unchanged:
            model = _same_form(after_update(model, aux), state.model)
        finite &= ~_lost((model, optimizer_state), (state.model, state.optimizer), norm, reduce_norm_over)
        taken = finite if limit is None else finite & (loss <= jnp.asarray(limit).astype(loss.dtype))
        new = State(
            precision.select(taken, model, state.model),
            precision.select(taken, optimizer_state, state.optimizer),
            state.step + 1,
            None if state.scale is None else precision.adjusted(state.scale, finite),
        )
        return new, info(taken)

    return step


def _lost(new: PyTree, old: PyTree, norm: Float[Array, ""], axes: Sequence[AxisLike]) -> Bool[Array, ""]:
    """Whether a number that was finite is not any more, on any device: one scalar, in `norm`'s type, over all axes in use.

    What never was finite, such as a mask of -inf, may stay so.
    """
    numbers = lambda tree: [leaf for leaf in jax.tree.leaves(tree) if trees.is_array(leaf) and _is_number(leaf)]
    changed = ((a, b) for a, b in zip(numbers(new), numbers(old), strict=True) if a is not b)  # a frozen leaf is not read
    lost = [jnp.any(~jnp.isfinite(a) & jnp.isfinite(b)).astype(norm.dtype) for a, b in changed]
    return grads.norm([sum(lost[1:], start=lost[0])], axes=axes) > 0


def _is_number(leaf: Any) -> bool:
    """Whether it may be infinite."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _check_reduced(gradients: PyTree, weights: PyTree) -> None:
    def check(path, gradient, weight):
        many = lambda names: sorted(name for name in names if lax.axis_size(name) > 1)
        ours, theirs = set(varying_axes(gradient)), set(varying_axes(weight))
        if gradient.shape == weight.shape and (local := many(ours - theirs)):
            raise ValueError(
                f"step.make needs gradients that are reduced; that of {trees.dotted(path)} differs along {local}, where "
                f"the parameter is the same. Wrap the grad arrow in grads.averaged, zero.reduce_scattered or ZeRO.grad."
            )
        if mixed := many(theirs - ours):
            raise ValueError(
                f"step.make: the parameter {trees.dotted(path)} differs along {mixed}, and its gradient is the same there, so "
                "the gradients of different shards were summed. Reduce it along the axes alone along which the parameter is the "
                "same, as grads.averaged and grads.summed do."
            )

    jax.tree.map_with_path(check, gradients, weights)


def _check_own(loss: Array, state: State) -> None:
    """Refuse a loss that is each device's own, where something of the state is the same on all of them."""
    leaves = jax.tree.leaves(eqx.filter((state.model, state.optimizer), trees.is_array))
    split = [set(varying_axes(leaf)) for leaf in leaves]
    local = [name for name in grads.several(varying_axes(loss)) if any(name not in axes for axes in split)]
    if local:
        raise ValueError(
            f"step.make: the loss differs along {local}, so it is that of one device's rows, and the model is the same there. "
            "Wrap the grad arrow in grads.averaged, zero.reduce_scattered or ZeRO.grad over that axis."
        )


def _check_shapes(update: Callable[..., Any], gradients: PyTree, state: State, weights: PyTree) -> None:
    """Refuse gradients that are shares beside an optimizer that takes whole ones."""
    leaves = zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(weights), strict=True)
    apart = [(trees.dotted(path), g.shape, w.shape) for (path, g), w in leaves if g.shape != w.shape]
    if not apart:
        return
    path, share, whole = apart[0]
    message = (
        f"step.make: the gradient of {path or 'the parameter'} has shape {share}, a share of {whole} as "
        "zero.reduce_scattered makes it, and the optimizer takes whole gradients. Wrap it: "
        "zero.sharded(optimizer, axis, specs) or ZeRO.optimizer, and give "
        "step.init the rule of the shares as optimizer_rule."
    )
    try:
        updates, _ = jax.eval_shape(lambda: update(gradients, state.optimizer, weights))
    except TypeError as error:
        raise ValueError(message) from error
    if [leaf.shape for leaf in jax.tree.leaves(updates)] != [leaf.shape for leaf in jax.tree.leaves(weights)]:
        raise ValueError(message)


def _check_joined(aux: PyTree) -> None:
    for path, leaf in jax.tree.leaves_with_path(eqx.filter(aux, trees.is_array)):
        local = sorted(name for name in varying_axes(leaf) if lax.axis_size(name) > 1)
        if local:
            raise ValueError(
                f"step.make: the auxiliary value {trees.dotted(path) or 'itself'} differs along {local}, and Info is the same on "
                f"all devices. Join it: grads.averaged(grad, axis, aux=...) takes a function of the values and the axis."
            )


def _check_trained(update: Callable[..., Any], gradients: PyTree, state: State, weights: PyTree) -> None:
    """Refuse gradients of other leaves than those that the optimizer has state for, where it cannot work with them."""
    paths = {tuple(path) for path, _ in jax.tree.leaves_with_path(state.model)}
    suffixes = lambda path: (tuple(path[begin:]) for begin in range(len(path) + 1))
    owners = (next(filter(paths.__contains__, suffixes(path)), None) for path, _ in jax.tree.leaves_with_path(state.optimizer))
    with_state = {owner for owner in owners if owner is not None}
    with_gradient = {tuple(path) for path, _ in jax.tree.leaves_with_path(gradients)}
    if not with_state or with_state == with_gradient:
        return
    try:  # some optimizers have state for some leaves alone
        jax.eval_shape(lambda: update(gradients, state.optimizer, weights))
    except elementwise.Mixes:
        raise
    except (TypeError, ValueError) as error:
        path = min(with_state ^ with_gradient, key=trees.dotted)
        has, lacks = ("a gradient", "no state in the optimizer") if path in with_gradient else ("optimizer state", "no gradient")
        leaves = dict(jax.tree.leaves_with_path(state.model))
        split = tuple(name for name in varying_axes(leaves[path]) if lax.axis_size(name) > 1)
        axis = repr(split[0] if len(split) == 1 else split)
        by_size = (
            f" Or, if the optimizer chooses leaves by their size, which is another on a shard along {axis}, wrap it in "
            f"optimizers.whole(optimizer, {axis}, specs)."
        )
        raise ValueError(
            f"step.make: {trees.dotted(path) or 'the parameter'} has {has}, and {lacks}. The leaves that the grad arrow "
            f"differentiates ({len(with_gradient)}; it gives None for the others) must be those that the optimizer has state for "
            f"({len(with_state)}). Pass trainable=... to step.init, and eqx.partition the model by the same in the grad arrow."
            + by_size
            * bool(split)
        ) from error


def _same_form(model: PyTree, before: PyTree) -> PyTree:
    """`model`, which `after_update` returned: refused where a leaf is of another form than before."""
    new, old = (dict(jax.tree.leaves_with_path(tree)) for tree in (model, before))
    if jax.tree.structure(model) != jax.tree.structure(before):
        gone = [f"{trees.dotted(path)} is gone" for path in old if path not in new]
        apart = gone + [f"{trees.dotted(path)} is new" for path in new if path not in old]
        raise ValueError(
            "step.make: after_update must return a model of the structure that it takes, as eqx.tree_at does; of what it "
            f"returned {', '.join(apart[:3]) or 'the static fields or the containers differ'}."
        )
    for path, leaf in old.items():
        _check_form(trees.dotted(path) or "the model", new[path], leaf)
    return model


def _check_form(path: str, new: Any, old: Any) -> None:
    if trees.is_array(new) != trees.is_array(old) or (not trees.is_array(old) and not (new is old or new == old)):
        shown = lambda leaf: f"{leaf.dtype}{list(leaf.shape)}" if trees.is_array(leaf) else repr(leaf)
        raise ValueError(
            f"step.make: after_update must keep {path}, which is {shown(old)}; it returned {shown(new)}. A leaf that is no array "
            "is static: it is part of the program, and no step changes it. Make it an array in the model, so that it can change."
        )
    form = lambda x: (jnp.shape(x), jnp.dtype(x.dtype), varying_axes(x))
    if trees.is_array(old) and form(new) != form(old):
        raise ValueError(
            f"step.make: after_update must keep the form of {path}, (shape, type, axes along which it differs) = {form(old)}; it "
            f"returned {form(new)}. Take means over the axes first: aux=... of grads.averaged does."
        )


def init(
    make_model: Callable[[], PyTree],
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    rule: Rule,
    mesh_: Mesh,
    *,
    optimizer_rule: Rule | None = None,
    scale: precision.Scale | None = None,
    trainable: PyTree = trees.is_inexact,
    batch_axes: Sequence[str] = (),
) -> tuple[State, State]:
    """A fresh `State`, made in its place under `jit`: no device ever holds the whole. Also its specs.

    Args:
        make_model: makes the model from nothing: a function of no arguments, such as
            `functools.partial(gpt2.GPT2, config, key=key)`. Its arrays, NumPy's too, go to the devices; other leaves (functions,
            Python numbers, None) stay as they are.
        rule: the sharding rule of the model, for `rules.specs`.
        optimizer_rule: the rule that the optimizer's state follows, where it is split further (ZeRO-1); by default `rule`.
        scale: the first loss scale, for `make_scaled`.
        trainable: which leaves the optimizer has state for: a function of a leaf (an array or its shape), or a tree of truth
            values, a prefix of the model. The grad arrow gives None for the others.
        batch_axes: the mesh axes that split the batch, for `rules.specs`.

    Raises:
        ValueError: as `rules.specs` and `rules.optimizer_specs` do, of the model and of the optimizer's state.
    """
    plan = planned(
        make_model,
        optimizer,
        rule,
        mesh_,
        optimizer_rule=optimizer_rule,
        scale=scale,
        trainable=trainable,
        batch_axes=batch_axes,
    )
    return plan.init(), plan.specs


class Planned(NamedTuple):
    """A state that can be made.

    Attributes:
        init: makes it, in its place; `init(model)` makes it of the arrays of that model, which is whole.
        shapes: its `jax.ShapeDtypeStruct`s, with their shardings; leaves that are no arrays are those of the state.
        specs: the spec of each array.
    """

    init: Callable[..., State]
    shapes: State
    specs: State


def planned(
    make_model: Callable[[], PyTree],
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    rule: Rule,
    mesh_: trees.AnyMesh,
    *,
    optimizer_rule: Rule | None = None,
    scale: precision.Scale | None = None,
    trainable: PyTree = trees.is_inexact,
    batch_axes: Sequence[str] = (),
) -> Planned:
    """What `init` makes, before it is made; arguments and errors as there. Nothing is computed."""

    trained = lambda model: eqx.filter(eqx.filter(model, trainable), trees.is_inexact)
    statics = []

    def made():
        model = make_model()
        arrays, static = eqx.partition(model, trees.is_array)
        statics.append(static)
        return jax.tree.map(jnp.asarray, arrays)

    def leaves_of(model):
        return jax.tree.leaves(State(model, optimizer.init(trained(model)), jnp.zeros((), jnp.int32), scale))

    def traced():
        model = made()
        return model, trained(model)

    model, seen = jax.eval_shape(traced)
    static = statics[0]
    model_specs = rules.specs(model, rule, mesh_, batch_axes=batch_axes)
    owned = model_specs if optimizer_rule is None else rules.specs(model, optimizer_rule, mesh_, batch_axes=batch_axes)
    of_optimizer = rules.optimizer_specs(optimizer, seen, owned, mesh_)
    specs = State(model_specs, of_optimizer, P(), jax.tree.map(lambda _: P(), scale))
    placed = trees.shardings(specs, mesh_)
    # As leaves: a model whose static fields are functions made anew by each `make_model()` has another structure each time.
    make = jax.jit(lambda: leaves_of(made()), out_shardings=jax.tree.leaves(placed))
    begin = jax.jit(leaves_of, out_shardings=jax.tree.leaves(placed), donate_argnums=0)
    state = State(model, jax.eval_shape(optimizer.init, seen), jax.ShapeDtypeStruct((), jnp.int32), scale)
    shapes = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), state, placed)
    whole = lambda state: dataclasses.replace(state, model=eqx.combine(state.model, static))

    def init(given=None):
        leaves = make() if given is None else begin(_placed_as(given, shapes.model))
        return whole(jax.tree.unflatten(jax.tree.structure(shapes), leaves))

    return Planned(init, whole(shapes), specs)


def _placed_as(given: PyTree, shapes: PyTree) -> PyTree:
    """The arrays of `given`, in the places of `shapes`. Each process has them all. Raises `ValueError` for others."""
    arrays = [leaf for leaf in jax.tree.leaves(given) if trees.is_array(leaf)]
    needed = jax.tree.leaves_with_path(shapes)
    if len(arrays) != len(needed):
        raise ValueError(f"init: the model has {len(arrays)} arrays; needed {len(needed)}. Give the model that was prepared.")
    found = []
    for leaf, (path, like) in zip(arrays, needed, strict=True):
        if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"init: {trees.dotted(path)} must be of shape {like.shape} and {like.dtype}; it is {leaf.shape} and "
                f"{leaf.dtype}. Prepare for the configuration and the dtype of this model."
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # keys, which NumPy does not have
            found.append(jax.device_put(leaf, like.sharding))
        else:
            host = np.asarray(leaf)
            found.append(jax.make_array_from_callback(like.shape, like.sharding, host.__getitem__))
    return jax.tree.unflatten(jax.tree.structure(shapes), found)
