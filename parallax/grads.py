"""From one grad arrow to the next: the same gradients from smaller pieces, averaged over devices, or scaled down.

A grad arrow is `(params, batch) -> (loss, gradients)`, as `jax.value_and_grad` and `eqx.filter_value_and_grad` make it. With
`has_aux=True` it is `(params, batch) -> ((loss, aux), gradients)`, and `aux`, a tree of arrays, goes through every wrapper.
A leaf that is not trained has a gradient of None. The order of wrapping is the cost: `averaged` outside `accumulated` reduces
once a step, inside it once a microbatch.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from parallax import bisect, mesh
from parallax.collectives import Axis, AxisLike, joined, types, xla
from parallax.collectives.cpu import ordered
from parallax.collectives.types import linear, varying, varying_axes, wide
from parallax.typed import PyTree

Loss = Float[Array, ""]
Grad = Callable[[PyTree, PyTree], tuple[Loss | tuple[Loss, PyTree], PyTree]]
Tree = TypeVar("Tree", bound=PyTree)


def mean_of_parts(aux: Tree) -> Tree:
    """The mean over the first dim, the microbatches, of each array. That of integers is a floating-point number."""
    return jax.tree.map_with_path(lambda path, leaf: jnp.mean(_number(path, leaf), axis=0), aux)


def mean_of_devices(aux: Tree, axis: Axis) -> Tree:
    """The mean over those of the axes along which an array differs, summed in float32 or wider. Other leaves stay."""

    def mean(path, leaf):
        over = axis.over(varying_axes(leaf) if mesh.is_array(leaf) else ())
        if not over.names:
            return leaf
        number = _number(path, leaf)
        return over.all_mean(number.astype(wide(number.dtype))).astype(number.dtype)

    return jax.tree.map_with_path(mean, aux)


def _number(path: Sequence[Any], leaf: Array) -> Array:
    """An auxiliary value as floating-point numbers."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ValueError(
            f"The auxiliary value {mesh.dotted(path) or 'itself'} is of type {leaf.dtype}, which has no mean. Leave it out, or "
            "join it by a function of your own: aux=... of grads.accumulated and grads.averaged."
        )
    return leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf.astype(jnp.result_type(float))


def accumulated(grad: Grad, *, microbatches: int, aux: Callable[[Any], Any] = mean_of_parts) -> Grad:
    """`grad` of the whole batch, from `microbatches` equal parts one after another: memory for one part at a time.

    It equals `grad` where the loss is a mean over the batch. Every leaf of the batch has the batch as its first dim, and
    the parts are cut from it in order. Sums are kept, and returned, in float32, or in the gradients' own type where that is
    wider.

    Args:
        grad: a grad arrow.
        microbatches: the number of parts.
        aux: what becomes of auxiliary values, which come stacked, `[microbatches, ...]` each.

    Raises:
        ValueError: a leaf's first dim does not divide by `microbatches`.
    """
    if microbatches < 1:
        raise ValueError(f"accumulated needs microbatches of 1 or more; got {microbatches}.")

    def wrapped(params, batch):
        parts = in_parts(batch, microbatches)

        def add(sums, each):
            part, microbatch = each
            with bisect.at(microbatch=microbatch):
                value, gradients = grad(params, part)
            return jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, gradients), value

        shapes = jax.eval_shape(lambda: grad(params, jax.tree.map(lambda leaf: leaf[0], parts))[1])
        zeros = jax.tree.map(lambda g: jnp.zeros_like(g, dtype=wide(g.dtype)), shapes)
        sums, values = lax.scan(add, zeros, (parts, bisect.numbered(microbatches)))
        value = on_parts(values, jnp.mean, aux)
        return value, jax.tree.map(lambda total: total / microbatches, sums)

    return wrapped


def averaged(
    grad: Grad,
    axis: AxisLike,
    *,
    aux: Callable[[Any, Axis], Any] = mean_of_devices,
    made: Callable[[Any], Any] | None = None,
) -> Grad:
    """The mean of `grad` over the devices of `axis`, among which the batch is split: data parallelism.

    The parameters are declared varying before `grad` differentiates, so that its gradients stay local, and are then reduced
    once, by the mover of `axis`: `A {U_X} -> A`. A parameter that is split over some of the axes already (ZeRO-3, experts) has
    a gradient that is summed along those: it is summed over the others alone. Each is divided by the size of all of them.

    Args:
        grad: a grad arrow.
        axis: the axis, or the axes, that split the batch.
        aux: what becomes of auxiliary values: a function of them and of `axis`.
        made: picks the part of the parameters whose gradients `grad` sums itself, where it makes them: see `as_made`.
    """
    axis = Axis.of(axis)
    sums = summed(grad, axis, loss=True, aux=aux, made=made)

    def wrapped(params, batch):
        n = axis.size()
        value, gradients = sums(params, batch)
        return on_parts(value, lambda loss: loss / n, lambda aux: aux), jax.tree.map(lambda g: g / n, gradients)

    return wrapped


def summed(
    grad: Grad,
    axis: AxisLike,
    *,
    loss: bool = False,
    aux: Callable[[Any, Axis], Any] = mean_of_devices,
    made: Callable[[Any], Any] | None = None,
) -> Grad:
    """`grad`, its gradients summed over `axis` where all devices have the parameter: `A {U_X} -> A`.

    For devices that each compute a part of one loss, as in sequence parallelism, where a norm sees some of the tokens. The
    parameters are declared varying first, so that their gradients stay local until this one all-reduce. With `loss`, the
    losses are parts as well, and are summed too. `aux` and `made` as in `averaged`.
    """

    axis = Axis.of(axis)

    def wrapped(params, batch):
        _try_out(grad, params, batch, axis)
        with _set(DECLARED, DECLARED.get() | set(axes_of(axis))):
            declared = varying(params, axis.names)
            given = declared if made is None else eqx.tree_at(made, declared, made(params))
            value, gradients = grad(given, batch)
        local = lambda g, w: {*varying_axes(g), *varying_axes(w)}  # what was not declared varying may be summed already
        names = lambda g, w, own: tuple(name for name in missing(own, axis) if name in local(g, w))
        over = jax.tree.map(names, gradients, beside(gradients, given), beside(gradients, params))
        over_loss = axes_of(axis) if loss else ()
        own = value[0] if isinstance(value, tuple) else value
        total, sums = reduced((own, gradients), (over_loss, over), axis)
        return on_parts(value, lambda _: total, lambda values: aux(ordered(values, (total, sums)), axis)), sums

    return wrapped


def as_made(function: Callable[..., Any], axis: AxisLike) -> Callable[..., Any]:
    """`function(params, ...)`, the gradients of whose parameters are summed over `axis` where they are made: `A {U_X} -> A`.

    Round a block that a loop runs, each layer's gradients are all-reduced in the loop of the backward pass, where the work of
    the layers before it can hide the messages; at the end nothing is left to hide them. It moves what `averaged` does at the
    end, leaf by leaf, and in every microbatch: wrap no grad arrow in `accumulated` that has it inside. `averaged` must leave
    these parameters to it:

        block = grads.as_made(block, ring("data"))
        grad = grads.averaged(jax.value_and_grad(loss), ring("data"), made=lambda model: model.blocks)

    Without one of the two the gradients are the same, summed at the end or by `jax.lax`. Sums are taken in float32 or wider, and
    rounded to the type that the block computes in.

    Args:
        function: a block; its first argument is the tree of parameters, which all devices of `axis` have alike.
        axis: the axis, or the axes, that split the batch. A parameter that differs along some of them is summed over the others.
    """
    axis = Axis.of(axis)

    def handed(w):
        names = missing(w, axis) if eqx.is_inexact_array(w) else ()
        over = axis.over(names)
        total = lambda ct: over.all_reduce(ct.astype(wide(ct.dtype))).astype(ct.dtype)
        return linear(w, forward=lambda w: varying(w, names), backward=total) if names else w

    return lambda params, *arguments: function(jax.tree.map(handed, params), *arguments)


class NotGathered(ValueError):
    """A parameter is used as if it were whole, and it is a share."""


# While a program is traced: the axes along which an arrow has declared all parameters varying, and those along which their
# types tell which of them differ.
DECLARED: ContextVar[frozenset[str]] = ContextVar("DECLARED", default=frozenset())
TELLING: ContextVar[frozenset[str]] = ContextVar("TELLING", default=frozenset())


@contextlib.contextmanager
def _set(variable: ContextVar[frozenset[str]], value: frozenset[str]) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _try_out(grad: Grad, params: PyTree, batch: PyTree, axis: Axis) -> None:
    """Trace `grad` of the parameters as they are, where some are shares along `axis`, so that `NotGathered` can be raised.

    Nothing else is: what another error says, the trace that counts says better.
    """
    arrays, static = eqx.partition((params, batch), mesh.is_array)
    telling = frozenset(axes_of(axis)) - DECLARED.get()
    if TELLING.get() or not any(telling & set(varying_axes(leaf)) for leaf in jax.tree.leaves(arrays[0])):
        return
    with _set(TELLING, telling):
        try:
            jax.eval_shape(lambda arrays: grad(*eqx.combine(arrays, static)) and None, arrays)
        except NotGathered:
            raise
        except (TypeError, ValueError):
            return


def axes_of(axis: Axis) -> tuple[str, ...]:
    """The names of an axis, always as a tuple."""
    return types.axes(axis.names)


def missing(x: Array, axis: Axis) -> tuple[str, ...]:
    """The axes of `axis` along which `x` is the same."""
    return tuple(name for name in axes_of(axis) if name not in varying_axes(x))


def reduced(tree: Tree, over: PyTree, axis: Axis, after: PyTree = ()) -> Tree:
    """Each leaf of `tree` summed over its own axes: `over` has a tuple of their names, some of those of `axis`, in its place."""
    leaves, structure = jax.tree.flatten(tree)
    names = structure.flatten_up_to(over)
    done: PyTree = tree, after
    for each in sorted(set(names), key=len, reverse=True):
        if each:
            chosen = [i for i, own in enumerate(names) if own == each]
            sums = axis.over(each).all_reduce(ordered([leaves[i] for i in chosen], done))
            done = sums, after
            for i, total in zip(chosen, sums, strict=True):
                leaves[i] = total
    return jax.tree.unflatten(structure, leaves)


def beside(gradients: PyTree, params: PyTree) -> PyTree:
    """The parameters of these gradients, in their structure: those without a gradient are left out.

    Raises:
        ValueError: a gradient is at a path where `params` has no array.
    """
    found = dict(jax.tree.leaves_with_path(params))

    def own(path, gradient):
        if path not in found:
            raise ValueError(
                f"The gradients have a leaf {mesh.dotted(path)!r}, and the parameters have none there. A grad arrow returns a "
                f"tree like the parameters, with None for what is not trained; eqx.filter_value_and_grad gives one."
            )
        if not mesh.is_array(found[path]):
            raise ValueError(
                f"The gradients have a leaf {mesh.dotted(path)!r}, and that parameter is {found[path]!r}, which is no array, so "
                "it is not trained. Take eqx.filter_value_and_grad, whose gradient is None there; to train it, make it an array."
            )
        return found[path]

    return jax.tree.map_with_path(own, gradients)


def on_parts(value: PyTree, on_loss: Callable[[Any], Any], on_aux: Callable[[Any], Any]) -> PyTree:
    """What a grad arrow returns beside the gradients, a loss or `(loss, aux)`, with a function on each."""
    return (on_loss(value[0]), on_aux(value[1])) if isinstance(value, tuple) else on_loss(value)


def varies(x: Array, axis: AxisLike) -> bool:
    """Whether `x` may differ between devices along every one of the axes."""
    return set(types.axes(Axis.of(axis).names)) <= set(varying_axes(x))


def clipped(grad: Grad, max_norm: float, *, axes: Sequence[AxisLike] = ()) -> Grad:
    """`grad` with its gradients scaled down, where needed, to a global norm of `max_norm`, over all their shards.

    Wrap it round `averaged`, since it takes gradients that vary along an axis to be shards of larger ones. `axes` as in `norm`.
    """

    def wrapped(params, batch):
        value, gradients = grad(params, batch)
        return value, scaled(gradients, norm(gradients, axes=axes), max_norm)

    return wrapped


def norm(gradients: PyTree, *, axes: Sequence[AxisLike] = ()) -> Float[Array, ""]:
    """The Euclidean norm of a whole tree whose leaves may be shards, the same on all devices.

    A leaf that varies along some axes is a shard over them, and its sum of squares is all-reduced over exactly those: one
    scalar for each set of axes in use. Squares are summed in float32 or wider. `axes` say who moves data along them; along any
    other axis `jax.lax` does.
    """
    movers = {name: over.mover for over in map(Axis.of, axes) for name in types.axes(over.names)}
    squares = {}
    if not jax.tree.leaves(gradients):
        raise ValueError(
            "grads.norm needs at least one gradient, and all of them are None: nothing is trained. A grad arrow returns an array "
            "for each leaf that is, as eqx.filter_value_and_grad does for arrays of floating-point numbers."
        )
    for leaf in jax.tree.leaves(gradients):
        x = leaf.astype(wide(leaf.dtype))
        split = varying_axes(leaf)
        squares[split] = squares.get(split, 0.0) + jnp.sum(jnp.real(x * jnp.conj(x)))
    over = lambda split: joined(*(movers.get(name, xla)(name) for name in split))
    sums = [over(split).all_reduce(square) if split else square for split, square in squares.items()]
    return jnp.sqrt(sum(sums[1:], start=sums[0]))


def scaled(gradients: Tree, norm: Float[Array, ""], max_norm: float) -> Tree:
    """`gradients`, of global norm `norm`, times min(1, max_norm / norm)."""
    factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), gradients)


def in_parts(batch: Tree, microbatches: int) -> Tree:
    """`batch` with each leaf's first dim, the sequences, as `[microbatches, sequences in one]`, in order.

    Raises:
        ValueError: a leaf's first dim does not divide by `microbatches`.
    """

    def split(path, leaf):
        if not jnp.ndim(leaf):
            raise ValueError(
                f"The batch's leaf {jax.tree_util.keystr(path) or 'itself'} is a scalar, and every leaf has the sequences as its "
                "first dim. Broadcast it to one number a sequence, or let the loss close over it."
            )
        if leaf.shape[0] % microbatches:
            raise ValueError(
                f"The batch's leaf {jax.tree_util.keystr(path) or 'itself'} has {leaf.shape[0]} rows on each device, which must "
                f"divide by microbatches={microbatches}. Take a batch that is a multiple of it, or fewer microbatches."
            )
        return leaf.reshape(microbatches, -1, *leaf.shape[1:])

    return jax.tree.map_with_path(split, batch)
