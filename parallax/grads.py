"""From one grad arrow to the next: the same gradients from smaller pieces, averaged over devices, or scaled down.

A grad arrow is `(params, batch) -> (loss, gradients)`, as `jax.value_and_grad` and `eqx.filter_value_and_grad` make it.
The order of wrapping is the cost: `averaged` outside `accumulated` reduces once a step, inside it once a microbatch.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from parallax import precision
from parallax.collectives import Axis, AxisLike, joined, types, xla
from parallax.collectives.cpu import ordered
from parallax.collectives.types import varying, varying_axes
from parallax.typed import PyTree

Grad = Callable[[PyTree, PyTree], tuple[Float[Array, ""], PyTree]]
Tree = TypeVar("Tree", bound=PyTree)


def accumulated(grad: Grad, *, microbatches: int) -> Grad:
    """`grad` of the whole batch, from `microbatches` equal parts one after another: memory for one part at a time.

    It equals `grad` where the loss is a mean over the batch. Every leaf of the batch has the batch as its first dim, and
    the parts are cut from it in order. Sums are kept, and returned, in float32, or in the gradients' own type where that is
    wider.

    Raises:
        ValueError: a leaf's first dim does not divide by `microbatches`.
    """
    if microbatches < 1:
        raise ValueError(f"accumulated needs microbatches of 1 or more; got {microbatches}.")

    def wrapped(params, batch):
        parts = in_parts(batch, microbatches)

        def add(sums, part):
            loss, gradients = grad(params, part)
            return jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, gradients), loss

        shapes = jax.eval_shape(lambda: grad(params, jax.tree.map(lambda leaf: leaf[0], parts))[1])
        zeros = jax.tree.map(lambda g: jnp.zeros_like(g, dtype=precision.wide(g.dtype)), shapes)
        sums, losses = lax.scan(add, zeros, parts)
        return jnp.mean(losses), jax.tree.map(lambda total: total / microbatches, sums)

    return wrapped


def averaged(grad: Grad, axis: AxisLike) -> Grad:
    """The mean of `grad` over the devices of `axis`, among which the batch is split: data parallelism.

    The parameters are declared varying before `grad` differentiates, so that its gradients stay local, and are then reduced
    once, by the mover of `axis`: `A {U_X} -> A`. A parameter that is split over `axis` already (ZeRO-3) has a gradient that its
    gather's transpose has summed: it is divided only.
    """
    axis = Axis.of(axis)
    sums = summed(grad, axis, loss=True)

    def wrapped(params, batch):
        n = axis.size()
        return jax.tree.map(lambda leaf: leaf / n, sums(params, batch))

    return wrapped


def summed(grad: Grad, axis: AxisLike, *, loss: bool = False) -> Grad:
    """`grad`, its gradients summed over `axis` where all devices have the parameter: `A {U_X} -> A`.

    For devices that each compute a part of one loss, as in sequence parallelism, where a norm sees some of the tokens. The
    parameters are declared varying first, so that their gradients stay local until this one all-reduce. With `loss`, the
    losses are parts as well, and are summed too.
    """

    axis = Axis.of(axis)

    def wrapped(params, batch):
        same = jax.tree.map(lambda w: not varies(w, axis), eqx.filter(params, eqx.is_inexact_array))
        local = grad(varying(params, axis.names), batch)
        parts, done = eqx.partition(local, (loss, same))
        return eqx.combine(axis.all_reduce(ordered(parts, local)), done)

    return wrapped


def varies(x: Array, axis: AxisLike) -> bool:
    """Whether `x` may differ between devices along every one of the axes."""
    return set(types.axes(Axis.of(axis).names)) <= set(varying_axes(x))


def clipped(grad: Grad, max_norm: float, *, axes: Sequence[AxisLike] = ()) -> Grad:
    """`grad` with its gradients scaled down, where needed, to a global norm of `max_norm`, over all their shards.

    Wrap it round `averaged`, since it takes gradients that vary along an axis to be shards of larger ones. `axes` as in `norm`.
    """

    def wrapped(params, batch):
        loss, gradients = grad(params, batch)
        return loss, scaled(gradients, norm(gradients, axes=axes), max_norm)

    return wrapped


def norm(gradients: PyTree, *, axes: Sequence[AxisLike] = ()) -> Float[Array, ""]:
    """The Euclidean norm of a whole tree whose leaves may be shards, the same on all devices.

    A leaf that varies along some axes is a shard over them, and its sum of squares is all-reduced over exactly those: one
    scalar for each set of axes in use. Squares are summed in float32 or wider. `axes` say who moves data along them; along any
    other axis `jax.lax` does.
    """
    movers = {name: over.mover for over in map(Axis.of, axes) for name in types.axes(over.names)}
    squares = {}
    for leaf in jax.tree.leaves(gradients):
        wide = leaf.astype(precision.wide(leaf.dtype))
        split = varying_axes(leaf)
        squares[split] = squares.get(split, 0.0) + jnp.sum(jnp.real(wide * jnp.conj(wide)))
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
        if leaf.shape[0] % microbatches:
            raise ValueError(
                f"The batch's leaf {jax.tree_util.keystr(path) or 'itself'} has {leaf.shape[0]} rows on each device, which must "
                f"divide by microbatches={microbatches}. Take a batch that is a multiple of it, or fewer microbatches."
            )
        return leaf.reshape(microbatches, -1, *leaf.shape[1:])

    return jax.tree.map_with_path(split, batch)
