"""A step made of steps that talk seldom: each island trains by itself, and every H steps the outer
optimizer joins them.

    train = islands.local(train, islands.outer_nesterov(), every=50, axis="island")

An island is a group of devices with a train step of its own, in any layout. After H steps, with
outer weights W and island i's weights w_i,

    delta = mean over the islands that are there of (W - w_i)
    W     = W + outer's update for the gradient delta
    w_i   = W

so a large step away from W is a large gradient, of the sign that a gradient has. Between rounds
nothing moves between islands: 1/H of the bytes of data parallelism, and `ErrorFeedback` moves a
quarter of those.

Sources: Douillard et al., DiLoCo (arXiv 2311.08105); Streaming DiLoCo (arXiv 2501.18512) for
fragments, delay and mixing.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Bool, Int

from parallax import jaxprs, trees
from parallax._typing import PyTree
from parallax.collectives import Axis, AxisLike
from parallax.collectives.int8 import ErrorFeedback
from parallax.collectives.types import (
    accumulation_dtype,
    axes_of_type,
    axis_index,
    axis_size,
    replicated,
    varying,
    varying_axes,
)
from parallax.islands import fragments
from parallax.islands.fragments import ALL_AT_ONCE, Fragment, Stream
from parallax.islands.state import SentChanges, State, axis_names
from parallax.optimizers.elementwise import checked, with_extra
from parallax.step import Info, Step

IslandStep = Callable[
    ..., tuple[State, Info]
]  # of a state, a batch, perhaps a limit and who is there


def outer_nesterov(rate: float = 0.7, momentum: float = 0.9) -> optax.GradientTransformation:
    """The outer optimizer of DiLoCo: SGD with Nesterov's momentum, with the rates of the paper."""
    return optax.sgd(rate, momentum=momentum, nesterov=True)


def local(
    train: Step,
    outer: optax.GradientTransformation,
    *,
    every: int,
    axis: AxisLike | ErrorFeedback,
    stream: Stream = ALL_AT_ONCE,
) -> IslandStep:
    """`train` on each island by itself, and every `every` steps a round that joins what the islands
    changed.

    The result is `step(state, batch, limit=None, present=None) -> (state, info)`, to run inside
    `mesh.spmd` on the state of `islands.init`. What `info` holds has a first dim, [islands]: its
    spec is `P(axis)`. The batch is split over the islands, as over any axis. `present`, bool
    [islands] and the same on all devices, says which islands take part in a round that begins in
    this step: the mean is over those, and the others go on from their own weights until a later
    round. Where none is there, the round changes nothing.

    Args:
        train: the step of one island, such as `step.make` gives; it names the axes inside an island
            alone.
        outer: the outer optimizer; it acts element by element where weights are split.
        every: H, the steps between two rounds.
        axis: the axis of the islands, with or without an algorithm; or `ErrorFeedback(axis)`, which
            sends int8.
        stream: which part of the model a round exchanges, and when it is used; by default all of
            it, at once.

    Raises:
        ValueError: `every` is below 1, the delay is not below `every`, or the mixing is not from 0
            to 1. When it runs: `train` works along the islands' axis; the batch is the same on all
            islands; the state is not one of islands; the fragments do not cover the model; or the
            outer optimizer mixes the elements of a leaf that is split.
    """
    if every < 1:
        raise ValueError(
            f"islands.local needs every of 1 step or more between rounds; got {every}. Take "
            "every=50, or 1 to talk in each step."
        )
    if not 0 <= stream.delay < every:
        raise ValueError(
            f"islands.local needs a delay from 0 to every - 1 = {every - 1} steps; got "
            f"{stream.delay}. Take one of these, or a larger every."
        )
    if not 0 <= stream.mixing <= 1:
        raise ValueError(
            f"islands.local needs a mixing from 0 to 1; got {stream.mixing}. Take 0, and islands "
            "take the outer weights."
        )
    update, names = checked(with_extra(outer).update, {}, at="islands.local"), axis_names(axis)

    def step(state, batch, limit=None, present=None):
        inner, info = _alone(train, names)(_own(state.inner, names), batch, limit)
        parts = fragments.checked_fragments(stream, state.model)
        for k, part in enumerate(parts):
            offset = every * k // len(parts)
            due = lambda number, offset=offset: (number > 0) & ((number - offset) % every == 0)
            one = _Round(part, k, update, axis, stream.mixing)
            if not stream.delay:
                both = lambda both, one=one: one.received(
                    both[0], both[1], one.sent(both[0], both[1], present)
                )
                inner, state = _when(due(inner.step), both, (inner, state))
            else:
                start = lambda both, one=one: (
                    both[0],
                    one.waiting(both[1], one.sent(both[0], both[1], present)),
                )
                inner, state = _when(due(inner.step), start, (inner, state))
                finish = lambda both, one=one, k=k: one.received(
                    both[0], both[1], (both[1].sent[k], both[1].error[k])
                )
                inner, state = _when(due(inner.step - stream.delay), finish, (inner, state))
        return eqx.tree_at(lambda state: state.inner, state, _stacked(inner, names)), _each(
            info, lambda x: x[None]
        )

    return step


class _Round(eqx.Module):
    """A round of fragment `k`: what it sends, and what becomes of what it receives."""

    part: Fragment
    k: int
    update: Callable[..., Any]
    axis: Any
    mixing: float

    def sent(
        self, inner: Any, state: State, present: Bool[Array, " islands"] | None
    ) -> tuple[SentChanges, PyTree]:
        """The mean of what the islands that are there changed, and what int8 rounded away."""
        names = axis_names(self.axis)
        there = jnp.ones(axis_size(names), bool) if present is None else jnp.asarray(present)
        here, count = varying(there, names)[axis_index(names)], jnp.sum(there)

        def changed(w, own):
            kind = accumulation_dtype(w.dtype)
            return jnp.where(here, w.astype(kind) - own.astype(kind), jnp.zeros((), kind))

        delta = jax.tree.map(
            changed, self.part.get(state.model), self.part.get(_beside(inner.model, state.model))
        )
        total, error = self._total(delta, state.error[self.k], here)
        mean = jax.tree.map(lambda x: x / jnp.maximum(count, 1).astype(x.dtype), total)
        return SentChanges(mean, count > 0, here[None]), error

    def _total(self, delta: PyTree, error: PyTree, here: Bool[Array, ""]) -> tuple[PyTree, PyTree]:
        if not isinstance(self.axis, ErrorFeedback):
            return Axis.of(self.axis).all_reduce(delta), error
        none = lambda x: jnp.zeros((), x.dtype)
        owed = jax.tree.map(
            lambda x: jnp.where(here, x, none(x)), error
        )  # who is away sends nothing, and keeps what it owes
        total, new = self.axis.all_reduce(delta, owed)
        return total, jax.tree.map(
            lambda x, before: x + jnp.where(here, none(x), before), new, error
        )

    def waiting(self, state: State, sent: tuple[SentChanges, PyTree]) -> State:
        """`state` with what was sent."""
        return eqx.tree_at(
            lambda state: (state.sent[self.k], state.error[self.k]),
            state,
            sent,
            is_leaf=lambda x: x is None,
        )

    def received(
        self, inner: Any, state: State, given: tuple[SentChanges, PyTree]
    ) -> tuple[Any, State]:
        """The outer weights after the outer optimizer's step, and those of each island that was
        there.
        """
        sent, error = given
        weights, own = self.part.get(state.model), self.part.get(_beside(inner.model, state.model))
        delta = jax.tree.map(lambda x, w: x.astype(w.dtype), sent.mean, weights)
        updates, moments = self.update(delta, state.optimizer[self.k], weights)
        chosen = lambda new, old: jax.tree.map(
            lambda a, b: jnp.where(sent.some, a.astype(b.dtype), b), new, old
        )
        weights = chosen(optax.apply_updates(weights, updates), weights)
        moments = chosen(moments, state.optimizer[self.k])
        taken = lambda new, old: jnp.where(sent.here[0], _mixed(new, old, self.mixing), old)
        mine = jax.tree.map(taken, weights, own)
        model = eqx.combine(self.part.put(_beside(inner.model, state.model), mine), inner.model)
        new = State(
            state.inner,
            self.part.put(state.model, weights),
            _with(state.optimizer, self.k, moments),
            _with(state.error, self.k, error),
            state.sent,
        )
        return eqx.tree_at(lambda inner: inner.model, inner, model), new


def _mixed(new: Array, old: Array, mixing: float) -> Array:
    """`mixing` of the island's own weights, the rest of the new ones."""
    return new if mixing == 0 else mixing * old + (1 - mixing) * new


def _with(items: tuple, k: int, item: Any) -> tuple:
    return (*items[:k], item, *items[k + 1 :])


def _beside(model: PyTree, like: PyTree) -> PyTree:
    """The leaves of `model` that are trained: where `like` has one."""
    found = dict(jax.tree.leaves_with_path(model))
    return jax.tree.map_with_path(lambda path, leaf: found[path], like)


def _when(predicate: Bool[Array, ""], change: Callable[[Any], Any], both: Any) -> Any:
    """Returns `change(both)` if the predicate, the same on all devices, is true; else `both`."""
    arrays, static = eqx.partition(both, trees.is_array)
    axes = jax.tree.map(varying_axes, arrays)

    def taken(arrays):
        new = eqx.filter(change(eqx.combine(arrays, static)), trees.is_array)
        return jax.tree.map(varying, new, axes)

    return eqx.combine(lax.cond(predicate, taken, lambda arrays: arrays, arrays), static)


def _own(inner: Any, names: tuple[str, ...]) -> Any:
    """This island's state, from its block [1, ...] of the stacked one."""

    def own(path, x):
        if x.ndim < 1 or x.shape[0] != 1:
            raise ValueError(
                "islands.local needs the state that islands.init makes, of [islands, ...] split "
                f"over {names}; on a device {trees.dotted(path)} is of shape {x.shape}, and its "
                "first dim must be 1."
            )
        return x[0]

    arrays, static = eqx.partition(inner, trees.is_array)
    number, rest = arrays.step, eqx.tree_at(lambda state: state.step, arrays, None)
    own_arrays = jax.tree.map_with_path(own, rest)
    return eqx.combine(
        eqx.tree_at(lambda state: state.step, own_arrays, number, is_leaf=lambda x: x is None),
        static,
    )


def _stacked(inner: Any, names: tuple[str, ...]) -> Any:
    stacked = _each(inner, lambda x: varying(x, names)[None])
    return eqx.tree_at(lambda state: state.step, stacked, inner.step)


def _each(tree: PyTree, change: Callable[[Array], Array]) -> PyTree:
    return jax.tree.map(lambda x: change(x) if trees.is_array(x) else x, tree)


def _alone(train: Step, names: tuple[str, ...]) -> Callable[..., Any]:
    """`train` as if there were one island: inside, no type says that values differ between islands.

    So whatever `train` does along the axes along which its values differ, such as the norm of its
    gradients, it does inside the island. The program is the same: types alone are changed.
    """

    def run(inner, batch, limit):
        _check_split(batch, names)
        hidden = lambda x: (
            replicated(x, over) if (over := tuple(set(names) & set(varying_axes(x)))) else x
        )
        arrays, static = eqx.partition((inner, batch, limit), trees.is_array)
        arrays = jax.tree.map(lambda x: hidden(jnp.asarray(x)), arrays)
        rests = []

        def traced(arrays):
            inner, batch, limit = eqx.combine(arrays, static)
            made, rest = eqx.partition(
                train(inner, batch) if limit is None else train(inner, batch, limit), trees.is_array
            )
            rests.append(rest)
            return made

        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(arrays)
        _check_alone(closed.jaxpr, names)
        leaves = jaxpr_as_fun(closed)(*jax.tree.leaves(arrays))
        inner, info = eqx.combine(jax.tree.unflatten(jax.tree.structure(shapes), leaves), rests[-1])
        number: Int[Array, ""] = inner.step
        apart = _each((inner, info), lambda x: varying(x, names))
        return eqx.tree_at(lambda state: state.step, apart[0], number), apart[1]

    return run


def _check_split(batch: PyTree, names: tuple[str, ...]) -> None:
    leaves = [leaf for leaf in jax.tree.leaves(batch) if trees.is_array(leaf)]
    if (
        axis_size(names) > 1
        and leaves
        and not any(set(names) <= set(varying_axes(leaf)) for leaf in leaves)
    ):
        raise ValueError(
            "islands.local: the batch is the same on all islands, so they would all train the "
            f"same. Split it over {names} too, such as by the spec P({(*names, 'data')!r})."
        )


def _check_alone(jaxpr: Any, names: tuple[str, ...]) -> None:
    """Refuse a train step that works along the axis of the islands."""
    for eqn in jaxprs.every(jaxpr):
        if any(set(names) & set(axes_of_type(aval)) for aval in jaxprs.types(eqn.outvars)):
            raise ValueError(
                f"islands.local: the train step works along {names} itself, by "
                f"{eqn.primitive.name} at {jaxprs.source(eqn)}, so the islands would talk in every "
                "step. Leave that axis out of its reductions: grads.averaged(grad, 'data'), not "
                f"over {(*names, 'data')!r}; islands.local joins the islands."
            )
