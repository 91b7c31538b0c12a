"""From one gradient function to the next: accumulated over microbatches, averaged over devices, or clipped.

A gradient function is `(params, batch) -> (loss, gradients)`, as `jax.value_and_grad` and
`eqx.filter_value_and_grad` return it. With `has_aux=True` it is `(params, batch) -> ((loss, aux), gradients)`;
every function here passes `aux`, a tree of arrays, on. A leaf that is not trained has a gradient of None. The
order of wrapping is the cost: `averaged` outside `accumulated` reduces once a step, inside it once a microbatch.
"""

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
from parallax._typing import PyTree
from parallax.collectives import types
from parallax.collectives.axis import Axis, AxisLike, combined_axis, xla
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import (
    accumulation_dtype,
    axes_of_type,
    linear,
    varying,
    varying_axes,
)

Loss = Float[Array, ""]
Grad = Callable[[PyTree, PyTree], tuple[Loss | tuple[Loss, PyTree], PyTree]]
Tree = TypeVar("Tree", bound=PyTree)


def mean_over_microbatches(aux: Tree) -> Tree:
    """The mean of each array over its first dim, the microbatches. The mean of integers is floating-point."""
    return jax.tree.map_with_path(lambda path, leaf: jnp.mean(_floating(path, leaf), axis=0), aux)


def mean_over_devices(aux: Tree, axis: Axis) -> Tree:
    """The mean of each array over those of the axes along which it differs, summed in float32 or wider."""

    def mean(path, leaf):
        differs = axis.over(varying_axes(leaf) if trees.is_array(leaf) else ())
        if not differs.names:
            return leaf
        number = _floating(path, leaf)
        return differs.all_mean(number.astype(accumulation_dtype(number.dtype))).astype(
            number.dtype
        )

    return jax.tree.map_with_path(mean, aux)


def _floating(path: Sequence[Any], leaf: Array) -> Array:
    """An auxiliary value as floating-point numbers."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        raise ValueError(
            f"The auxiliary value {trees.dotted(path) or 'itself'} is of type {leaf.dtype}, which has no mean. Leave it out, or "
            "join it by a function of your own: aux=... of grads.accumulated and grads.averaged."
        )
    return leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf.astype(jnp.result_type(float))


def accumulated(
    grad: Grad, *, microbatches: int, aux: Callable[[Any], Any] = mean_over_microbatches
) -> Grad:
    """`grad` of the whole batch, computed one microbatch after another: memory for one microbatch at a time.

    It equals `grad` where the loss is a mean over the batch. Every leaf of the batch has the batch as its first
    dim, and the microbatches are cut from it in order. Sums are kept, and returned, in float32, or in the
    gradients' own type where that is wider.

    Args:
        grad: a gradient function.
        microbatches: the number of equal parts.
        aux: combines the auxiliary values of the microbatches, stacked as `[microbatches, ...]`.

    Raises:
        ValueError: the leaves' first dims differ, or do not divide by `microbatches`; or `grad` is `clipped`.
    """
    if microbatches < 1:
        raise ValueError(f"accumulated needs microbatches of 1 or more; got {microbatches}.")

    def wrapped(params, batch):
        if microbatches > 1:
            refuse_clipped(grad, "grads.accumulated", "the gradients of each microbatch")
        parts = split_into_microbatches(batch, microbatches)

        def add(sums, numbered_part):
            part, number = numbered_part
            with taps.at(microbatch=number):
                value, gradients = grad(params, part)
            return jax.tree.map(
                lambda total, g: total + g.astype(total.dtype), sums, gradients
            ), value

        def zeros(gradient):
            return jnp.zeros_like(gradient, dtype=accumulation_dtype(gradient.dtype))

        first_part = jax.tree.map(lambda leaf: leaf[0], parts)
        shapes = jax.eval_shape(lambda: grad(params, first_part)[1])
        sums, values = lax.scan(
            add, jax.tree.map(zeros, shapes), (parts, taps.numbered(microbatches))
        )
        means = jax.tree.map(lambda total: total / microbatches, sums)
        return map_loss_and_aux(values, jnp.mean, aux), means

    return wrapped


def averaged(
    grad: Grad,
    axis: AxisLike,
    *,
    aux: Callable[[Any, Axis], Any] = mean_over_devices,
    reduced: Callable[[Any], Any] | None = None,
) -> Grad:
    """The mean of `grad` over the devices of `axis`, which split the batch: data parallelism, `A {U_X} -> A`.

    The parameters are declared varying before `grad` differentiates, so that its gradients stay local. They are
    then reduced once. A parameter that is split over some of the axes (ZeRO-3, experts) has a gradient that is
    summed along those already: it is summed over the others alone. Each sum is divided by the size of all axes.
    Sums are taken in float32 or wider, and rounded once, to the gradient's own type.

    `averaged` may be used inside another one over the same axis, in a loss that takes a step itself (MAML).

    Args:
        grad: a gradient function.
        axis: the axis, or the axes, that split the batch.
        aux: combines auxiliary values: a function of them and of `axis`.
        reduced: picks the parameters whose gradients are summed in the backward pass: see
            `reduced_in_backward`.

    Raises:
        ValueError: the loss is reduced over `axis` already; a parameter is a share along `axis`, and the loss
            uses it as if it were whole; or the map does not tell what differs between devices, as under
            `check_vma=False`.
    """
    axis = Axis.of(axis)

    def mean(total, term):
        return (total / axis.size()).astype(term.dtype)

    return over_devices(grad, axis, mean, aux=aux, reduced=reduced)


def summed(
    grad: Grad,
    axis: AxisLike,
    *,
    loss: bool = False,
    aux: Callable[[Any, Axis], Any] = mean_over_devices,
    reduced: Callable[[Any], Any] | None = None,
) -> Grad:
    """`grad`, its gradients summed over `axis` where all devices have the parameter: `A {U_X} -> A`.

    For devices that each compute a part of one loss, as in sequence parallelism, where a norm sees some of the
    tokens. With `loss`, the losses are parts as well, and are summed too; without it, the loss may be a sum or
    mean over `axis` already. Everything else is as in `averaged`.
    """

    def total_as_term(total, term):
        return total.astype(term.dtype)

    return over_devices(grad, Axis.of(axis), total_as_term, loss=loss, aux=aux, reduced=reduced)


def _unscattered(
    value: PyTree, gradients: PyTree, params: PyTree, names: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    return value, gradients, names


def over_devices(
    grad: Grad,
    axis: Axis,
    finish: Callable[[Array, Array], Array],
    *,
    loss: bool = True,
    aux: Callable[[Any, Axis], Any],
    reduced: Callable[[Any], Any] | None = None,
    scatter: Callable[..., tuple[PyTree, PyTree, PyTree]] = _unscattered,
) -> Grad:
    """`grad` with its gradients, and with `loss` its loss, summed over `axis`.

    Args:
        grad: a gradient function.
        axis: the axis to sum over.
        finish: `finish(sum, term)` of each gradient and of the loss.
        loss: whether the loss is summed.
        aux: as in `averaged`.
        reduced: as in `averaged`.
        scatter: `(value, gradients, params, names) -> (value, gradients, names)`, before the sum. `names` has for
            each gradient the axes to sum it over; `scatter` returns those that are left.
    """

    def axes_to_reduce(gradient, declared, parameter):
        # A gradient of what `reduced` picks may be summed already: then nothing says that it differs.
        differs = {*varying_axes(gradient), *varying_axes(declared)}
        return tuple(name for name in copied(parameter, axis) if name in differs)

    def wrapped(params, batch):
        declared, value, gradients = local(grad, params, batch, axis, loss=loss, reduced=reduced)
        declared, params = (matching_parameters(gradients, tree) for tree in (declared, params))
        names = jax.tree.map(axes_to_reduce, gradients, declared, params)
        value, gradients, names = scatter(value, gradients, params, names)
        terms = loss_of(value), gradients
        sums = summed_over(terms, (axes_of(axis) if loss else (), names), axis)
        total, finished = jax.tree.map(finish, sums, terms)

        def combined(values):
            return aux(sequence_after(values, (total, finished)), axis)

        return map_loss_and_aux(value, lambda _: total, combined), finished

    return wrapped


class Outside(NamedTuple):
    """What the functions around the code that is being traced have done to the parameters.

    Attributes:
        declared: the axes along which all parameters were declared varying.
        shares: those of these along which some parameters were shares before.
    """

    declared: frozenset[str] = frozenset()
    shares: frozenset[str] = frozenset()


# JAX's own context, and not a ContextVar: it is part of the key under which `jax.jit` keeps what it traced.
OUTSIDE = jax.make_user_context(Outside())


def local(
    grad: Grad,
    params: PyTree,
    batch: PyTree,
    axis: Axis,
    *,
    loss: bool,
    reduced: Callable[[Any], Any] | None = None,
) -> tuple[PyTree, PyTree, PyTree]:
    """The parameters declared varying along `axis`, and each device's own loss and gradients.

    Args:
        grad: a gradient function. With shares it is traced to a program that is checked and then run.
        params: its parameters.
        batch: this device's batch.
        axis: the axis to be reduced over.
        loss: whether the loss is to be reduced as well.
        reduced: as in `averaged`: the parameters that it picks are not declared varying.

    Raises:
        ValueError: as `averaged` does.
    """
    types.check_typed()
    outside, names = OUTSIDE.value, axes_of_several_devices(axes_of(axis))
    shares = {name: paths for name in names if (paths := _shares(params, name))}
    if unclear := sorted(outside.shares.intersection(shares)):
        raise ValueError(
            f"A gradient function over {unclear} stands inside another one over the same axis, some of whose parameters are "
            "shares there, and nothing tells those from copies. Take the mean of the inner gradients by hand: "
            f"lax.pmean(gradients, {unclear[0]!r})."
        )
    shares = {name: paths for name, paths in shares.items() if name not in outside.declared}
    declared = varying(params, axis.names)
    if reduced is not None:
        declared = eqx.tree_at(reduced, declared, reduced(params))
    with OUTSIDE(Outside(outside.declared.union(names), outside.shares.union(shares))):
        if shares:
            try:
                program = _Program(grad, declared, batch)
            except TypeError as error:
                paths = sorted({path or "itself" for split in shares.values() for path in split})
                raise ValueError(
                    f"The loss cannot be traced: {str(error).splitlines()[0]} The parameters {paths} are shares along "
                    f"{sorted(shares)} here, smaller than the whole ones. Where nothing gathers them, wrap the loss, or the "
                    f"block that uses them, in zero.gathered(..., {next(iter(shares))!r}, specs) or ZeRO.loss."
                ) from error
            for name in names:
                program.check(name, shares.get(name, set()), loss=loss)
            return declared, *program.run()
        # Without shares the function runs as it is: the pipeline's checks follow its values back to the parameters.
        value, gradients = grad(declared, batch)
        differ = {
            name for gradient in jax.tree.leaves(gradients) for name in varying_axes(gradient)
        }
        same = differ.intersection(names).difference(varying_axes(loss_of(value)))
        if loss:
            for name in sorted(same):
                _Program(grad, declared, batch).check(name, set(), loss=True)
        return declared, value, gradients


def _shares(params: PyTree, name: str) -> set[str]:
    """The paths of the parameters that differ along the axis `name`."""
    leaves = jax.tree.leaves_with_path(eqx.filter(params, eqx.is_inexact_array))
    return {trees.dotted(path) for path, leaf in leaves if name in varying_axes(leaf)}


class _Program:
    """A gradient function, traced to a program."""

    def __init__(self, grad: Grad, params: PyTree, batch: PyTree):
        self.arrays, static = eqx.partition((params, batch), trees.is_array)
        self.closed: ClosedJaxpr
        self.closed, shapes = jax.make_jaxpr(
            lambda arrays: grad(*eqx.combine(arrays, static)), return_shape=True
        )(self.arrays)
        self.structure = jax.tree.structure(shapes)

    def run(self) -> PyTree:
        """The loss and the gradients."""
        results = map(
            jnp.asarray, jaxpr_as_fun(self.closed)(*jax.tree.leaves(self.arrays))
        )  # constants are NumPy's
        return jax.tree.unflatten(self.structure, results)

    def check(self, name: str, shares: set[str], *, loss: bool) -> None:
        """Refuse a loss that is reduced over the axis `name` already, or that uses one of the `shares` as if it were whole.

        A loss that depends on nothing that differs along the axis, such as a constant, was not reduced over it.
        """
        value, gradients = jax.tree.unflatten(self.structure, self.closed.out_avals)
        differ = any(name in axes_of_type(gradient) for gradient in jax.tree.leaves(gradients))
        # Where gradients are reduced as well, both are right.
        may_be_reduced = loss and differ and name not in axes_of_type(loss_of(value))
        if not (shares or may_be_reduced):
            return
        params, batch = map(jax.tree.leaves_with_path, self.arrays)
        uses = jaxprs.uses(self.closed, name, data=[False] * len(params) + [True] * len(batch))[0]
        for (path, leaf), is_used in zip(params, uses.unsent, strict=False):
            if is_used and trees.dotted(path) in shares:
                raise ValueError(
                    f"The parameter {trees.dotted(path) or 'itself'}, here of shape {leaf.shape}, differs along {name!r} as a "
                    "share does, and the loss uses it as if it were whole, so each device would train another model. Wrap the "
                    f"loss, or the block that uses it, in zero.gathered(..., {name!r}, specs) or ZeRO.loss, or replicate the "
                    "parameter with P(). Where a loop runs over the dim that is split, as over layers, spare it: "
                    "rules.fsdp(..., keep={'blocks.**': (0,)})."
                )
        leaves = [leaf for _, leaf in (*params, *batch)]
        reaches = (
            name in varying_axes(leaf) and used
            for leaf, used in zip(leaves, uses.reached, strict=True)
        )
        if may_be_reduced and any(reaches):
            raise ValueError(
                f"The loss is the same along {name!r}, so it was reduced over it already, by lax.pmean or the like, and what "
                "averages over that axis would divide its gradients once more. Return each device's own loss; or, for a loss "
                f"that is the whole one on every device, take grads.summed(grad, {name!r})."
            )


def loss_of(value: PyTree) -> Any:
    """The loss of what a gradient function returns beside the gradients."""
    return value[0] if isinstance(value, tuple) else value


def axes_of_several_devices(names: Iterable[str]) -> list[str]:
    """Those of the axes that have more than one device, sorted."""
    return sorted(name for name in names if types.axis_size(name) > 1)


def reduced_in_backward(function: Callable[..., Any], axis: AxisLike) -> Callable[..., Any]:
    """`function(params, ...)`, whose gradients are summed over `axis` in the backward pass: `A {U_X} -> A`.

    Around a block that a loop runs, the gradients of each layer are all-reduced in the loop of the backward
    pass, where the work of the layers before it can hide the messages. It moves the bytes that `averaged` moves,
    leaf by leaf and in every microbatch: do not wrap a gradient function that uses it in `accumulated`.
    `averaged` must leave these parameters to it:

        block = grads.reduced_in_backward(block, ring("data"))
        grad = grads.averaged(jax.value_and_grad(loss), ring("data"), reduced=lambda model: model.blocks)

    With one of the two alone, the gradients are the same, summed at the end or by `jax.lax`. Sums are taken in
    float32 or wider, and rounded to the type that the block computes in.

    Args:
        function: a block; its first argument is the tree of parameters, the same on all devices of `axis`.
        axis: the axes that split the batch. A parameter that differs along some is summed over the others.
    """
    axis = Axis.of(axis)

    def summed_backward(w):
        names = replicated_axes(w, axis) if eqx.is_inexact_array(w) else ()
        if not names:
            return w

        def total(cotangent):
            return (
                axis.over(names)
                .all_reduce(cotangent.astype(accumulation_dtype(cotangent.dtype)))
                .astype(cotangent.dtype)
            )

        return linear(w, forward=lambda w: varying(w, names), backward=total)

    return lambda params, *arguments: function(jax.tree.map(summed_backward, params), *arguments)


def axes_of(axis: Axis) -> tuple[str, ...]:
    """The names of an axis, always as a tuple."""
    return types.axes(axis.names)


def replicated_axes(x: Array, axis: Axis) -> tuple[str, ...]:
    """The axes of `axis` along which `x` is the same."""
    return tuple(name for name in axes_of(axis) if name not in varying_axes(x))


def copied(x: Array, axis: Axis) -> tuple[str, ...]:
    """The axes of `axis` along which all devices have the parameter `x`, even if it was declared varying there."""
    declared = OUTSIDE.value.declared
    return tuple(name for name in axes_of(axis) if name not in varying_axes(x) or name in declared)


def summed_over(tree: Tree, names: PyTree, axis: Axis) -> Tree:
    """Each leaf of `tree` summed over its own axes, in float32 or wider.

    `names` has a tuple of the axes' names, some of those of `axis`, in the leaf's place.
    """
    leaves, structure = jax.tree.flatten(
        jax.tree.map(lambda leaf: leaf.astype(accumulation_dtype(leaf.dtype)), tree)
    )
    names = structure.flatten_up_to(names)
    before = tree
    for group in sorted({*names} - {()}, key=len, reverse=True):
        members = [i for i, of_leaf in enumerate(names) if of_leaf == group]
        sums = axis.over(group).all_reduce(sequence_after([leaves[i] for i in members], before))
        for i, total in zip(members, sums, strict=True):
            leaves[i] = total
        before = sums, tree
    return jax.tree.unflatten(structure, leaves)


def matching_parameters(gradients: PyTree, params: PyTree) -> PyTree:
    """The parameters of these gradients, in their structure; parameters without a gradient are left out.

    Raises:
        ValueError: a gradient is at a path where `params` has no array.
    """
    by_path = dict(jax.tree.leaves_with_path(params))

    def parameter(path, gradient):
        if path not in by_path:
            raise ValueError(
                f"The gradients have a leaf {trees.dotted(path)!r}, and the parameters have none there. A gradient function "
                "returns a tree like the parameters, with None for what is not trained; eqx.filter_value_and_grad gives one."
            )
        if not trees.is_array(by_path[path]):
            raise ValueError(
                f"The gradients have a leaf {trees.dotted(path)!r}, and that parameter is {by_path[path]!r}, which is no array, "
                "so it is not trained. Take eqx.filter_value_and_grad, whose gradient is None there; to train it, make it an "
                "array."
            )
        return by_path[path]

    return jax.tree.map_with_path(parameter, gradients)


def map_loss_and_aux(
    value: PyTree, on_loss: Callable[[Any], Any], on_aux: Callable[[Any], Any]
) -> PyTree:
    """A loss or `(loss, aux)`, as a gradient function returns it beside the gradients, with a function on each."""
    return (on_loss(value[0]), on_aux(value[1])) if isinstance(value, tuple) else on_loss(value)


def varies_along(x: Array, axis: AxisLike) -> bool:
    """Whether `x` may differ between devices along every one of the axes."""
    return not replicated_axes(x, Axis.of(axis))


def clipped(grad: Grad, max_norm: float, *, reduce_norm_over: Sequence[AxisLike] = ()) -> Grad:
    """`grad` with its gradients scaled down, where needed, to a global norm of `max_norm`, over all their shards.

    It clips the gradients of one step, so use it outside `averaged`, `accumulated` and `precision.unscaled`. It
    takes gradients that vary along an axis to be shards of larger ones. `reduce_norm_over` is the `axes` of
    `norm`.
    """
    return Clipped(grad, max_norm, tuple(reduce_norm_over))


@dataclass(frozen=True)
class Clipped:
    """What `clipped` returns: a gradient function that the others can tell from those that they may wrap."""

    grad: Grad
    max_norm: float
    axes: tuple[AxisLike, ...]

    def __call__(self, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """The loss, and the clipped gradients."""
        value, gradients = self.grad(params, batch)
        return value, scaled(gradients, norm(gradients, axes=self.axes), self.max_norm)


def refuse_clipped(grad: Grad, wrapper: str, what: str) -> None:
    """Refuse with a `ValueError` that `wrapper` is put around `clipped`, which would then clip `what`."""
    if isinstance(grad, Clipped):
        raise ValueError(
            f"{wrapper} stands round grads.clipped, which would clip {what} instead of the gradients of the step. Turn them "
            f"round: grads.clipped({wrapper}(...), max_norm), or step.make(..., max_norm=...)."
        )


def norm(gradients: PyTree, *, axes: Sequence[AxisLike] = ()) -> Float[Array, ""]:
    """The Euclidean norm of a whole tree whose leaves may be shards, the same on all devices.

    A leaf that varies along some axes is a shard over them, and its sum of squares is all-reduced over exactly
    those: one scalar for each set of axes in use. Squares are summed in float32 or wider. `axes` names the
    algorithm along its axes; along any other axis `jax.lax` moves the data.

    Raises:
        ValueError: there is no gradient; or a gradient is that of one device alone, not reduced yet.
    """
    types.check_typed()
    if not jax.tree.leaves(gradients):
        raise ValueError(
            "grads.norm needs at least one gradient, and all of them are None: nothing is trained. A gradient function returns "
            "an array for each leaf that is, as eqx.filter_value_and_grad does for arrays of floating-point numbers."
        )
    squares = {}
    for leaf in jax.tree.leaves(gradients):
        split, x = varying_axes(leaf), leaf.astype(accumulation_dtype(leaf.dtype))
        if unreduced := sorted(OUTSIDE.value.declared & set(split)):
            raise ValueError(
                f"A norm is taken inside a function that reduces over {unreduced}, of gradients of one device alone, as if "
                "they were shards. Put the one that clips outside: grads.clipped(grads.averaged(...), max_norm)."
            )
        squares[split] = squares.get(split, 0.0) + jnp.sum(jnp.real(x * jnp.conj(x)))
    algorithms = {name: part.algorithm for part in map(Axis.of, axes) for name in axes_of(part)}

    def total(split, square):
        return (
            combined_axis(*(algorithms.get(name, xla)(name) for name in split)).all_reduce(square)
            if split
            else square
        )

    sums = [total(split, square) for split, square in squares.items()]
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
    rows = {}
    for path, leaf in jax.tree.leaves_with_path(batch):
        name = jax.tree_util.keystr(path) or "itself"
        if not jnp.ndim(leaf):
            raise ValueError(
                f"The batch's leaf {name} is a scalar, and every leaf has the sequences as its first dim. Broadcast it to one "
                "number a sequence, or let the loss close over it."
            )
        if leaf.shape[0] % microbatches:
            raise ValueError(
                f"The batch's leaf {name} has {leaf.shape[0]} rows on each device, which must divide by "
                f"microbatches={microbatches}. Take a batch that is a multiple of it, or fewer microbatches."
            )
        rows[name] = leaf.shape[0]
    if len(set(rows.values())) > 1:
        few, many = min(rows, key=rows.__getitem__), max(rows, key=rows.__getitem__)
        raise ValueError(
            f"The batch's leaf {few} has {rows[few]} rows on each device and its leaf {many} has {rows[many]}, and a batch is "
            "cut into parts by rows, so all must have as many. What is no row, such as a weight for each class, belongs to "
            "the parameters or into the loss by closure."
        )
    return jax.tree.map(lambda leaf: leaf.reshape(microbatches, -1, *leaf.shape[1:]), batch)
