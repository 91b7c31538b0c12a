"""This device's gradients, before any sum over devices, and the checks that the sum will be right.

An array varies along an axis if its type says that it may differ between the devices of the axis. A
*share* is a device's part of a parameter. If each device has the whole parameter, it has a *copy*.
`ENCLOSING.value` has the axes of the gradient functions around the code being traced.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from parallax import jaxprs, trees
from parallax._typing import PyTree
from parallax.collectives import types
from parallax.collectives.axis import Axis
from parallax.collectives.types import varying, varying_axes
from parallax.grads.axes import ENCLOSING, Enclosing, axes_of, axes_of_several_devices
from parallax.grads.results import Grad, loss_and_gradients, loss_part, matching_parameters


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
        reduced: a function that returns some of the parameters, such as `lambda model:
            model.blocks`. These parameters are not declared varying, since the backward pass sums
            their gradients.
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
        # The axes along which a gradient varies and the loss does not: the loss may have been
        # reduced over them, and `check` finds out. A caller that does not reduce it allows this.
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
    check_equal_rows(
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

    An axis along which no gradient varies is left out: `_check_not_summed` has already decided
    whether to raise an error for this axis.
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
    varying, and `params` are the same parameters before. `shares` has, by axis, the paths of the
    parameters that this axis splits. Raises `ValueError` if `grad` cannot be traced because shapes
    do not match.
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
        # `jaxprs.uses` returns the `Uses` of each result; result 0 is the loss. A `Uses` has an
        # entry for each argument, and then one for each of `weights`, the parameters that `grad`
        # may read by closure. `reached` says whether the loss depends on the argument, and `unsent`
        # whether the argument is combined with data before a collective over the axis.
        weights = [leaf for _, leaf in self.outside]
        uses = jaxprs.uses(self.closed, name, data=is_data, weights=weights)[0]
        # Without the entries of the batch, which stand between those of `params` and `weights`.
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


def check_equal_rows(rows: dict[str, int], reason_and_cure: str) -> None:
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
