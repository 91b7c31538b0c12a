"""The state of islands: a training state for each island, and the outer weights of all.

Each island has *inner* arrays of its own: they are stacked to [islands, ...], and the first dim is
split over the islands. *Outer* arrays are the same on all islands. In a *round* the islands
exchange their changes, and the outer optimizer changes the outer weights. A *fragment* is the part
of the model that a round exchanges; each fragment has its own outer optimizer state. The number of
the step, `step`, is one number for all islands, without a dim of islands. `_step(inner)` returns
this number, and `_inner(state)` returns the inner state.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from parallax import rules, step, trees
from parallax._typing import PyTree
from parallax.collectives import Axis, AxisLike
from parallax.collectives.int8 import ErrorFeedback
from parallax.collectives.types import accumulation_dtype
from parallax.islands import fragments
from parallax.islands.fragments import ALL_AT_ONCE, Stream


class SentChanges(eqx.Module):
    """An exchange's result that no island has used yet. A tree of its specs is a `SentChanges` too,
    with a spec in place of each array.

    Attributes:
        mean: the mean change of the present islands.
        some: whether any island was present, a bool.
        present: whether each island was present, an array of bools [islands].
    """

    mean: PyTree
    some: PyTree
    present: PyTree


class State(eqx.Module):
    """The state that a step of islands changes. A tree of its specs is a `State` too, with a spec
    in place of each array.

    Attributes:
        inner: the training states of all islands. Arrays are [islands, ...], except `step`, which
            is one number for all islands.
        model: the outer weights: the trained leaves after the last round, with None in place of all
            other leaves.
        optimizer: for each fragment (a part of the model), the state of the outer optimizer.
        error: for each fragment, the rounding errors of an int8 exchange, [islands, ...]. The next
            exchange adds them to the changes of the weights that it sends. None unless the exchange
            rounds to int8.
        sent: for each fragment, the result of an exchange that no island has used yet; None if the
            islands use each result at once.
    """

    inner: step.State
    model: PyTree
    optimizer: tuple[PyTree, ...]
    error: tuple[PyTree, ...]
    sent: tuple[SentChanges | None, ...]

    @property
    def step(self) -> Any:
        """The number of steps that each island has taken: an int32 scalar."""
        return self.inner.step


class StateInit(NamedTuple):
    """A function that makes a state of islands, with the shapes and the specs of this state.

    Attributes:
        init: makes the state of islands from the state of one island.
        shapes: the `jax.ShapeDtypeStruct` of each array, with its sharding.
        specs: the spec of each array.
    """

    init: Callable[[step.State], State]
    shapes: State
    specs: State


def init(
    state: step.State,
    specs: step.State,
    outer: optax.GradientTransformation,
    mesh: trees.AnyMesh,
    *,
    axis: AxisLike | ErrorFeedback,
    stream: Stream = ALL_AT_ONCE,
    trainable: PyTree = trees.is_inexact,
) -> tuple[State, State]:
    """Returns the state of islands that all begin as `state`, and the specs of that state.

    Each device makes only its own blocks of the arrays, so no device holds the blocks of all
    islands.

    Args:
        state: the state of one island, as `step.init` makes it on `mesh`. It is the same on all
            islands.
        specs: the specs of `state`. They must not name the axis of the islands.
        outer: the optimizer of the outer weights, which are the same on all islands.
        mesh: the mesh, with the axis of the islands.
        axis: the axis of the islands: a name, or an axis with an algorithm for its collectives,
            such as `ring("island")`; or `ErrorFeedback(axis)` for an exchange in int8. It must be
            the `axis` that `islands.local` gets.
        stream: the fragments and their delay, as in `islands.local`.
        trainable: the leaves that the outer optimizer trains: a function of a leaf, or a tree of
            booleans, as in `step.init`. Islands do not exchange the other leaves.

    Raises:
        ValueError: the mesh has no axis of the islands; the fragments do not cover the model, or
            cut a dim that is split.
    """
    plan = state_init(state, specs, outer, mesh, axis=axis, stream=stream, trainable=trainable)
    return plan.init(state), plan.specs


def state_init(
    state: step.State,
    specs: step.State,
    outer: optax.GradientTransformation,
    mesh: trees.AnyMesh,
    *,
    axis: AxisLike | ErrorFeedback,
    stream: Stream = ALL_AT_ONCE,
    trainable: PyTree = trees.is_inexact,
) -> StateInit:
    """Returns a `StateInit`. Its function `init` makes the state of islands from the state of one
    island; its `shapes` and `specs` are the shapes and the specs of the state of islands.

    `state_init` itself does not compute the state of islands. So the argument `state` may be the
    shapes of one island's state.

    Args:
        state: the state of one island, or its shapes.
        specs: the specs of `state`.
        outer: the outer optimizer.
        mesh: the mesh, with the axis of the islands.
        axis: the axis of the islands, or `ErrorFeedback(axis)` for an exchange in int8.
        stream: the fragments and their delay.
        trainable: the leaves that the outer optimizer trains: a function of a leaf, or a tree of
            booleans.
    """
    names, islands = axis_names(axis), number_of_islands(axis, mesh)
    arrays, static = eqx.partition(state, trees.is_array)

    def trained(model):
        """Returns the trained leaves. `trainable` may also pick arrays of integers. These arrays
        are left out, since an optimizer cannot train them."""
        return eqx.filter(eqx.filter(model, trainable), trees.is_inexact)

    weights = jax.eval_shape(trained, eqx.filter(state.model, trees.is_array))
    parts = fragments.checked_fragments(stream, weights, specs.model)
    # An int8 exchange keeps its rounding errors in the state. With a delay, the result of an
    # exchange waits in the state.
    has_feedback, waits = isinstance(axis, ErrorFeedback), stream.delay > 0

    def make(arrays):
        """Returns the arrays of the state of islands, from the arrays of one island's state."""
        stacked = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (islands, *x.shape)), arrays)
        weights = trained(arrays.model)
        weights_of = [part.get(weights) for part in parts]  # the trained weights of each fragment
        error = [_zeros(part, islands) if has_feedback else None for part in weights_of]
        sent = [_nothing_sent(part, islands) if waits else None for part in weights_of]
        # The step's number is one for all islands, so it is put back without a dim of islands. The
        # fields of `State` are inner, model, optimizer, error, sent.
        return State(
            eqx.tree_at(_step, stacked, arrays.step),
            weights,
            tuple(map(outer.init, weights_of)),
            tuple(error),
            tuple(sent),
        )

    # The compiled function makes each block on its device, so no device holds the blocks of all
    # islands.
    placed = _specs(specs, outer, parts, weights, names, mesh, (has_feedback, waits))
    shardings = trees.shardings(placed, mesh)
    begin = jax.jit(make, out_shardings=shardings)

    def with_static(state):
        """Returns `state` with its non-array leaves, such as functions, copied from the state of
        one island."""
        return eqx.tree_at(_inner, state, eqx.combine(state.inner, static))

    def with_sharding(leaf, sharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def init(state):
        """Returns the state of islands that all begin as `state`."""
        return with_static(begin(eqx.filter(state, trees.is_array)))

    shapes = jax.tree.map(with_sharding, jax.eval_shape(make, arrays), shardings)
    return StateInit(init, with_static(shapes), placed)


def _specs(
    specs: step.State,
    outer: optax.GradientTransformation,
    parts: tuple[fragments.Fragment, ...],
    weights: PyTree,
    names: tuple[str, ...],
    mesh: trees.AnyMesh,
    has: tuple[bool, bool],
) -> State:
    """Returns the specs of a state of islands.

    Args:
        specs: the specs of the state of one island.
        outer: the outer optimizer.
        parts: the fragments of the model.
        weights: the shapes of the trained weights.
        names: the mesh axes of the islands.
        mesh: the mesh.
        has: two bools. The first says whether the state stores rounding errors, and the second
            whether the state stores results of exchanges that no island has used yet.
    """
    by_path = trees.by_path(specs.model)

    # A fragment has only some leaves of the model, so the spec of a leaf is found by its path.
    def spec_of(tree):
        return jax.tree.map_with_path(lambda path, leaf: by_path[trees.dotted(path)], tree)

    def stacked(tree):
        """Returns `tree`, a tree of specs, with the islands' axes as a new first entry of each."""
        return jax.tree.map(lambda spec: P(names, *spec), tree)

    # Only inner arrays are stacked. The fields of `step.State` are model, optimizer, step, scale.
    inner = step.State(stacked(specs.model), stacked(specs.optimizer), P(), stacked(specs.scale))
    has_feedback, waits = has
    optimizer, error, sent = [], [], []
    for part in parts:
        part_shapes = jax.eval_shape(part.get, weights)
        part_specs = spec_of(part_shapes)
        optimizer.append(rules.optimizer_specs(outer, part_shapes, part_specs, mesh))
        error.append(stacked(part_specs) if has_feedback else None)
        # The fields of `SentChanges`: the mean change, whose leaves are placed as the weights; a
        # bool, whether any island was present; and a bool for each island, split over the islands.
        sent.append(SentChanges(part_specs, P(), P(names)) if waits else None)
    return State(inner, spec_of(weights), tuple(optimizer), tuple(error), tuple(sent))


def _zeros(weights: PyTree, *first_dims: int) -> PyTree:
    """Returns zeros [*first_dims, ...] for each weight, in the dtype in which the weight's changes
    are summed (float32 or wider)."""

    def zeros(w):
        return jnp.zeros((*first_dims, *w.shape), accumulation_dtype(w.dtype))

    return jax.tree.map(zeros, weights)


def _nothing_sent(weights: PyTree, islands: int) -> SentChanges:
    """Returns the result of an exchange in which no island took part."""
    return SentChanges(_zeros(weights), jnp.asarray(False), jnp.zeros(islands, bool))


def axis_names(axis: AxisLike | ErrorFeedback) -> tuple[str, ...]:
    """Returns the names of the mesh axes of the islands, as a tuple."""
    names = axis.axis_name if isinstance(axis, ErrorFeedback) else Axis.of(axis).names
    return names if isinstance(names, tuple) else (names,)


def number_of_islands(axis: AxisLike | ErrorFeedback, mesh: trees.AnyMesh) -> int:
    """Returns the number of islands of a mesh. Raises `ValueError` if the mesh has no axis of the
    islands."""
    names = axis_names(axis)
    for name in names:
        if name not in mesh.shape:
            raise ValueError(
                f"islands: the mesh has the axes {dict(mesh.shape)}, and no axis {name!r}. Add "
                "this axis to mesh.make."
            )
    return math.prod(mesh.shape[name] for name in names)


def joint_model(state: State) -> PyTree:
    """Returns one model: the outer weights, and the first island's leaves that are not trained."""
    first = jax.tree.map(lambda x: x[0] if trees.is_array(x) else x, state.inner.model)
    return eqx.combine(state.model, first)


def shapes_for_islands(shapes: State, islands: int) -> State:
    """Returns the shapes of a state that was saved by `islands` islands, to restore that state from
    a checkpoint.

    `shapes` are the shapes of a state with as many islands as the current mesh has. The saved
    islands may not divide evenly over the mesh, so the dim of islands is not split: each device
    reads the blocks of all saved islands.
    """

    def resized(x):
        """Returns the shape of `x`, [islands, ...], with the number of islands in the checkpoint as
        its first dim."""
        if not trees.is_array(x):
            return x
        # None: the first dim is not split.
        whole = jax.sharding.NamedSharding(x.sharding.mesh, P(None, *x.sharding.spec[1:]))
        return jax.ShapeDtypeStruct((islands, *x.shape[1:]), x.dtype, sharding=whole)

    def resized_sent(sent):
        """Returns `sent`, the shapes of an exchange's result, for as many islands as the checkpoint
        has. Only the field `present` has a dim of islands. Returns None if `sent` is None.
        """
        if sent is None:
            return None
        return SentChanges(sent.mean, sent.some, jax.tree.map(resized, sent.present))

    # The step's number (`shapes.step` is `shapes.inner.step`) has no dim of islands: it is left out
    # here and put back below.
    inner = jax.tree.map(resized, eqx.tree_at(_step, shapes.inner, None))
    inner = eqx.tree_at(_step, inner, shapes.step, is_leaf=_is_none)
    error = jax.tree.map(resized, shapes.error)
    return State(
        inner, shapes.model, shapes.optimizer, error, tuple(map(resized_sent, shapes.sent))
    )


def with_number_of_islands(state: State, shapes: State) -> tuple[State, list[str]]:
    """Returns `state` for the number of islands of `shapes`, and a list with a phrase for each
    thing that is lost.

        like = islands.shapes_for_islands(train_step.shapes, 2)    # it was saved by two islands
        state = checkpoints.restore(like).state
        state, lost = islands.with_number_of_islands(state, train_step.shapes)

    `shapes` are the shapes of a state for the new number of islands. All islands continue with the
    outer weights, the only weights that are the same for all islands. If there were n islands
    before, island i takes the state of the inner optimizer, and the leaves that are not trained,
    from island i mod n; so this optimizer must not compute the weights from a copy of them in its
    state. The rounding errors of int8 exchanges, and the results of exchanges that no
    island has used yet, become zero.
    """
    before, islands = _islands(state.inner.model), _islands(shapes.inner.model)
    sources = jnp.arange(islands) % before
    arrays, static = eqx.partition(state, trees.is_array)

    def from_sources(tree):
        """Returns `tree` with arrays of the new islands in place of its arrays of the old islands.
        The first dim is the dim of islands. New island i gets the part of old island `sources[i]`.
        """
        return jax.tree.map(lambda x: x[sources], tree)

    def zeros(tree):
        """Returns `tree` with zeros in place of its arrays. The first dim of an array, the number
        of old islands, becomes the number of new islands."""
        return jax.tree.map(lambda x: jnp.zeros((islands, *x.shape[1:]), x.dtype), tree)

    def nothing_sent(sent):
        """Returns `sent` with zeros in all arrays: the result of an exchange in which no island
        took part. The field `present` becomes an array with one False for each new island. Returns
        None if `sent` is None."""
        if sent is None:
            return None
        mean = jax.tree.map(jnp.zeros_like, sent.mean)
        return SentChanges(mean, jnp.zeros_like(sent.some), zeros(sent.present))

    def resized(state):
        """Returns the arrays of the state of the new islands. `state` has the arrays of the state
        of the old islands.

        The trained leaves of every new island are the outer weights, `state.model`. New island i
        takes the leaves that are not trained, and the inner optimizer's state, from old island
        `sources[i]`. Rounding errors and the unused results of exchanges become zero, since they
        belong to islands that may be gone.
        """
        inner = state.inner
        copies = jax.tree.map(lambda w: jnp.broadcast_to(w[None], (islands, *w.shape)), state.model)
        new = step.State(
            eqx.combine(copies, from_sources(inner.model)),
            from_sources(inner.optimizer),
            inner.step,  # one number for all islands: it has no first dim
            from_sources(inner.scale),
        )
        sent = tuple(map(nothing_sent, state.sent))
        return State(new, state.model, state.optimizer, zeros(state.error), sent)

    # If a shape has no sharding, None lets JAX choose where the array is placed.
    array_shapes = eqx.filter(shapes, trees.is_array)
    shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), array_shapes)
    new_state = eqx.combine(jax.jit(resized, out_shardings=shardings)(arrays), static)
    return new_state, _losses(state, before, islands)


def _islands(model: PyTree) -> int:
    """Returns the number of islands: the first dim of any array of a model whose arrays are
    [islands, ...]."""
    return next(leaf.shape[0] for leaf in jax.tree.leaves(model) if trees.is_array(leaf))


def _losses(state: State, before: int, islands: int) -> list[str]:
    """Returns a phrase for each thing that is lost when the number of islands changes from
    `before` to `islands`."""
    # All islands restart from the outer weights, which only a round changes.
    lost = ["the inner steps since the last round, on every island, if there were any"]
    if islands < before:
        lost.append(
            f"the inner optimizer's state of islands {islands} to {before - 1}, which are gone"
        )
    if jax.tree.leaves(state.error):
        lost.append("the rounding errors of int8")
    if any(sent is not None for sent in state.sent):
        lost.append("the exchanges under way")
    return lost


def _inner(state: State) -> step.State:
    return state.inner


def _step(state: Any) -> Any:
    return state.step


def _is_none(leaf: Any) -> bool:
    return leaf is None
