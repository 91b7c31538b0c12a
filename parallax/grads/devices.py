"""Makes the gradients of a whole batch: from its microbatches, one after another, or from the
devices that split the batch.

A gradient function is `(params, batch) -> (value, gradients)`, where `value` is the loss or
`(loss, aux)`. An array varies along an axis if its type says that it may differ between the devices
of the axis. A share is a device's part of a parameter; a parameter that is whole on each device is
a copy. `A {U_X}` means that each device of axis X holds one term of a sum, and `A` is the sum.
`axis.over(names)` is `axis` with only those of its names that are in `names`.
`sequence_after(x, y)` is `x`. On a CPU each array of `x` waits for all of `y`. `ENCLOSING.value`
has the axes of the gradient functions around the code being traced.
"""

import numbers
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxtyping import Array

from parallax import jaxprs, recording, trees
from parallax._typing import PyTree
from parallax.collectives import types
from parallax.collectives.axis import Axis, AxisLike
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import accumulation_dtype, linear, varying, varying_axes
from parallax.grads.axes import (
    ENCLOSING,
    Enclosing,
    axes_of,
    axes_of_copies,
    axes_of_several_devices,
    replicated_axes,
)
from parallax.grads.norms import refuse_clipped
from parallax.grads.results import (
    Grad,
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
            `microbatches`; or `grad` was made by `clipped`, and there are several microbatches.
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
        shapes = jax.eval_shape(lambda: loss_and_gradients(grad, params, first_part)[1])
        numbered_parts = parts, recording.numbered(microbatches)
        sums, values = lax.scan(add_part, jax.tree.map(zeros, shapes), numbered_parts)
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
                f"The batch's leaf {name} is a scalar, and the first dim of every leaf must be the "
                "sequences. Broadcast it to one number per sequence, or let the loss close over "
                "it."
            )
        if leaf.shape[0] % microbatches:
            raise ValueError(
                f"The batch's leaf {name} has {leaf.shape[0]} rows on each device, which must "
                f"be a multiple of microbatches={microbatches}. Use another batch size, or fewer "
                "microbatches."
            )
        rows[name] = leaf.shape[0]
    _check_equal_rows(
        rows,
        "A batch is cut into parts by rows, so all leaves need equally many rows. Move a leaf "
        "without rows, such as a weight for each class, to the parameters, or let the loss close "
        "over it.",
    )
    return jax.tree.map(lambda leaf: leaf.reshape(microbatches, -1, *leaf.shape[1:]), batch)


def _check_equal_rows(rows: dict[str, int], reason_and_cure: str) -> None:
    """Raises `ValueError` if the leaves of a batch have unequal numbers of rows.

    `rows` maps the name of each leaf to its number of rows. `reason_and_cure` ends the message:
    each caller has its own reason why the numbers must be equal.
    """
    if len(set(rows.values())) > 1:
        few, many = min(rows, key=rows.__getitem__), max(rows, key=rows.__getitem__)
        raise ValueError(
            f"The batch's leaf {few} has {rows[few]} rows on each device and its leaf {many} has "
            f"{rows[many]}. {reason_and_cure}"
        )


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
    the batch. This is data parallelism, `A {U_X} -> A`: a term on each device becomes one result on
    all.

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
    """Returns `grad` with its gradients summed over `axis`: each device has one term before, and
    the whole sum after, `A {U_X} -> A`.

    A gradient is summed only over those names in `axis` along which all devices have the same
    parameter. Use `summed` if each device computes a part of one loss. In sequence parallelism, for
    example, each device normalises only some of the tokens, so the device's gradient of the norm's
    weight is one term of the sum. Sums are taken in float32 or wider, and rounded once, to the
    gradient's own type.

    Args:
        grad: a gradient function.
        axis: the axis, or the axes, of the devices that each compute a part of the loss.
        loss: whether the devices' losses are summed too. If not, the loss is returned as it is; it
            may already be a sum or mean over `axis`.
        aux: a function `(values, axis)` that combines the auxiliary values of the devices.
        reduced: a function such as `lambda model: model.blocks`. It returns the parameters whose
            gradients the backward pass sums; these parameters are not declared varying. See
            `reduced_in_backward`.

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


class LocalGradients(NamedTuple):
    """The results of a gradient function on one device, before any sum over devices.

    Attributes:
        params: the parameters as they were given, with their own types.
        declared: the same parameters, typed as the gradient function got them: varying along the
            axis to be reduced over, except the parameters that the argument `reduced` of
            `local_gradients` picked.
        value: the loss, or `(loss, aux)`.
        gradients: the gradients on this device.
    """

    params: PyTree
    declared: PyTree
    value: PyTree
    gradients: PyTree


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
        the type that it had when the caller passed it. `declared` is the same parameter with the
        type that it had in the gradient function."""
        # If the parameter was declared varying, the gradient is one device's term, even if its own
        # type does not vary, such as a gradient of zeros. If neither varies, `reduced` (of
        # `averaged`) picked the parameter, and the backward pass has summed its gradient already.
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


def local_gradients(
    grad: Grad,
    params: PyTree,
    batch: PyTree,
    axis: Axis,
    *,
    loss: bool = True,
    reduced: Callable[[Any], Any] | None = None,
    mean: bool = True,
) -> LocalGradients:
    """Returns this device's loss and gradients, and the parameters before and after they were
    declared varying along `axis`.

    Args:
        grad: a gradient function. If some parameters are shares (a device has only a part of each),
            `grad` is traced to a program. The program is run, and checked for a share that is used
            as if it were a whole parameter.
        params: the parameters of `grad`.
        batch: this device's batch.
        axis: the axis to be reduced over.
        loss: whether the loss is to be reduced as well.
        reduced: picks parameters, such as `lambda model: model.blocks`. They are not declared
            varying, since their gradients are summed in the backward pass.
        mean: whether the caller takes the mean over `axis`, not the sum.

    Raises:
        ValueError: the loss or the gradients are already reduced over `axis`; a device has only a
            part of a parameter along `axis`, and the loss uses this part as if it were whole; or
            another error of `averaged`.
    """
    types.check_typed()  # raises an error under `check_vma=False`
    enclosing, names = ENCLOSING.value, axes_of_several_devices(axes_of(axis))
    # `mesh.spmd` sets `UNEVEN_AXES`: the axes over which one spec splits several leaves with
    # different numbers of rows. In a batch, one of these leaves is probably a table, such as a
    # weight for each class, that was split by mistake. So such a batch is refused.
    _check_one_spec(batch, trees.UNEVEN_AXES.value.intersection(names))
    shares = _shares(params, names)  # by axis, the paths of parameters that vary along it
    if axes_with_shares := sorted(enclosing.shares.intersection(shares)):
        raise ValueError(
            f"A gradient function over {axes_with_shares} is inside another one over the same "
            "axis. In the inner one, types do not show which parameters are split over that axis. "
            "Average the inner gradients by hand: lax.pmean(gradient, axis) for a whole parameter, "
            "and gradient / lax.axis_size(axis) for a split one, whose gradient is already a sum."
        )
    # Along the axes in `enclosing.declared`, parameters are copies, though their types vary: an
    # enclosing function declared them varying.
    shares = {name: paths for name, paths in shares.items() if name not in enclosing.declared}
    declared = varying(params, axis.names)
    if reduced is not None:
        # The parameters that `reduced` picks keep their own types.
        declared = eqx.tree_at(reduced, declared, reduced(params))
    with ENCLOSING(Enclosing(enclosing.declared.union(names), enclosing.shares.union(shares))):
        # With shares the checks need the program of `grad`. It is also run, so that `grad` is
        # traced once. Without shares `grad` itself runs: in a program the parameters are new
        # arrays, so a pipeline in `grad` could not tell whether an array that the user's functions
        # read by closure is a parameter (`refuse_closures`). With shares this check is given up.
        program = _program_with_shares(grad, declared, batch, params, shares) if shares else None
        value, gradients = program.run() if program else loss_and_gradients(grad, declared, batch)
        _check_not_summed(value, gradients, declared, names, mean=mean)
        # If the caller does not reduce the loss, it may be reduced already.
        reduced_axes = _reduced_axes(value, gradients, names) if loss else []
        # A loss can be wrong along the axes of shares, if it uses a share as a whole parameter, and
        # along `reduced_axes`, if it was reduced there. Without such axes, nothing is traced again.
        for name in sorted({*shares, *reduced_axes}):
            program = program or _Program(grad, declared, batch, params)
            program.check(name, shares.get(name, set()), may_be_reduced=name in reduced_axes)
        return LocalGradients(params, declared, value, gradients)


def _check_one_spec(batch: PyTree, uneven_axes: frozenset[str]) -> None:
    """Raises `ValueError` if one spec splits several leaves of a batch, and these leaves have
    different numbers of rows.

    `uneven_axes` are the axes over which one spec of `mesh.spmd` splits arrays with different
    numbers of rows. These arrays may be outside the batch, so the leaves of the batch are compared
    here. If each array has its own spec, the different numbers are intended, and `uneven_axes` is
    empty. Arrays of random keys, such as one key for each device, are not checked.
    """
    rows = {
        jax.tree_util.keystr(path) or "itself": leaf.shape[0]
        for path, leaf in jax.tree.leaves_with_path(eqx.filter(batch, trees.is_array))
        if uneven_axes.intersection(varying_axes(leaf))
        and leaf.ndim
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    }
    _check_equal_rows(
        rows,
        f"One spec splits both leaves over {sorted(uneven_axes)}, so a table, such as a weight for "
        "each class, would be split like the rows of the batch. Give each leaf a spec of its own "
        "in in_specs: P() for a table, which all devices need.",
    )


def _shares(params: PyTree, names: Sequence[str]) -> dict[str, set[str]]:
    """Returns a dict from an axis to the paths of the parameters that vary along this axis. An axis
    along which no parameter varies is left out."""
    leaves = jax.tree.leaves_with_path(eqx.filter(params, eqx.is_inexact_array))
    shares = {}
    for name in names:
        paths = {trees.dotted(path) for path, leaf in leaves if name in varying_axes(leaf)}
        if paths:
            shares[name] = paths
    return shares


def _check_not_summed(
    value: PyTree, gradients: PyTree, declared: PyTree, names: Sequence[str], *, mean: bool
) -> None:
    """Raises `ValueError` if all gradients were already summed over one of the axes `names`.
    `declared` are the parameters as the gradient function got them. `mean` says whether the caller
    takes the mean over `names`, not the sum.

    If a parameter is declared varying along an axis, its gradient varies too, unless a sum over the
    axis made it the same on all devices. If one gradient varies, not all gradients were summed over
    the axis. If the loss and the gradients are all the same on all devices, a mean does not change
    them, so with `mean` this case raises no error. If the loss varies and the gradients do not,
    only the gradients were summed: the mean of their equal sums is the sum itself, n times too
    large on n devices.
    """
    leaves = jax.tree.leaves(gradients)
    parameters = jax.tree.leaves(matching_parameters(gradients, declared))
    for name in names:
        differs = [
            name in varying_axes(gradient)
            for gradient, parameter in zip(leaves, parameters, strict=True)
            if name in varying_axes(parameter)
        ]
        # If no parameter was declared varying (`not differs`), the gradients tell nothing.
        if not differs or any(differs) or (mean and name not in varying_axes(loss_part(value))):
            continue
        not_summed = "The loss was not summed: it still differs between devices."
        summed_again = "A second sum would add them once for each device."
        raise ValueError(
            f"The gradients are the same along {name!r}, so they were summed over it already. "
            f"{not_summed if mean else summed_again} Sum or average over {name!r} once: wrap the "
            "gradient function in grads.averaged or in grads.summed, not in both."
        )


def _reduced_axes(value: PyTree, gradients: PyTree, names: Sequence[str]) -> list[str]:
    """Returns those of the axes `names` along which a gradient varies and the loss does not: the
    loss may have been reduced over these axes.

    If neither the gradients nor the loss vary along an axis, the gradients and the loss were
    reduced over this axis. `_check_not_summed` accepts such gradients if the caller takes a mean,
    and refuses them for a sum.
    """
    leaves = jax.tree.leaves(gradients)
    differs = {name for gradient in leaves for name in varying_axes(gradient)}
    return [
        name for name in names if name in differs and name not in varying_axes(loss_part(value))
    ]


def _program_with_shares(
    grad: Grad, declared: PyTree, batch: PyTree, params: PyTree, shares: dict[str, set[str]]
) -> "_Program":
    """Returns the traced program of `grad`. `declared` are the parameters after they were declared
    varying, and `params` are the same parameters before. Some parameters are shares; `shares` has
    the paths of these parameters by axis. Raises `ValueError` if `grad` cannot be traced because
    shapes do not match.
    """
    try:
        return _Program(grad, declared, batch, params)
    except TypeError as error:
        # Only an error about shapes can come from shares, which are smaller than whole parameters.
        if not re.search("shape|dimension|rank|size", str(error)):
            raise
        paths = sorted({path or "itself" for split in shares.values() for path in split})
        raise ValueError(
            f"The loss cannot be traced: {str(error).splitlines()[0]} The parameters {paths} are "
            f"shares along {sorted(shares)}: each device has only a part of each parameter. If "
            "nothing gathers them, wrap the loss, or the block that uses them, in "
            f"zero.gathered(..., {next(iter(shares))!r}, specs) or ZeRO.loss."
        ) from error


class _Program:
    """The program of a gradient function, traced on given parameters and a batch. It can be checked
    and run. `closed` is the closed jaxpr, `arrays` are the arguments of the jaxpr, and `structure`
    is the tree structure of the results. `outside` has the parameters before they were declared
    varying, as pairs of a path and an array. The gradient function may read these arrays by
    closure, so they are checked too."""

    def __init__(self, grad: Grad, params: PyTree, batch: PyTree, outside: PyTree):
        """Traces `grad(params, batch)`, so that its program can be checked and run. Only arrays can
        be arguments of a program, so all other leaves are constants. `outside` are the parameters
        before they were declared varying."""
        self.outside = jax.tree.leaves_with_path(eqx.filter(outside, eqx.is_inexact_array))
        self.arrays, static = eqx.partition((params, batch), trees.is_array)

        def of_arrays(arrays):
            return loss_and_gradients(grad, *eqx.combine(arrays, static))

        self.closed: ClosedJaxpr
        self.closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(self.arrays)
        self.structure = jax.tree.structure(shapes)

    def run(self) -> PyTree:
        """Returns the loss and the gradients."""
        results = jaxpr_as_fun(self.closed)(*jax.tree.leaves(self.arrays))
        # A result that is a constant of the program is an array of NumPy.
        return jax.tree.unflatten(self.structure, map(jnp.asarray, results))

    def check(self, name: str, shares: set[str], *, may_be_reduced: bool) -> None:
        """Raises `ValueError` if the loss uses a share as if it were a whole parameter. `shares`
        has the paths of the parameters that are split along the axis `name`.

        The caller sets `may_be_reduced` if the loss does not vary along the axis. If such a loss
        depends on an argument that varies along the axis, the loss was reduced over the axis, and
        `check` raises `ValueError`.
        """
        params, batch = map(jax.tree.leaves_with_path, self.arrays)
        # One for each argument of the program: the parameters come first.
        is_data = [False] * len(params) + [True] * len(batch)
        # The uses of each argument by the first result, the loss, and then the uses of each
        # parameter that `grad` reads by closure. `reached` says whether the loss depends on the
        # argument, and `unsent` whether the argument is combined with data before a collective over
        # the axis.
        weights = [leaf for _, leaf in self.outside]
        uses = jaxprs.uses(self.closed, name, data=is_data, weights=weights)[0]
        unsent = uses.unsent[: len(params)] + uses.unsent[len(is_data) :]
        for (path, leaf), is_used in zip([*params, *self.outside], unsent, strict=True):
            if is_used and trees.dotted(path) in shares:
                raise ValueError(
                    f"The parameter {trees.dotted(path) or 'itself'}, here of shape {leaf.shape}, "
                    f"differs along {name!r}, so it counts as a share: one device's part of a "
                    "parameter. The loss uses the share as if it were the whole parameter, so each "
                    "device would train a different model. Wrap the loss, or the block that uses "
                    f"the parameter, in zero.gathered(..., {name!r}, specs) or ZeRO.loss. Or "
                    "replicate the parameter with P(), or split it over an axis that does not "
                    "split the batch. If a loop runs over the split dim, for example a loop over "
                    "layers, do not split that dim: rules.fsdp(..., keep={'blocks.**': (0,)})."
                )
        leaves = [leaf for _, leaf in (*params, *batch)]
        # Whether each argument varies along the axis and the loss depends on it. Not `strict`: what
        # `grad` reads by closure does not count.
        reaches = (
            name in varying_axes(leaf) and used
            for leaf, used in zip(leaves, uses.reached, strict=False)
        )
        if may_be_reduced and any(reaches):
            raise ValueError(
                f"The loss is the same along {name!r}, so it was already reduced over this axis, "
                "by lax.pmean or the like. Averaging would divide its gradients a second time. "
                f"Return each device's own loss, or use grads.summed(grad, {name!r}), since the "
                "gradient of a reduced loss is the sum of the devices' gradients."
            )


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
    # them. All processes must trace the same program, so the groups need the same order in all
    # processes: groups with the most axes come first, and then the order of the leaves counts. (A
    # set instead of `dict.fromkeys` could have another order in each process.)
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

    If a program rounds a sum to bfloat16 and does not use the wide sum, XLA for TPUs sends and adds
    in bfloat16. `reduce_precision` rounds the numbers within the wide type, so the sum stays wide.
    XLA changes no sums that are rounded to float16.
    """
    if dtype == jnp.bfloat16:
        total = lax.reduce_precision(total, exponent_bits=8, mantissa_bits=7)
    return total.astype(dtype)


def reduced_in_backward(function: Callable[..., Any], axis: AxisLike) -> Callable[..., Any]:
    """Returns `function` with the gradients of its parameters summed over `axis` in the backward
    pass, `A {U_X} -> A`: each device has one term of the sum before, and the whole sum after.

    If `function` is a block that a loop runs, the loop of the backward pass all-reduces the
    gradients of each layer. The messages can overlap with the work of the next iteration. The
    messages have as many bytes as those of `averaged`, but they are sent leaf by leaf. Do not use
    `accumulated` on a loss that runs the block: the messages would be sent once per microbatch.
    Pass `reduced=` to tell `averaged` which gradients to leave to the block:

        block, picked = grads.reduced_in_backward(block, ring("data")), lambda model: model.blocks
        grad = grads.averaged(jax.value_and_grad(loss), ring("data"), reduced=picked)

    No gradient is summed twice. Without `reduced=picked`, `averaged` declares the block's
    parameters varying, so the block sums nothing, and `averaged` sums at the end. Without the
    wrapped block, the picked parameters are not varying, so JAX itself sums their gradients in the
    backward pass, by `jax.lax`. The block sums a gradient in float32 or wider, and rounds the sum
    to the parameter's dtype.

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
