"""From one grad arrow to the next: the same gradients from smaller pieces, averaged over devices, or scaled down.

A grad arrow is `(params, batch) -> (loss, gradients)`, as `jax.value_and_grad` and `eqx.filter_value_and_grad` make it. With
`has_aux=True` it is `(params, batch) -> ((loss, aux), gradients)`, and `aux`, a tree of arrays, goes through every wrapper.
A leaf that is not trained has a gradient of None. The order of wrapping is the cost: `averaged` outside `accumulated` reduces
once a step, inside it once a microbatch.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array, Float

from parallax import jaxprs, taps, trees
from parallax.collectives import types
from parallax.collectives.axis import Axis, AxisLike, joined, xla
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
        over = axis.over(varying_axes(leaf) if trees.is_array(leaf) else ())
        if not over.names:
            return leaf
        number = _number(path, leaf)
        return over.all_mean(number.astype(wide(number.dtype))).astype(number.dtype)

    return jax.tree.map_with_path(mean, aux)


def _number(path: Sequence[Any], leaf: Array) -> Array:
    """An auxiliary value as floating-point numbers."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ValueError(
            f"The auxiliary value {trees.dotted(path) or 'itself'} is of type {leaf.dtype}, which has no mean. Leave it out, or "
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
        ValueError: the leaves' first dims differ, or do not divide by `microbatches`; or `grad` is `clipped`.
    """
    if microbatches < 1:
        raise ValueError(f"accumulated needs microbatches of 1 or more; got {microbatches}.")

    def wrapped(params, batch):
        if microbatches > 1:
            refuse_clipped(grad, "grads.accumulated", "the gradients of each microbatch")
        parts = split_into_microbatches(batch, microbatches)

        def add(sums, each):
            part, microbatch = each
            with taps.at(microbatch=microbatch):
                value, gradients = grad(params, part)
            return jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, gradients), value

        shapes = jax.eval_shape(lambda: grad(params, jax.tree.map(lambda leaf: leaf[0], parts))[1])
        zeros = jax.tree.map(lambda g: jnp.zeros_like(g, dtype=wide(g.dtype)), shapes)
        sums, values = lax.scan(add, zeros, (parts, taps.numbered(microbatches)))
        value = map_loss_and_aux(values, jnp.mean, aux)
        return value, jax.tree.map(lambda total: total / microbatches, sums)

    return wrapped


def averaged(
    grad: Grad,
    axis: AxisLike,
    *,
    aux: Callable[[Any, Axis], Any] = mean_of_devices,
    reduced: Callable[[Any], Any] | None = None,
) -> Grad:
    """The mean of `grad` over the devices of `axis`, among which the batch is split: data parallelism.

    The parameters are declared varying before `grad` differentiates, so that its gradients stay local, and are then reduced
    once, by the mover of `axis`: `A {U_X} -> A`. A parameter that is split over some of the axes already (ZeRO-3, experts) has
    a gradient that is summed along those: it is summed over the others alone. Each is divided by the size of all of them.
    Sums are taken in float32 or wider, and rounded once, to the gradient's own type.

    It may stand inside another one over the same axis, in a loss that takes a step itself (MAML): it is the mean there too.

    Args:
        grad: a grad arrow.
        axis: the axis, or the axes, that split the batch.
        aux: what becomes of auxiliary values: a function of them and of `axis`.
        reduced: picks the part of the parameters whose gradients `grad` sums itself, where it makes them: see
            `reduced_in_backward`.

    Raises:
        ValueError: the loss is reduced over `axis` already; a parameter is a share along `axis`, and the loss uses it as if it
            were whole; or the map does not tell what differs between devices, as under `check_vma=False`.
    """
    axis = Axis.of(axis)
    return _over_devices(
        grad, axis, lambda total, term: (total / axis.size()).astype(term.dtype), loss=True, aux=aux, reduced=reduced
    )


def summed(
    grad: Grad,
    axis: AxisLike,
    *,
    loss: bool = False,
    aux: Callable[[Any, Axis], Any] = mean_of_devices,
    reduced: Callable[[Any], Any] | None = None,
) -> Grad:
    """`grad`, its gradients summed over `axis` where all devices have the parameter: `A {U_X} -> A`.

    For devices that each compute a part of one loss, as in sequence parallelism, where a norm sees some of the tokens. The
    parameters are declared varying first, so that their gradients stay local until this one all-reduce. With `loss`, the
    losses are parts as well, and are summed too; without it, the loss may be a sum or mean over `axis` already. `aux`, `reduced`
    and errors as in `averaged`.
    """
    return _over_devices(grad, Axis.of(axis), lambda total, term: total.astype(term.dtype), loss=loss, aux=aux, reduced=reduced)


def _over_devices(
    grad: Grad,
    axis: Axis,
    finish: Callable[[Array, Array], Array],
    *,
    loss: bool,
    aux: Callable[[Any, Axis], Any],
    reduced: Callable[[Any], Any] | None,
) -> Grad:
    """`grad` with its gradients, and with `loss` its loss, summed over `axis`: `finish(sum, term)` of each."""

    def wrapped(params, batch):
        given, value, gradients = local(grad, params, batch, axis, loss=loss, reduced=reduced)

        def axes_to_reduce(gradient, declared, parameter):
            differs = {*varying_axes(gradient), *varying_axes(declared)}  # what `reduced` picks may be summed already
            return tuple(name for name in copied(parameter, axis) if name in differs)

        over = jax.tree.map(
            axes_to_reduce, gradients, matching_parameters(gradients, given), matching_parameters(gradients, params)
        )
        terms = (loss_of(value), gradients)
        sums = summed_over(terms, (axes_of(axis) if loss else (), over), axis)
        total, finished = jax.tree.map(finish, sums, terms)
        return map_loss_and_aux(value, lambda _: total, lambda values: aux(ordered(values, (total, finished)), axis)), finished

    return wrapped


class Outside(NamedTuple):
    """What the arrows round the code that is being traced have done.

    Attributes:
        declared: the axes along which they declared all parameters varying.
        shares: those of these along which some parameters were shares before.
    """

    declared: frozenset[str] = frozenset()
    shares: frozenset[str] = frozenset()


# A context of JAX's own: it is part of the key under which `jax.jit` keeps what it has traced.
OUTSIDE = jax.make_user_context(Outside())


def local(
    grad: Grad, params: PyTree, batch: PyTree, axis: Axis, *, loss: bool, reduced: Callable[[Any], Any] | None = None
) -> tuple[PyTree, PyTree, PyTree]:
    """The parameters declared varying along `axis`, and what `grad` makes of them: each device's own loss and gradients.

    Args:
        grad: a grad arrow.
        params: its parameters.
        batch: this device's.
        axis: the axis to be reduced over.
        loss: whether the loss is to be reduced as well.
        reduced: as in `averaged`: what it picks is not declared varying.

    Raises:
        ValueError: as `averaged` does.
    """
    types.check_typed()
    outside, along = OUTSIDE.value, frozenset(several(axes_of(axis)))
    shares = {name: _shares(params, name) for name in sorted(along)}
    split = frozenset(name for name, paths in shares.items() if paths)
    if unclear := sorted(split & outside.shares):
        raise ValueError(
            f"A grad arrow over {unclear} stands inside another one over the same axis, some of whose parameters are shares "
            "there, and nothing tells those from copies. Take the mean of the inner gradients by hand: "
            f"lax.pmean(gradients, {unclear[0]!r})."
        )
    given = varying(params, axis.names)
    given = given if reduced is None else eqx.tree_at(reduced, given, reduced(params))
    with OUTSIDE(Outside(outside.declared | along, outside.shares | (split - outside.declared))):
        shares = {name: shares[name] for name in sorted(split - outside.declared)}
        value, gradients = _traced(grad, given, batch, shares) if shares else grad(given, batch)
        if loss:
            differ = {name for gradient in jax.tree.leaves(gradients) for name in varying_axes(gradient)}
            same = along & differ - set(varying_axes(loss_of(value)))  # where gradients are reduced as well, both are right
            _refuse_reduced(grad, given, batch, sorted(same))
    return given, value, gradients


def _shares(params: PyTree, name: str) -> set[str]:
    """The paths of the parameters that differ along the axis `name`."""
    leaves = jax.tree.leaves_with_path(eqx.filter(params, eqx.is_inexact_array))
    return {trees.dotted(path) for path, leaf in leaves if name in varying_axes(leaf)}


def _program(grad: Grad, params: PyTree, batch: PyTree) -> tuple[ClosedJaxpr, PyTree, PyTree]:
    """`grad` as a program, its arguments' arrays, and the shapes of what it returns."""
    arrays, static = eqx.partition((params, batch), trees.is_array)
    closed, shapes = jax.make_jaxpr(lambda arrays: grad(*eqx.combine(arrays, static)), return_shape=True)(arrays)
    return closed, arrays, shapes


def _traced(grad: Grad, params: PyTree, batch: PyTree, shares: dict[str, set[str]]) -> PyTree:
    """`grad(params, batch)`, where `shares` names the parameters that are shares, by their axis.

    The user's code is traced once, to a program, which is first read and then run. Raises `ValueError` where a share goes into
    the loss as if it were whole, or its shape does not fit there.
    """
    try:
        closed, arrays, shapes = _program(grad, params, batch)
    except TypeError as error:
        paths = sorted(path or "itself" for split in shares.values() for path in split)
        message = str(error).splitlines()[0]
        raise ValueError(
            f"The loss cannot be traced: {message} The parameters {paths} are shares along {sorted(shares)} here, smaller than "
            f"the whole ones. Where nothing gathers them, wrap the loss, or the block that uses them, in zero.gathered(..., "
            f"{next(iter(shares))!r}, specs) or ZeRO.loss."
        ) from error
    paths = [trees.dotted(path) for path, _ in jax.tree.leaves_with_path(arrays[0])]
    of_batch = [False] * len(paths) + [True] * len(jax.tree.leaves(arrays[1]))
    for name, split in shares.items():
        used = jaxprs.uses(closed, name, data=of_batch)[0].unsent
        for path, leaf, is_used in zip(paths, jax.tree.leaves(arrays[0]), used, strict=False):
            if is_used and path in split:
                raise ValueError(
                    f"The parameter {path or 'itself'}, here of shape {leaf.shape}, differs along {name!r} as a share does, and "
                    "the loss uses it as if it were whole, so each device would train another model. Wrap the loss, or the "
                    f"block that uses it, in zero.gathered(..., {name!r}, specs) or ZeRO.loss, or replicate the parameter with "
                    "P(). Where a loop runs over the dim that is split, as over layers, spare it: "
                    "rules.fsdp(..., keep={'blocks.**': (0,)})."
                )
    results = map(jnp.asarray, jaxpr_as_fun(closed)(*jax.tree.leaves(arrays)))  # constants come back as NumPy's
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _refuse_reduced(grad: Grad, params: PyTree, batch: PyTree, same: list[str]) -> None:
    """Refuse a loss that is a sum or mean over devices already; `same` are axes along which it is the same.

    A loss that depends on nothing that differs there, such as a constant, is no such sum.
    """
    if not same:
        return
    closed, arrays, _ = _program(grad, params, batch)
    for name in same:
        differs = [name in varying_axes(leaf) for leaf in jax.tree.leaves(arrays)]
        reaches = jaxprs.uses(closed, name, data=differs)[0].reached
        if any(map(operator.and_, reaches, differs)):
            raise ValueError(
                f"The loss is the same along {name!r}, so it was reduced over it already, by lax.pmean or the like, and what "
                "averages over that axis would divide its gradients once more. Return each device's own loss; or, for a loss "
                f"that is the whole one on every device, take grads.summed(grad, {name!r})."
            )


def loss_of(value: PyTree) -> Array:
    """The loss of what a grad arrow returns beside the gradients."""
    return value[0] if isinstance(value, tuple) else value


def several(names: Iterable[str]) -> list[str]:
    """Those of the axes that have more than one device, in order."""
    return sorted(name for name in names if types.size(name) > 1)


def reduced_in_backward(function: Callable[..., Any], axis: AxisLike) -> Callable[..., Any]:
    """`function(params, ...)`, the gradients of whose parameters are summed over `axis` where they are made: `A {U_X} -> A`.

    Round a block that a loop runs, each layer's gradients are all-reduced in the loop of the backward pass, where the work of
    the layers before it can hide the messages; at the end nothing is left to hide them. It moves what `averaged` does at the
    end, leaf by leaf, and in every microbatch: wrap no grad arrow in `accumulated` that has it inside. `averaged` must leave
    these parameters to it:

        block = grads.reduced_in_backward(block, ring("data"))
        grad = grads.averaged(jax.value_and_grad(loss), ring("data"), reduced=lambda model: model.blocks)

    Without one of the two the gradients are the same, summed at the end or by `jax.lax`. Sums are taken in float32 or wider, and
    rounded to the type that the block computes in.

    Args:
        function: a block; its first argument is the tree of parameters, which all devices of `axis` have alike.
        axis: the axis, or the axes, that split the batch. A parameter that differs along some of them is summed over the others.
    """
    axis = Axis.of(axis)

    def handed(w):
        names = replicated_axes(w, axis) if eqx.is_inexact_array(w) else ()
        over = axis.over(names)
        total = lambda ct: over.all_reduce(ct.astype(wide(ct.dtype))).astype(ct.dtype)
        return linear(w, forward=lambda w: varying(w, names), backward=total) if names else w

    return lambda params, *arguments: function(jax.tree.map(handed, params), *arguments)


def axes_of(axis: Axis) -> tuple[str, ...]:
    """The names of an axis, always as a tuple."""
    return types.axes(axis.names)


def replicated_axes(x: Array, axis: Axis) -> tuple[str, ...]:
    """The axes of `axis` along which `x` is the same."""
    return tuple(name for name in axes_of(axis) if name not in varying_axes(x))


def copied(x: Array, axis: Axis) -> tuple[str, ...]:
    """The axes of `axis` along which all devices have the parameter `x`: it is the same there, or an arrow outside has only
    declared that it varies."""
    declared = OUTSIDE.value.declared
    return tuple(name for name in axes_of(axis) if name not in varying_axes(x) or name in declared)


def summed_over(tree: Tree, over: PyTree, axis: Axis, after: PyTree = ()) -> Tree:
    """Each leaf of `tree` summed over its own axes, in float32 or wider.

    `over` has a tuple of the axes' names, some of those of `axis`, in the leaf's place.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(lambda leaf: leaf.astype(wide(leaf.dtype)), tree))
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


def matching_parameters(gradients: PyTree, params: PyTree) -> PyTree:
    """The parameters of these gradients, in their structure: those without a gradient are left out.

    Raises:
        ValueError: a gradient is at a path where `params` has no array.
    """
    found = dict(jax.tree.leaves_with_path(params))

    def own(path, gradient):
        if path not in found:
            raise ValueError(
                f"The gradients have a leaf {trees.dotted(path)!r}, and the parameters have none there. A grad arrow returns a "
                f"tree like the parameters, with None for what is not trained; eqx.filter_value_and_grad gives one."
            )
        if not trees.is_array(found[path]):
            raise ValueError(
                f"The gradients have a leaf {trees.dotted(path)!r}, and that parameter is {found[path]!r}, which is no array, so "
                "it is not trained. Take eqx.filter_value_and_grad, whose gradient is None there; to train it, make it an array."
            )
        return found[path]

    return jax.tree.map_with_path(own, gradients)


def map_loss_and_aux(value: PyTree, on_loss: Callable[[Any], Any], on_aux: Callable[[Any], Any]) -> PyTree:
    """What a grad arrow returns beside the gradients, a loss or `(loss, aux)`, with a function on each."""
    return (on_loss(value[0]), on_aux(value[1])) if isinstance(value, tuple) else on_loss(value)


def varies_along(x: Array, axis: AxisLike) -> bool:
    """Whether `x` may differ between devices along every one of the axes."""
    return set(types.axes(Axis.of(axis).names)) <= set(varying_axes(x))


def clipped(grad: Grad, max_norm: float, *, reduce_norm_over: Sequence[AxisLike] = ()) -> Grad:
    """`grad` with its gradients scaled down, where needed, to a global norm of `max_norm`, over all their shards.

    It clips the gradients of one step, so it stands outside `averaged`, `accumulated` and `precision.unscaled`. It takes
    gradients that vary along an axis to be shards of larger ones. `reduce_norm_over` is the `axes` of `norm`.
    """
    return Clipped(grad, max_norm, tuple(reduce_norm_over))


@dataclass(frozen=True)
class Clipped:
    """What `clipped` returns: a grad arrow that others can tell from those that may stand inside them."""

    grad: Grad
    max_norm: float
    axes: tuple[AxisLike, ...]

    def __call__(self, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """The loss, and the clipped gradients."""
        value, gradients = self.grad(params, batch)
        return value, scaled(gradients, norm(gradients, axes=self.axes), self.max_norm)


def refuse_clipped(grad: Grad, arrow: str, what: str) -> None:
    """Refuse with a `ValueError` that `arrow` is put round `clipped`, which would then clip `what`."""
    if isinstance(grad, Clipped):
        raise ValueError(
            f"{arrow} stands round grads.clipped, which would clip {what} instead of the gradients of the step. Turn them round: "
            f"grads.clipped({arrow}(...), max_norm), or step.make(..., max_norm=...)."
        )


def norm(gradients: PyTree, *, axes: Sequence[AxisLike] = ()) -> Float[Array, ""]:
    """The Euclidean norm of a whole tree whose leaves may be shards, the same on all devices.

    A leaf that varies along some axes is a shard over them, and its sum of squares is all-reduced over exactly those: one
    scalar for each set of axes in use. Squares are summed in float32 or wider. `axes` say who moves data along them; along any
    other axis `jax.lax` does.

    Raises:
        ValueError: there is no gradient; or a gradient is that of one device alone, which an arrow outside has yet to reduce.
    """
    types.check_typed()
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
        if unreduced := sorted(OUTSIDE.value.declared & set(split)):
            raise ValueError(
                f"A norm is taken inside an arrow that reduces over {unreduced}, of gradients of one device alone, as if they "
                "were shards. Put the arrow that clips outside: grads.clipped(grads.averaged(...), max_norm)."
            )
        squares[split] = squares.get(split, 0.0) + jnp.sum(jnp.real(x * jnp.conj(x)))
    over = lambda split: joined(*(movers.get(name, xla)(name) for name in split))
    sums = [over(split).all_reduce(square) if split else square for split, square in squares.items()]
    return jnp.sqrt(sum(sums[1:], start=sums[0]))


def scaled(gradients: Tree, norm: Float[Array, ""], max_norm: float) -> Tree:
    """`gradients`, of global norm `norm`, times min(1, max_norm / norm)."""
    factor = jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), gradients)


def split_into_microbatches(batch: Tree, microbatches: int) -> Tree:
    """`batch` with each leaf's first dim, the sequences, as `[microbatches, sequences in one]`, in order.

    Raises:
        ValueError: the leaves' first dims differ, or do not divide by `microbatches`.
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

    parts = jax.tree.map_with_path(split, batch)
    check_rows(batch)
    return parts


def check_rows(batch: PyTree) -> None:
    """Refuse with a `ValueError` a batch whose leaves have other numbers of rows, such as a table of weights of classes."""
    rows = {jax.tree_util.keystr(path) or "itself": leaf.shape[0] for path, leaf in jax.tree.leaves_with_path(batch)}
    if len(set(rows.values())) > 1:
        (first, few), (other, many) = min(rows.items(), key=lambda leaf: leaf[1]), max(rows.items(), key=lambda leaf: leaf[1])
        raise ValueError(
            f"The batch's leaf {first} has {few} rows on each device and its leaf {other} has {many}, and a batch is cut into "
            "parts by rows, so all must have as many. What is no row, such as a weight for each class, belongs to the "
            "parameters or into the loss by closure."
        )
