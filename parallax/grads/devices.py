"""Makes the gradients of a whole batch: from its microbatches, one after another, or from the
devices that split the batch.

A gradient function is `(params, batch) -> (value, gradients)`, where `value` is the loss or
`(loss, aux)`. An array varies along an axis if its type says that it may differ between the devices
of the axis. `axis.over(names)` is `axis` with only those of its names that are in `names`.
`sequence_after(x, y)` is `x`. On a CPU each array of `x` waits for all of `y`.
"""

import numbers
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from parallax import recording, trees
from parallax._typing import PyTree
from parallax.collectives.axis import Axis, AxisLike
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import accumulation_dtype, linear, varying, varying_axes
from parallax.grads.axes import axes_of, axes_of_copies, replicated_axes
from parallax.grads.local import LocalGradients, check_equal_rows, local_gradients
from parallax.grads.norms import refuse_clipped
from parallax.grads.results import (
    Grad,
    check_pair,
    floating,
    loss_and_gradients,
    loss_part,
    map_loss_and_aux,
    matching_parameters,
)

Tree = TypeVar("Tree", bound=PyTree)


# Microbatches


def mean_over_microbatches(aux: Tree) -> Tree:
    """Returns the mean of each array over its first dim, which is the microbatches. The mean of an
    integer array is floating-point."""
    return jax.tree.map_with_path(lambda path, leaf: jnp.mean(floating(path, leaf), axis=0), aux)


def accumulated(
    grad: Grad, *, microbatches: int, aux: Callable[[Any], Any] = mean_over_microbatches
) -> Grad:
    """Returns a gradient function that computes `grad` of the whole batch, one microbatch after
    another.

    The new function needs memory for one microbatch at a time. Its results equal those of `grad` if
    the loss is a mean over the batch. The first dim of every leaf of the batch is cut in order into
    microbatches. Gradients are summed, and returned, in float32, or in their own type if that is
    wider.

        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> grad = grads.accumulated(jax.value_and_grad(loss), microbatches=4)
        >>> mean, gradients = grad(jnp.ones(2), jnp.ones((8, 2)))
        >>> print(mean, gradients)
        4.0 [4. 4.]

    Args:
        grad: a gradient function.
        microbatches: the number of equal parts.
        aux: a function that combines the auxiliary values. It gets those of all microbatches,
            stacked to arrays `[microbatches, ...]`.

    Raises:
        ValueError: the first dims of the batch's leaves differ, or are no multiples of
            `microbatches`; `grad` was made by `clipped`, and there are several microbatches; or
            the results of `grad` are no pair of a scalar loss and gradients of the parameters.
    """
    if not isinstance(microbatches, numbers.Integral) or microbatches < 1:
        raise ValueError(
            "grads.accumulated needs microbatches, a whole number of 1 or more; got "
            f"{microbatches!r}. Use microbatches=1 for the whole batch at once."
        )

    def add(total, gradient):
        return total + gradient.astype(total.dtype)

    def zeros(gradient):
        return jnp.zeros_like(gradient, dtype=accumulation_dtype(gradient.dtype))

    def wrapped(params, batch):
        """Returns the mean loss and gradients over the microbatches. If `grad` returns auxiliary
        values, the function `aux` combines those of all microbatches."""
        # A single microbatch is the whole batch, so a clipped gradient is right.
        if microbatches > 1:
            refuse_clipped(grad, "grads.accumulated", "the gradients of each microbatch")
        parts = split_into_microbatches(batch, microbatches)

        def add_part(sums, numbered_part):
            """Returns the sums with one microbatch's gradients added, and the microbatch's loss or
            `(loss, aux)`. The function is the body of a scan, which stacks the second result."""
            part, number = numbered_part
            # A tap is a place in the model that reports a value, here together with this number.
            with recording.at(microbatch=number):
                value, gradients = loss_and_gradients(grad, params, part)
            return jax.tree.map(add, sums, gradients), value

        # All sums are 0 when the scan begins, in float32 or wider, and only a trace of `grad` gives
        # their shapes. `zeros_like` also keeps the axes along which a gradient varies, since the
        # carry of a scan must keep its type. `recording.numbered` returns the microbatches'
        # numbers, for taps; if no taps are recorded, it returns None.
        first_part = jax.tree.map(lambda leaf: leaf[0], parts)
        value, shapes = jax.eval_shape(lambda: loss_and_gradients(grad, params, first_part))
        check_pair(value, shapes, params)
        numbered_parts = parts, recording.numbered(microbatches)
        # A batch without arrays does not tell the scan its length.
        sums, values = lax.scan(
            add_part, jax.tree.map(zeros, shapes), numbered_parts, length=microbatches
        )
        means = jax.tree.map(lambda total: total / microbatches, sums)
        return map_loss_and_aux(values, jnp.mean, aux), means

    return wrapped


def split_into_microbatches(batch: Tree, microbatches: int) -> Tree:
    """Returns `batch` with the first dim of each leaf cut in order into two dims,
    `[microbatches, sequences of one microbatch]`.

    Raises:
        ValueError: the leaves' first dims differ, or are no multiples of `microbatches`.
    """
    rows = {}  # each leaf's first dim, by the leaf's path
    for path, leaf in jax.tree.leaves_with_path(batch):
        name = jax.tree_util.keystr(path) or "itself"
        if not jnp.ndim(leaf):
            raise ValueError(
                f"The batch's leaf {name} is a scalar, but the first dim of every leaf must run "
                "over the sequences. Broadcast it to one number per sequence, or let the loss "
                "close over it."
            )
        if leaf.shape[0] % microbatches:
            raise ValueError(
                f"The batch's leaf {name} has {leaf.shape[0]} rows on each device, which must "
                f"be a multiple of microbatches={microbatches}. Use another batch size, or fewer "
                "microbatches."
            )
        rows[name] = leaf.shape[0]
    check_equal_rows(
        rows,
        "A batch is cut into parts by rows, so all leaves need equally many rows. Move a leaf "
        "without rows, such as a weight for each class, to the parameters, or let the loss close "
        "over it.",
    )

    def cut(leaf):
        # The size of a part is given, since -1 has no meaning in a leaf of no numbers.
        return leaf.reshape(microbatches, leaf.shape[0] // microbatches, *leaf.shape[1:])

    return jax.tree.map(cut, batch)


# Devices


def mean_over_devices(aux: Tree, axis: Axis) -> Tree:
    """Returns the mean of each array over devices, along those axes in `axis` along which the array
    is typed as varying. Along the other axes, all devices have the same array. The sums are taken
    in float32 or wider. An integer array that varies becomes floating-point."""

    def mean(path, leaf):
        """Returns the mean of one array over the devices of those axes in `axis` along which it
        varies, or the array if it varies along none."""
        differs_along = axis.over(varying_axes(leaf) if trees.is_array(leaf) else ())
        if not differs_along.names:
            return leaf
        floats = floating(path, leaf)
        total = differs_along.all_mean(floats.astype(accumulation_dtype(floats.dtype)))
        return _narrowed(total, floats.dtype)

    return jax.tree.map_with_path(mean, aux)


def averaged(
    grad: Grad,
    axis: AxisLike,
    *,
    aux: Callable[[Any, Axis], Any] = mean_over_devices,
    reduced: Callable[[Any], Any] | None = None,
) -> Grad:
    """Returns a gradient function for the mean of `grad` over the devices of `axis`, which split
    the batch. This is data parallelism: each device computes the gradients of its part of the
    batch, and the mean over devices is the gradient of the whole batch.

    The parameters are declared varying before `grad` differentiates, so that JAX does not sum their
    gradients. Then the gradients are reduced once. If a parameter is split over some of the axes
    (ZeRO-3, experts), its gradient is already summed over these axes, so this gradient is summed
    only over the other axes. Each sum is divided by the product of the sizes of all axes. Sums are
    taken in float32 or wider, and rounded once, to the gradient's own type.

        >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
        >>> grad = grads.averaged(jax.value_and_grad(loss), ring("data"))
        >>> specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        >>> split = jax.jit(mesh.spmd(grad, mesh=mesh.make(data=8), **specs))
        >>> mean, gradients = split(jnp.ones(2), jnp.ones((16, 2)))
        >>> print(mean, gradients)
        4.0 [4. 4.]

    A loss that itself takes a training step (MAML) may use `averaged` in that step, even if the
    gradient of the loss is averaged over the same axis.

    Args:
        grad: a gradient function.
        axis: the axis, or the axes, that split the batch.
        aux: a function `(values, axis)` that combines the auxiliary values of the devices.
        reduced: a function such as `lambda model: model.blocks`. It returns the parameters whose
            gradients the backward pass sums; these parameters are not declared varying. See
            `reduced_in_backward`.

    Raises:
        ValueError: the loss is already reduced over `axis`; a device has only a part of a parameter
            along `axis`, and the loss uses this part as if it were whole; one spec of `mesh.spmd`
            splits several leaves of the batch, and these have different numbers of rows; or the
            types do not record which values vary over devices, as under `check_vma=False`.
    """
    axis = Axis.of(axis)

    # `total` is the sum over devices, and `term` this device's gradient or loss.
    def mean(total, term):
        return _narrowed(total / axis.size(), term.dtype)

    def wrapped(params, batch):
        local = local_gradients(grad, params, batch, axis, reduced=reduced)
        return value_and_sums(local, axis, mean, aux=aux)

    return wrapped


def summed(
    grad: Grad,
    axis: AxisLike,
    *,
    loss: bool = False,
    aux: Callable[[Any, Axis], Any] = mean_over_devices,
    reduced: Callable[[Any], Any] | None = None,
) -> Grad:
    """Returns a gradient function that sums the gradients of `grad` over the devices of `axis`.

    On each device `grad` computes one term of the sum, and each device gets the sum. A gradient is
    summed only over those names in `axis` along which all devices have the same parameter. Use
    `summed` if each device computes a part of one loss. In sequence parallelism, for example, each
    device normalises only some of the tokens, so the device's gradient of the norm's weight is one
    term of the sum. Sums are taken in float32 or wider, and rounded once, to the gradient's own
    type.

    Args:
        grad: a gradient function.
        axis: the axis, or the axes, of the devices that each compute a part of the loss.
        loss: whether the devices' losses are summed too. If not, the loss is returned as it is; it
            may already be a sum or mean over `axis`.
        aux: a function `(values, axis)` that combines the auxiliary values of the devices.
        reduced: a function such as `lambda model: model.blocks`. It returns the parameters whose
            gradients `grad` itself sums over the devices, in its backward pass, so that they are
            not summed again. Wrap the function that uses them in `reduced_in_backward`.

    Raises:
        ValueError: the gradients are already summed over `axis`; or `loss` is true, and the loss is
            already reduced over `axis`. The other errors of `averaged` are raised too.
    """

    axis = Axis.of(axis)

    def total_as_term(total, term):
        return _narrowed(total, term.dtype)

    def wrapped(params, batch):
        # A sum of gradients that are the same on all devices is wrong, unlike their mean, so
        # `mean=False` refuses such gradients.
        local = local_gradients(grad, params, batch, axis, loss=loss, reduced=reduced, mean=False)
        return value_and_sums(local, axis, total_as_term, loss=loss, aux=aux)

    return wrapped


def value_and_sums(
    local: LocalGradients,
    axis: Axis,
    finish: Callable[[Array, Array], Array],
    *,
    aux: Callable[[Any, Axis], Any],
    loss: bool = True,
    scatter: Callable[..., tuple[PyTree, PyTree, PyTree]] | None = None,
) -> tuple[PyTree, PyTree]:
    """Returns `(value, gradients)`. The gradients are summed over `axis`. If `loss` is true, the
    loss is summed too.

    A gradient is summed over those axes along which the devices have copies of its parameter,
    unless the backward pass has summed it already. The sums and the auxiliary values are sent in
    one order on all devices.

    Args:
        local: this device's loss and gradients, before any sum, as `local_gradients` returns them.
        axis: the axis to sum over.
        finish: `finish(sum, own)` makes the result from the sum over devices and from this device's
            own value. It is called for each gradient and for the loss.
        aux: a function `(values, axis)` that combines the auxiliary values of the devices.
        loss: whether the loss is summed. If not, `finish` gets this device's loss in place of the
            sum.
        scatter: a function `(value, gradients, params, names) -> (value, gradients, names)`, called
            before the sum. `names` has for each gradient the axes over which it is to be summed;
            the returned `names` are the axes over which it must still be summed. `scatter` returns
            the same `value`, but may make it wait for other arrays, so that all devices send in one
            order.
    """

    def axes_to_reduce(gradient, declared, parameter):
        """Returns the axes to sum one gradient over. `parameter` is the gradient's parameter with
        its own type, from `local.params`. `declared` is the same parameter with the type that the
        gradient function got, from `local.declared`: it may vary along more axes."""
        # If the parameter was declared varying, the gradient is one device's term, even if its own
        # type does not vary, such as a gradient of zeros. If neither varies, the user picked the
        # parameter by the argument `reduced` of `averaged` or `summed`: then it was not declared
        # varying, and the backward pass has summed its gradient already.
        differs = {*varying_axes(gradient), *varying_axes(declared)}
        return tuple(name for name in axes_of_copies(parameter, axis) if name in differs)

    value, gradients = local.value, local.gradients
    declared = matching_parameters(gradients, local.declared)
    params = matching_parameters(gradients, local.params)
    names = jax.tree.map(axes_to_reduce, gradients, declared, params)
    # ZeRO scatters the gradients here. The sum below is over the axes that are left.
    if scatter is not None:
        value, gradients, names = scatter(value, gradients, params, names)
    terms = loss_part(value), gradients
    # Without axes, `()`, a leaf is not summed.
    sums = summed_over(terms, (axes_of(axis) if loss else (), names), axis)
    total, finished = jax.tree.map(finish, sums, terms)

    def combined(values):
        # The auxiliary values wait for all sums, so that all devices send in one order.
        return aux(sequence_after(values, (total, finished)), axis)

    return map_loss_and_aux(value, lambda _: total, combined), finished


def summed_over(tree: Tree, names: PyTree, axis: Axis) -> Tree:
    """Returns each leaf of `tree`, summed in float32 or wider over the mesh axes that `names` has
    for it.

    `names` is a tree like `tree`, with a tuple of names of `axis` in place of each leaf. A leaf
    with an empty tuple is not summed.
    """
    wide_tree = jax.tree.map(lambda leaf: leaf.astype(accumulation_dtype(leaf.dtype)), tree)
    leaves, structure = jax.tree.flatten(wide_tree)
    names = structure.flatten_up_to(names)
    # The first group waits for the whole tree, since the computation of the tree may send too. Each
    # later group also waits for the sums before it. So all devices send in one order.
    before = tree
    # All leaves with the same axes are one group and one all-reduce, so that the algorithm can join
    # them. All processes must trace the same program, so the groups need one order in all of them:
    # that of their first leaves, which `dict.fromkeys` keeps. (A set could have another order in
    # each process.) Groups with more axes come first, but any fixed order would do.
    groups = [group for group in dict.fromkeys(names) if group]
    for group in sorted(groups, key=len, reverse=True):
        members = [i for i, names_of_leaf in enumerate(names) if names_of_leaf == group]
        sums = axis.over(group).all_reduce(sequence_after([leaves[i] for i in members], before))
        for i, total in zip(members, sums, strict=True):
            leaves[i] = total
        before = sums, tree
    return jax.tree.unflatten(structure, leaves)


def _narrowed(total: Array, dtype: jnp.dtype) -> Array:
    """Returns `total`, a sum over devices in a wide type, rounded to `dtype`.

    If a program uses a sum only after it rounds the sum to bfloat16, XLA for TPUs sends and adds in
    bfloat16. `reduce_precision` rounds the numbers within the wide type, so the sum stays wide.
    XLA changes no sums that are rounded to float16.
    """
    if dtype == jnp.bfloat16:
        total = lax.reduce_precision(total, exponent_bits=8, mantissa_bits=7)
    return total.astype(dtype)


def reduced_in_backward(function: Callable[..., Any], axis: AxisLike) -> Callable[..., Any]:
    """Returns `function` with a backward pass that sums the gradients of the parameters over the
    devices of `axis`. Each device computes one term of the sum, and each device gets the sum.

    If `function` is a block that a loop runs, the loop of the backward pass all-reduces the
    gradients of each layer. The messages can overlap with the work of the next iteration. The
    messages have as many bytes as those of `averaged`, but they are sent leaf by leaf. Do not use
    `accumulated` on a loss that runs the block: the messages would be sent once per microbatch.
    Pass `reduced=` to tell `averaged` which gradients to leave to the block:

        block, picked = grads.reduced_in_backward(block, ring("data")), lambda model: model.blocks
        grad = grads.averaged(jax.value_and_grad(loss), ring("data"), reduced=picked)

    No gradient is summed twice. Without `reduced=picked`, `averaged` declares the block's
    parameters varying, so the block sums nothing, and `averaged` sums at the end. If you pass
    `reduced=picked` but do not wrap the block, the picked parameters are not varying, so JAX itself
    sums their gradients in the backward pass, by a `psum`. The wrapped block sums a gradient in
    float32 or wider, and rounds the sum to the parameter's dtype.

    Args:
        function: a block; its first argument is the tree of parameters.
        axis: the axes that split the batch. The gradient of a parameter is summed over each of
            these axes along which the parameter is the same on all devices.
    """
    axis = Axis.of(axis)

    def summed_backward(parameter):
        """Returns the parameter, declared varying along those axes along which all devices have the
        same parameter. Its cotangent is all-reduced over these axes."""
        # If the parameter is declared varying along all axes, `averaged` sums its gradient.
        names = replicated_axes(parameter, axis) if eqx.is_inexact_array(parameter) else ()
        if not names:
            return parameter

        # `linear` computes `forward`, and has `backward` as its transpose.
        def forward(x):
            return varying(x, names)

        def backward(cotangent):
            total = axis.over(names).all_reduce(
                cotangent.astype(accumulation_dtype(cotangent.dtype))
            )
            return _narrowed(total, cotangent.dtype)

        return linear(parameter, forward=forward, backward=backward)

    def wrapped(params, *arguments):
        return function(jax.tree.map(summed_backward, params), *arguments)

    return wrapped
