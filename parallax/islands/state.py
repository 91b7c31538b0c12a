"""What a step of islands changes: a state for each island, and the outer weights, which all islands
have.
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
    """What a round exchanged and no island has used yet. A tree of specs has this form too.

    Attributes:
        mean: of what the islands that were there changed.
        some: whether there was any: a bool.
        here: for each island whether it was there: bool [islands].
    """

    mean: PyTree
    some: PyTree
    here: PyTree


class State(eqx.Module):
    """All that a step of islands changes. A tree of specs has this form too.

    Attributes:
        inner: the state of each island: arrays have a first dim, [islands, ...], except `step`,
            which is one number for all.
        model: the outer weights: of what is trained, as it was after the last round; None for other
            leaves.
        optimizer: the state of the outer optimizer, for each fragment.
        error: for each fragment what int8 rounded away, [islands, ...]; None where the exchange is
            exact.
        sent: for each fragment what waits for its use; None without a delay.
    """

    inner: step.State
    model: PyTree
    optimizer: tuple[PyTree, ...]
    error: tuple[PyTree, ...]
    sent: tuple[SentChanges | None, ...]

    @property
    def step(self) -> Any:
        """How many steps each island made: an int32 scalar."""
        return self.inner.step


class StateInit(NamedTuple):
    """A state of islands that can be made.

    Attributes:
        init: makes it of the state of one island.
        shapes: its `jax.ShapeDtypeStruct`s, with their shardings.
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
    """The state of islands that all begin as `state`, and its specs.

    No device holds more than its islands' blocks.

    Args:
        state: of one island, on `mesh`, the same on all islands, as `step.init` makes it.
        specs: its specs, which name no axis of the islands.
        outer: the outer optimizer.
        mesh: the mesh, with the axis of the islands.
        axis: as in `local`, and so the next one.
        stream: likewise.
        trainable: which leaves the outer optimizer works on, as in `step.init`. Others stay each
            island's own.

    Raises:
        ValueError: the mesh has no such axis; the fragments do not cover the model, or cut a dim
            that is split.
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
    """What `init` makes, before it is made, of a state or of its shapes.

    Its `init` takes the state of one island.
    """
    over, islands = axis_names(axis), number_of_islands(axis, mesh)
    arrays, static = eqx.partition(state, trees.is_array)
    trained = lambda tree: eqx.filter(eqx.filter(tree, trainable), trees.is_inexact)
    seen = jax.eval_shape(trained, eqx.filter(state.model, trees.is_array))
    parts = fragments.checked_fragments(stream, seen, specs.model)
    make = _maker(
        outer,
        parts,
        trained,
        islands,
        feedback=isinstance(axis, ErrorFeedback),
        waits=stream.delay > 0,
    )
    shapes = jax.eval_shape(make, arrays)

    by_path = trees.by_path(specs.model)
    spec_of = lambda tree: jax.tree.map_with_path(
        lambda path, leaf: by_path[trees.dotted(path)], tree
    )
    stacked = lambda tree: jax.tree.map(lambda spec: P(over, *spec), tree, is_leaf=trees.is_spec)
    of_parts = [spec_of(jax.eval_shape(part.get, seen)) for part in parts]
    of_optimizer = (
        rules.optimizer_specs(outer, jax.eval_shape(part.get, seen), found, mesh)
        for part, found in zip(parts, of_parts, strict=True)
    )
    placed = State(
        step.State(stacked(specs.model), stacked(specs.optimizer), P(), stacked(specs.scale)),
        spec_of(seen),
        tuple(of_optimizer),
        tuple(
            None if error is None else stacked(found)
            for error, found in zip(shapes.error, of_parts, strict=True)
        ),
        tuple(
            None if sent is None else SentChanges(found, P(), P(over))
            for sent, found in zip(shapes.sent, of_parts, strict=True)
        ),
    )
    at = trees.shardings(placed, mesh)
    begin = jax.jit(make, out_shardings=at)
    whole = lambda state: eqx.tree_at(
        lambda state: state.inner, state, eqx.combine(state.inner, static)
    )
    shapes = jax.tree.map(
        lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, at
    )
    return StateInit(
        lambda state: whole(begin(eqx.filter(state, trees.is_array))), whole(shapes), placed
    )


def _maker(
    outer, parts, trained, islands: int, *, feedback: bool, waits: bool
) -> Callable[[step.State], State]:
    """From the arrays of one island's state to those of all islands'."""
    copies = lambda x: jnp.broadcast_to(x[None], (islands, *x.shape))

    def make(state):
        stacked = jax.tree.map(copies, state)
        weights = trained(state.model)
        found = [part.get(weights) for part in parts]
        zeros = lambda part, *lead: jax.tree.map(
            lambda w: jnp.zeros((*lead, *w.shape), accumulation_dtype(w.dtype)), part
        )
        return State(
            eqx.tree_at(lambda state: state.step, stacked, state.step),
            weights,
            tuple(outer.init(part) for part in found),
            tuple(zeros(part, islands) if feedback else None for part in found),
            tuple(
                SentChanges(zeros(part), jnp.asarray(False), jnp.zeros(islands, bool))
                if waits
                else None
                for part in found
            ),
        )

    return make


def axis_names(axis: AxisLike | ErrorFeedback) -> tuple[str, ...]:
    """The names of the islands' axis."""
    names = axis.axis_name if isinstance(axis, ErrorFeedback) else Axis.of(axis).names
    return names if isinstance(names, tuple) else (names,)


def number_of_islands(axis: AxisLike | ErrorFeedback, mesh: trees.AnyMesh) -> int:
    """How many islands a mesh has. Raises `ValueError` where it lacks their axis."""
    names = axis_names(axis)
    if strange := [name for name in names if name not in mesh.shape]:
        raise ValueError(
            f"islands: the mesh has {dict(mesh.shape)}, and no axis {strange[0]!r}. Add it to "
            "mesh.make."
        )
    return math.prod(mesh.shape[name] for name in names)


def joint_model(state: State) -> PyTree:
    """The model that the islands train together: the outer weights, and what is not trained as the
    first island has it.
    """
    first = jax.tree.map(lambda x: x[0] if trees.is_array(x) else x, state.inner.model)
    return eqx.combine(state.model, first)


def shapes_for_islands(shapes: State, islands: int) -> State:
    """The shapes of a state of another number of islands, to restore it from a checkpoint: each
    device has all islands' parts.
    """

    def leaf(x):
        whole = jax.sharding.NamedSharding(x.sharding.mesh, P(None, *x.sharding.spec[1:]))
        return jax.ShapeDtypeStruct((islands, *x.shape[1:]), x.dtype, sharding=whole)

    each = lambda tree: jax.tree.map(lambda x: leaf(x) if trees.is_array(x) else x, tree)
    sent = lambda one: None if one is None else SentChanges(one.mean, one.some, each(one.here))
    inner = eqx.tree_at(
        _step, each(eqx.tree_at(_step, shapes.inner, None)), shapes.step, is_leaf=_is_none
    )
    return State(
        inner, shapes.model, shapes.optimizer, each(shapes.error), tuple(map(sent, shapes.sent))
    )


def with_number_of_islands(state: State, shapes: State) -> tuple[State, list[str]]:
    """`state` for another number of islands, in the places of `shapes`, and what was lost, in
    sentences.

        like = islands.shapes_for_islands(prepared.shapes, 2)    # it was saved by two islands
        state = checkpoints.restore(like).state
        state, lost = islands.with_number_of_islands(state, prepared.shapes)

    All islands go on from the outer weights. Of n islands that there were, island i mod n gives
    island i its inner optimizer's state. What is under way or was rounded away is dropped.
    """
    first = lambda tree: next(
        leaf.shape[0] for leaf in jax.tree.leaves(tree) if trees.is_array(leaf)
    )
    before, islands = first(state.inner.model), first(shapes.inner.model)
    chosen = jnp.arange(islands) % before
    taken = lambda tree: jax.tree.map(lambda x: x[chosen], tree)
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros((islands, *x.shape[1:]), x.dtype), tree)
    arrays, static = eqx.partition(state, trees.is_array)

    def change(state):
        inner = state.inner
        copies = jax.tree.map(lambda w: jnp.broadcast_to(w[None], (islands, *w.shape)), state.model)
        new = step.State(
            eqx.combine(copies, taken(inner.model)),
            taken(inner.optimizer),
            inner.step,
            taken(inner.scale),
        )
        none = lambda sent: SentChanges(
            jax.tree.map(jnp.zeros_like, sent.mean), jnp.zeros_like(sent.some), zeros(sent.here)
        )
        sent = tuple(None if each is None else none(each) for each in state.sent)
        return State(new, state.model, state.optimizer, zeros(state.error), sent)

    places = jax.tree.map(
        lambda leaf: getattr(leaf, "sharding", None), eqx.filter(shapes, trees.is_array)
    )
    lost = ["the inner steps since the last round, on every island, where there were any"]
    lost += [
        f"the inner optimizer's state of islands {islands} to {before - 1}, which are gone"
    ] * (islands < before)
    lost += [
        f"nothing of islands {before} to {islands - 1}, which are new: copies of the others"
    ] * (islands > before)
    lost += ["what int8 had rounded away"] * any(jax.tree.leaves(state.error))
    lost += ["the exchanges under way"] * any(each is not None for each in state.sent)
    return eqx.combine(jax.jit(change, out_shardings=places)(arrays), static), lost


def _step(state: Any) -> Any:
    return state.step


def _is_none(leaf: Any) -> bool:
    return leaf is None
