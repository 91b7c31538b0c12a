"""Islands that train separately, and an outer optimizer that applies their mean change every H
steps.

    train = islands.local(train, islands.outer_nesterov(), every=50, axis="island")

An island is a group of devices with a train step of its own, in any layout. After H steps, with
outer weights W and island i's weights w_i,

    delta = mean over the present islands of (W - w_i)
    W     = W + outer's update for the gradient delta
    w_i   = W

So delta is the outer optimizer's gradient: an update against delta moves W towards the islands'
weights. Between rounds nothing is sent between islands. Islands send 1/H of the bytes of data
parallelism; with `ErrorFeedback`, which sends int8, they send 1/(4H). A *fragment* is the part of
the model that a round exchanges. In the code, `inner` is the training state of this island, `state`
is the state of all islands (`State`, in state.py), `names` are the mesh axes of the islands, and
`present` says which islands take part in a round. An array [islands, ...] is split over the
islands, so a device has a part [1, ...] of it.

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

from parallax import jaxprs, source_lines, trees
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

# The arguments are a state, a batch, and optionally a limit and the islands that are present.
IslandStep = Callable[..., tuple[State, Info]]


def outer_nesterov(rate: float = 0.7, momentum: float = 0.9) -> optax.GradientTransformation:
    """Returns the outer optimizer of DiLoCo: SGD with Nesterov momentum. The default learning rate
    and the default momentum are those of the DiLoCo paper."""
    return optax.sgd(rate, momentum=momentum, nesterov=True)


def local(
    train: Step,
    outer: optax.GradientTransformation,
    *,
    every: int,
    axis: AxisLike | ErrorFeedback,
    stream: Stream = ALL_AT_ONCE,
) -> IslandStep:
    """Returns a step that runs `train` on each island, and lets islands exchange their changes once
    in `every` steps.

    The result is `step(state, batch, limit=None, present=None) -> (state, info)`, to run inside
    `mesh.spmd` on the state of `islands.init`. The arrays of `info` have a first dim of islands,
    and the spec `P(axis)`. The caller's spec must split the batch over the islands. `present` says
    which islands take part in a round that begins in this step: it is an array of bools [islands],
    the same on all devices, or None if all islands take part. The changes of the present islands
    are averaged; absent islands continue with their own weights until a later round. A round
    without present islands changes nothing. `limit` is passed to `train`, which skips a step whose
    loss is above `limit`.

    Args:
        train: the step of one island, such as `step.make` returns. The collectives of this step may
            go only over axes inside an island. A round changes the weights, and not the state of
            the step's optimizer: an optimizer that computes the weights from a copy in its state,
            such as `optax.contrib.schedule_free`, would undo the round.
        outer: the outer optimizer; if weights are split, it must act element by element.
        every: the number of steps between two rounds, H.
        axis: the axis of the islands: a name, or an axis with an algorithm for its collectives,
            such as `ring("island")`. With `ErrorFeedback(axis)`, the islands send int8.
        stream: the fragments that islands exchange, the delay until the results are used, and the
            mixing. In a round an island takes `mixing` times its own weights plus `1 - mixing`
            times the new weights. By default a round exchanges the whole model, without delay and
            without mixing.

    Raises:
        ValueError: `every` is below 1, the stream's delay is not below `every`, or its mixing is
            not from 0 to 1. When the step runs: `train` sends along the islands' axis, or uses a
            device's index on it; an array of the batch is the same on several islands; the state is
            not a state of islands; `present` is not one bool for each island; the fragments do not
            cover the model; or the outer optimizer mixes the elements of a leaf that is split.
    """
    if every < 1:
        raise ValueError(
            f"islands.local needs 1 step or more between rounds; got every={every}. Use every=50, "
            "or every=1 to exchange in each step."
        )
    if not 0 <= stream.delay < every:
        raise ValueError(
            f"islands.local needs a delay of 0 to {every - 1} steps, less than every={every}; got "
            f"{stream.delay}. Use a delay in this range, or a larger `every`."
        )
    if not 0 <= stream.mixing <= 1:
        raise ValueError(
            f"islands.local needs a mixing from 0 to 1; got {stream.mixing}. Use 0 to let islands "
            "take the outer weights."
        )
    # `checked` returns an `update` that refuses to mix the elements of a leaf that is split.
    # Without specs (`{}`), `checked` must assume that an axis may split any dim of a leaf.
    update, names = checked(with_extra(outer).update, {}, at="islands.local"), axis_names(axis)

    def step(state, batch, limit=None, present=None):
        """Returns the state and info after one step of each island, and after the rounds that are
        due in this step.

        `_local_state` drops the dim of islands from a device's arrays, and `_stacked` restores it.
        `_alone` runs `train` on one island, as if there were no others. `_when` changes the states
        only if a round is due. The arrays of `info` get a first dim of islands.
        """
        inner, info = _alone(train, names)(_local_state(state.inner, names), batch, limit)
        parts = fragments.checked_fragments(stream, state.model)
        if present is not None:
            present = _checked_present(jnp.asarray(present), axis_size(names))
        for k, part in enumerate(parts):
            # Each round of fragment k comes H k / F steps after a round of fragment 0 (F
            # fragments), so that the traffic is spread over the H steps.
            first = every * k // len(parts)
            exchange = _Round(part, k, update, axis, stream.mixing, present)
            is_due = _is_due(inner.step, first, every)
            # With a delay, a round starts in one step, and its result is used `delay` steps later.
            # Meanwhile the messages travel and the islands train on.
            if not stream.delay:
                inner, state = _when(is_due, exchange.at_once, (inner, state))
            else:
                inner, state = _when(is_due, exchange.start, (inner, state))
                # `_is_due` is false up to step 0, so a `finish` follows the `start` of its round.
                # If the exchange was dropped, as by `with_number_of_islands`, nothing changes.
                is_due = _is_due(inner.step - stream.delay, first, every)
                inner, state = _when(is_due, exchange.finish, (inner, state))
        state = eqx.tree_at(_inner, state, _stacked(inner, names))
        return state, _map_arrays(_with_island_dim, info)

    return step


def _is_due(number: Int[Array, ""], first: int, every: int) -> Bool[Array, ""]:
    """Returns whether step `number` is `first` plus a multiple of `every`, and is not step 0."""
    # At step 0 all islands are equal, and a round would send zeros.
    return (number > 0) & ((number - first) % every == 0)


def _with_island_dim(x: Array) -> Array:
    return x[None]


def _inner(state: Any) -> Any:
    return state.inner


class _Round(eqx.Module):
    """A round of fragment `k`. The method `sent` exchanges the islands' changes, and the method
    `received` makes the outer optimizer's step with the result. The methods take `inner`, this
    island's training state, and `state`, the `State` of all islands.

    Attributes:
        part: the fragment.
        k: the index of the fragment in `state.optimizer`, `state.error` and `state.sent`.
        update: the outer optimizer's `update`.
        axis: the axis of the islands, or `ErrorFeedback(axis)` for an exchange in int8.
        mixing: the factor of an island's own weights in a round; the factor of the new weights is
            `1 - mixing`.
        present: for each island, whether it takes part in this round; None if all islands do.
    """

    part: Fragment
    k: int
    update: Callable[..., Any]
    axis: Any
    mixing: float
    present: Bool[Array, " islands"] | None

    def at_once(self, states: tuple[Any, State]) -> tuple[Any, State]:
        """Returns `(inner, state)` after a whole round: an exchange, and a step of the outer
        optimizer with the exchange's result."""
        inner, state = states
        return self.received(inner, state, *self.sent(inner, state))

    def start(self, states: tuple[Any, State]) -> tuple[Any, State]:
        """Returns `(inner, state)` after an exchange.

        The weights do not change yet: the exchange's result and the new rounding errors are stored
        in `state`, and `finish` uses the result in a later step.
        """
        inner, state = states

        def stored(state):
            """Returns the two entries of `state` that `start` replaces: the result of an exchange
            of fragment `self.k`, in the field `sent`, and the rounding error, in `error`."""
            return state.sent[self.k], state.error[self.k]

        # The method `sent` makes the exchange. Without rounding to int8 there is no error, so None
        # must count as a leaf.
        return inner, eqx.tree_at(stored, state, self.sent(inner, state), is_leaf=_is_none)

    def finish(self, states: tuple[Any, State]) -> tuple[Any, State]:
        """Returns `(inner, state)` after a step of the outer optimizer with the exchange's result,
        which `start` stored in `state`."""
        inner, state = states
        sent = state.sent[self.k]
        # With a delay, the state has such a result for each fragment; `k` is this fragment's index.
        assert sent is not None
        return self.received(inner, state, sent, state.error[self.k])

    def sent(self, inner: Any, state: State) -> tuple[SentChanges, PyTree]:
        """Exchanges the islands' changes of this round's fragment of the model. The change of
        island i is the outer weights W minus the island's weights w_i.

        Returns two things: a `SentChanges`, with the mean change of the islands that take part in
        the round, and this island's new rounding error, None unless the exchange rounds to int8.
        """
        names = axis_names(self.axis)
        everyone = jnp.ones(axis_size(names), bool)
        present = everyone if self.present is None else self.present
        # `present` is [islands] and the same on all devices. `varying` changes only its type, so
        # that each device may read the entry of its own island.
        is_present, count = varying(present, names)[axis_index(names)], jnp.sum(present)

        def changed(outer, local):
            """Returns the outer weights minus this island's weights, for one leaf. Returns zeros
            if this island does not take part in the round."""
            # The two numbers are near each other: in bfloat16 the difference would lose most of
            # its bits, so it is taken in a wider type.
            kind = accumulation_dtype(outer.dtype)
            change = outer.astype(kind) - local.astype(kind)
            return jnp.where(is_present, change, jnp.zeros((), kind))

        # `part.get` returns only the leaves of this round's fragment.
        local_weights = self.part.get(_trained(inner.model, state.model))
        delta = jax.tree.map(changed, self.part.get(state.model), local_weights)
        total, error = self._total(delta, state.error[self.k], is_present)
        # Without present islands, total and count are 0. The divisor is at least 1, since 0 / 0
        # would be NaN.
        mean = jax.tree.map(lambda x: x / jnp.maximum(count, 1).astype(x.dtype), total)
        # The field `present` is split over the islands: a device stores only its island's entry.
        return SentChanges(mean, count > 0, is_present[None]), error

    def _total(
        self, delta: PyTree, error: PyTree, is_present: Bool[Array, ""]
    ) -> tuple[PyTree, PyTree]:
        """Returns the sum of the islands' changes, and this island's new rounding error.

        Args:
            delta: this island's change, a tree of arrays.
            error: this island's rounding error from the last exchange; None unless the exchange
                rounds to int8.
            is_present: whether this island takes part. If not, its `delta` is 0.
        """
        if not isinstance(self.axis, ErrorFeedback):
            return Axis.of(self.axis).all_reduce(delta), error

        # `all_reduce` adds the given error to the change, and returns the new rounding error. An
        # absent island must send zeros: it passes an error of 0, and keeps its own error for later.
        def error_to_send(x):
            return jnp.where(is_present, x, jnp.zeros((), x.dtype))

        # `new` is not 0 on an absent island: its devices add up and round parts of the sum too.
        def error_after(new, before):
            return new + jnp.where(is_present, jnp.zeros((), before.dtype), before)

        total, new = self.axis.all_reduce(delta, jax.tree.map(error_to_send, error))
        return total, jax.tree.map(error_after, new, error)

    def received(
        self, inner: Any, state: State, sent: SentChanges, error: PyTree
    ) -> tuple[Any, State]:
        """Returns `(inner, state)` after a step of the outer optimizer with the mean change
        `sent.mean`.

        Only the weights of the fragment `self.part` change: `part.get` takes them out of a model,
        and `part.put` puts the new ones into the model. `sent.some` says whether any island was
        present, and `sent.present` whether this island was. Each present island takes the new outer
        weights, mixed with its own weights if `mixing` is not 0. If no island was present, no
        weights change. `error` is the rounding error to store in `state`.
        """

        def if_any_present(new, old):
            return jnp.where(sent.some, new.astype(old.dtype), old)

        # `sent.present` is [islands], split over the islands: it has one entry on this device.
        def if_present(new, old):
            return jnp.where(sent.present[0], _mixed(new, old, self.mixing), old)

        weights = self.part.get(state.model)
        # `outer.init` took the weights, so the outer optimizer gets gradients of the same types.
        delta = jax.tree.map(lambda x, w: x.astype(w.dtype), sent.mean, weights)
        updates, moments = self.update(delta, state.optimizer[self.k], weights)
        # Momentum would move the weights even if the mean change is zero. So if no island was
        # present, the old weights and the old momentum are kept.
        weights = jax.tree.map(if_any_present, optax.apply_updates(weights, updates), weights)
        moments = jax.tree.map(if_any_present, moments, state.optimizer[self.k])
        # The island's own weights; `combine` takes the leaves that are not trained from its model.
        own = _trained(inner.model, state.model)
        own_part = jax.tree.map(if_present, weights, self.part.get(own))
        model = eqx.combine(self.part.put(own, own_part), inner.model)
        # The fields of `State` are inner, model, optimizer, error, sent. The new inner state is
        # returned beside the `State`; the function `local` of this file puts it in at the end.
        new = State(
            state.inner,
            self.part.put(state.model, weights),
            _with(state.optimizer, self.k, moments),
            _with(state.error, self.k, error),
            state.sent,
        )
        return eqx.tree_at(lambda inner: inner.model, inner, model), new


def _checked_present(present: Array, islands: int) -> Bool[Array, " islands"]:
    """Returns `present`. Raises `ValueError` unless it has one bool for each island."""
    # An index outside the array would read its last entry, so a shorter one gives no error.
    if present.shape != (islands,) or present.dtype != bool:
        raise ValueError(
            f"islands.local needs `present` with one bool for each of the {islands} islands, the "
            f"same on all devices; got {present.dtype}{list(present.shape)}. Pass an array "
            f"bool[{islands}] with the spec P(), or None if all islands take part."
        )
    return present


def _mixed(new: Array, old: Array, mixing: float) -> Array:
    """Returns `mixing * old + (1 - mixing) * new`, for a leaf of the model."""
    # If mixing is 0, the old weights must not be used: 0 times an infinite weight would be NaN.
    return new if mixing == 0 else mixing * old + (1 - mixing) * new


def _with(items: tuple, k: int, item: Any) -> tuple:
    """Returns the tuple `items` with `item` in place of the item at the index `k`."""
    return (*items[:k], item, *items[k + 1 :])


def _trained(model: PyTree, outer: PyTree) -> PyTree:
    """Returns the leaves of an island's `model` that the outer optimizer trains: those at the paths
    of `outer`, the outer weights. Other leaves are None.
    """
    leaves = dict(jax.tree.leaves_with_path(model))
    return jax.tree.map_with_path(lambda path, leaf: leaves[path], outer)


def _when(predicate: Bool[Array, ""], change: Callable[[Any], Any], states: Any) -> Any:
    """Returns `change(states)` if `predicate` is true, else `states`.

    The predicate must be the same on all devices, since `change` may have collectives that all
    devices must run.
    """
    # Both branches of a `cond` must return the same types, also the same varying axes. So the
    # arrays after `change` are cast to the varying axes that they had before.
    arrays, static = eqx.partition(states, trees.is_array)
    axes = jax.tree.map(varying_axes, arrays)

    def changed(arrays):
        """Returns the arrays after `change`, typed as varying along the same axes as before."""
        new = eqx.filter(change(eqx.combine(arrays, static)), trees.is_array)
        return jax.tree.map(varying, new, axes)

    return eqx.combine(lax.cond(predicate, changed, lambda arrays: arrays, arrays), static)


def _local_state(inner: Any, names: tuple[str, ...]) -> Any:
    """Returns this island's state, without the dim of islands. The arrays of `inner` are
    [islands, ...] and split over the islands, so they are [1, ...] on this device.

    The number of the step has no dim of islands. `names` are the axes of the islands, for the error
    message.
    """

    def without_island_dim(path, x):
        """Returns a leaf [1, ...] without its first dim."""
        if x.ndim < 1 or x.shape[0] != 1:
            raise ValueError(
                "islands.local needs the state that islands.init makes, with arrays [islands, ...] "
                f"split over {names}. On each device the first dim of an array must have size 1, "
                f"but {trees.dotted(path)} has the shape {x.shape} on a device."
            )
        return x[0]

    arrays, static = eqx.partition(inner, trees.is_array)
    # The step's number has no dim of islands: it is left out here and put back below.
    stacked = eqx.tree_at(_step_of, arrays, None)
    local_arrays = jax.tree.map_with_path(without_island_dim, stacked)
    local_arrays = eqx.tree_at(_step_of, local_arrays, arrays.step, is_leaf=_is_none)
    return eqx.combine(local_arrays, static)


def _stacked(inner: Any, names: tuple[str, ...]) -> Any:
    """Returns this island's state as arrays [1, ...], typed as varying along `names`. Only the
    number of the step stays as it is, without a dim of islands.

    `_stacked` is the inverse of `_local_state`.
    """
    stacked = _map_arrays(lambda x: varying(x, names)[None], inner)
    return eqx.tree_at(_step_of, stacked, inner.step)


def _step_of(state: Any) -> Any:
    return state.step


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _map_arrays(change: Callable[[Array], Array], tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: change(x) if trees.is_array(x) else x, tree)


def _alone(train: Step, names: tuple[str, ...]) -> Callable[..., Any]:
    """Returns a function that runs `train` on one island, as if there were no others: inside
    `train`, no type varies along `names`, the axes of the islands.

    A train step sums over the axes along which its values vary, for example for the norm of its
    gradients. Without the islands' axis in the types, the step sums inside the island only. No
    operation is added: only types change.
    """

    def hidden(x):
        """Returns `x` without the islands' axis in its type, as if it were equal on all islands."""
        axes = tuple(name for name in varying_axes(x) if name in names)
        return replicated(x, axes) if axes else x

    def run(inner, batch, limit):
        """Returns the island's state and info after `train`. All returned arrays, except the number
        of the step, are typed as varying along the axes of the islands.

        `train` is traced to a jaxpr, whose arguments and results are arrays. So leaves that are no
        arrays are kept apart, in `static` and `static_results`. If `limit` is not None, `train`
        gets it as a third argument: the loss above which a step changes nothing.
        """
        _check_split(batch, names)  # refuses islands that would train on the same data
        arrays, static = eqx.partition((inner, batch, limit), trees.is_array)
        arrays = jax.tree.map(lambda x: hidden(jnp.asarray(x)), arrays)
        static_results = []

        def traced(arrays):
            """Returns the arrays among the results of `train`. The other leaves are appended to
            `static_results`."""
            inner, batch, limit = eqx.combine(arrays, static)
            results = train(inner, batch) if limit is None else train(inner, batch, limit)
            result_arrays, static_part = eqx.partition(results, trees.is_array)
            static_results.append(static_part)
            return result_arrays

        # The jaxpr is checked before it runs: it must not send along the islands' axis.
        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(arrays)
        _check_alone(closed.jaxpr, names)
        leaves = jaxpr_as_fun(closed)(*jax.tree.leaves(arrays))
        # `leaves` are the arrays of the results. `make_jaxpr` has called `traced`, which has
        # appended the other leaves to `static_results`.
        results = jax.tree.unflatten(jax.tree.structure(shapes), leaves)
        inner, info = eqx.combine(results, static_results[-1])
        # The number of the step decides whether a round is due. All devices must decide alike, so
        # its type must not vary. The cast makes all arrays varying; then `number`, which was taken
        # before the cast, replaces the cast number.
        number: Int[Array, ""] = inner.step
        inner, info = _map_arrays(lambda x: varying(x, names), (inner, info))
        return eqx.tree_at(_step_of, inner, number), info

    return run


def _check_split(batch: PyTree, names: tuple[str, ...]) -> None:
    """Raises `ValueError` if islands would train on the same data.

    At least one array of the batch must vary along all axes of the islands. An array that varies
    along any axis of the mesh must also vary along all axes of the islands. An array that is the
    same on all devices, such as a table, is accepted. If there is only one island, or if the batch
    has no arrays, nothing is raised.
    """
    leaves = [leaf for leaf in jax.tree.leaves(batch) if trees.is_array(leaf)]
    if axis_size(names) == 1 or not leaves:
        return
    split = [leaf for leaf in leaves if varying_axes(leaf)]
    for leaf in split or leaves:
        missing = [name for name in names if name not in varying_axes(leaf)]
        if missing:
            raise ValueError(
                f"islands.local: an array of the batch, {leaf.dtype}{list(leaf.shape)}, is the "
                f"same along {missing}, so islands would train on the same data. Split it over "
                f"{names} too, such as by the spec P({(*names, 'data')!r})."
            )


def _check_alone(jaxpr: Any, names: tuple[str, ...]) -> None:
    """Raises `ValueError` if a train step makes a value that varies along the islands' axis.

    The step's arguments do not vary along that axis, since `_alone` has removed the axis from their
    types. So a value that varies shows that an operation of the step itself uses the axis.
    """
    for eqn in jaxprs.every(jaxpr):
        if any(set(names) & set(axes_of_type(aval)) for aval in jaxprs.types(eqn.outvars)):
            raise ValueError(
                f"islands.local: the train step itself uses the axes {names} of the islands, in "
                f"{eqn.primitive.name} at {source_lines.source(eqn)}. Only islands.local may use "
                "these axes: the islands must not communicate in every step. Leave these axes out "
                "of the step's reductions: write grads.averaged(grad, 'data'), not "
                f"grads.averaged(grad, {(*names, 'data')!r}). islands.local itself averages over "
                "the islands."
            )
