"""ZeRO: the optimizer's state, the gradients and the parameters themselves split over the replicas, which would each hold all.

n devices of the axis split the batch. Where plain data parallelism all-reduces every gradient and keeps n equal copies, here

    ZeRO-1   `scattered` round `accumulated`, and `sharded` optimizer      state 1/n
    ZeRO-2   `accumulated` round `scattered`, and `sharded` optimizer      state and sums of gradients 1/n
    ZeRO-3   `gathered` blocks, `unsharded` rest, round it `averaged`      state, gradients and parameters 1/n

The first moves what data parallelism moves, 2 (n - 1)/n of the parameters' bytes a step, as one reduce-scatter and one
all-gather; the second scatters once a microbatch; the third gathers twice (again in the backward pass) and scatters once a
microbatch.

Which dim of a leaf is split is told by a tree of specs, as `rules.specs` makes with `rules.fsdp`: the dim whose entry is
the axis. A leaf without one stays whole (`rules.explain` says why) and is all-reduced. Sums are taken in float32 or wider.
For a split inside a group with copies across groups, put `grads.averaged(..., "group")` round it.

Source: Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models (arXiv 1910.02054).
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from parallax import mesh, precision, remat, rules
from parallax.collectives import Axis, AxisLike
from parallax.collectives.cpu import ordered
from parallax.collectives.types import axes, linear, replicated, varying
from parallax.grads import Grad, varies
from parallax.typed import PyTree, Specs


def scattered(
    grad: Grad,
    axis: AxisLike,
    *,
    specs: Specs | None = None,
) -> Grad:
    """The mean of `grad` over the devices of `axis`, of which each keeps its share: `A[I] {U_X} -> A[I_X]`.

    (n - 1)/n of the parameters' bytes move, half of what `grads.averaged` moves. Leaves that stay whole are all-reduced, as is
    the loss. Gradients that `scatter` has split inside `grad` already are divided only.

    Args:
        grad: a grad arrow.
        axis: the axis that splits the batch.
        specs: of the shares, a tree like the parameters; by default those of `rules.fsdp(axis, size=n)`.
    """
    axis = Axis.of(axis)

    def wrapped(params, batch):
        weights = eqx.filter(params, eqx.is_inexact_array)
        n, split = axis.size(), _dims(weights, axis, specs)
        local = grad(varying(params, axis.names), batch)
        loss, gradients = ordered(local, local)

        def own(dim, gradient, weight):
            if dim is None:
                return axis.all_reduce(_wide(gradient))
            return _scatter(gradient, dim, axis) if gradient.shape == weight.shape else gradient

        sums = _mapped(own, split, gradients, weights)
        return axis.all_reduce(loss) / n, jax.tree.map(lambda g: g / n, sums)

    return wrapped


def scatter(gradients: PyTree, axis: AxisLike, *, specs: Specs) -> PyTree:
    """The sums of `gradients` over `axis`, of which each device keeps its share; leaves that stay whole are left local.

    It is the half of `scattered` that goes into `pipeline.Shares(scatter)`, with `scattered` round it.
    """
    axis = Axis.of(axis)
    own = lambda dim, g: g if dim is None else _scatter(g, dim, axis)
    return _mapped(own, _dims(gradients, axis, specs), gradients)


def sharded(
    optimizer: optax.GradientTransformation,
    axis: AxisLike,
    *,
    specs: Specs | None = None,
) -> optax.GradientTransformation:
    """`optimizer` with 1/n of its state and its work on each device: ZeRO-1 and 2, for any optimizer that acts leaf by leaf.

    Its `update` takes each device's share of the gradients (from `scattered`), updates that share of the parameters, and gathers
    the updates: (n - 1)/n of the parameters' bytes. Local gradients of full shape it first averages and scatters itself,
    and of gradients averaged already it takes its share. Its `init`, inside the map, gives the share of the state; outside, where
    arrays are global, the whole, to be placed by `rules.optimizer_specs(optimizer, params, specs)`.

    Arguments are those of `scattered`. A transformation that looks at all leaves at once, such as clipping by global norm,
    would see the shares alone: clip in `step.make` or `grads.clipped`, which know shares from wholes.

    Raises:
        ValueError: `update` is called without the parameters.
    """

    axis = Axis.of(axis)

    def shares(params):
        own = lambda dim, w: w if dim is None else _share(w, dim, axis)
        return _mapped(own, _dims(params, axis, specs), params)

    def init(params):
        return optimizer.init(shares(params) if _inside(axis) else params)

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("zero.sharded: update needs the parameters, whose shapes tell shares from wholes. Pass params.")
        weights = eqx.filter(params, eqx.is_inexact_array)
        n, split = axis.size(), _dims(weights, axis, specs)

        def own(dim, gradient, weight):
            local = varies(gradient, axis) and not varies(weight, axis)
            if dim is None:
                return axis.all_reduce(_wide(gradient)) / n if local else gradient
            if gradient.shape != weight.shape:
                return gradient
            if local:
                return _scatter(gradient, dim, axis) / n
            return _share(gradient, dim, axis)

        def whole(dim, share):
            return share if dim is None else replicated(axis.all_gather(share, axis=dim, tiled=True), axis.names)

        shared, state = optimizer.update(_mapped(own, split, updates, weights), state, shares(weights))
        return _mapped(whole, split, shared), state

    return optax.GradientTransformation(init, update)


def gathered(
    function: Callable[..., Any],
    specs: Specs,
    axis: AxisLike,
) -> Callable[..., Any]:
    """`function(params, ...)` of parameters that live as shares: gathered before it, their gradients scattered after it. ZeRO-3.

    `A[I_X] -> A[I]` for each leaf that `specs` split over `axis`; the gradient is the reduce-scattered sum. Round a block
    that a loop runs, it gathers layer by layer; with `remat.gathers` or another of `remat` round it, again in the backward
    pass, so that no gathered layer is kept:

        checkpoint = lambda block: remat.gathers(zero.gathered(block, block_specs, "data"))

    Args:
        function: a loss arrow, or a block; its first argument is the tree of parameters.
        specs: of the shares, a tree like that argument.
        axis: the axis that splits the batch.
    """

    def wrapped(params, *arguments):
        return function(_wholes(params, Axis.of(axis), specs), *arguments)

    return wrapped


def unsharded(
    grad: Grad,
    axis: AxisLike,
    *,
    specs: Specs,
) -> Grad:
    """`grad` of parameters that live as shares: gathered once before it, their gradients summed and scattered after it.

    For what is needed in all microbatches and too small to be gathered in each, such as embeddings beside `gathered` blocks.
    Leaves whose spec is None or does not name `axis` pass as they are. Wrap it in `grads.averaged`.
    """

    axis = Axis.of(axis)

    def wrapped(params, batch):
        wholes, dims = _wholes(params, axis, specs), _dims(params, axis, specs)
        gathered = _mapped(lambda dim, x: None if dim is None else x, dims, wholes)
        local = grad(eqx.combine(ordered(gathered, gathered), wholes), batch)
        loss, gradients = ordered(local, local)
        return loss, scatter(gradients, axis, specs=specs)

    return wrapped


def _dims(tree: PyTree, axis: Axis, specs: Specs | None) -> dict[str, int | None]:
    """The dim that each array of `tree`, by its path, is split along; None where it stays whole."""
    if specs is None:
        specs = rules.specs(eqx.filter(tree, eqx.is_array), rules.fsdp(axis.names, size=axis.size()))
    return {mesh.dotted(path): _dim(spec, axis) for path, spec in jax.tree.leaves_with_path(specs, is_leaf=mesh.is_spec)}


def _dim(spec: PartitionSpec, axis: Axis) -> int | None:
    """The dim whose entry names the axis."""
    found = [dim for dim, entry in enumerate(spec) if set(axes(axis.names)) & set(mesh.entry_axes(entry))]
    return found[0] if found else None


def _mapped(f: Callable[..., Any], dims: dict[str, int | None], tree: PyTree, *others: PyTree) -> PyTree:
    """`f(dim, leaf, ...)` of each leaf of `tree`, which may lack leaves that `dims` has."""
    return jax.tree.map_with_path(lambda path, *leaves: f(dims.get(mesh.dotted(path)), *leaves), tree, *others)


def _wholes(params: PyTree, axis: Axis, specs: Specs) -> PyTree:
    axis.size()  # refuses an axis that is not there

    def whole(dim, x):
        if dim is None:
            return x
        return linear(
            x,
            forward=lambda x: axis.all_gather(x, axis=dim, tiled=True),
            backward=lambda ct: _scatter(ct, dim, axis).astype(ct.dtype),
            name=remat.GATHERED,
        )

    return _mapped(whole, _dims(params, axis, specs), params)


def _scatter(x: Array, dim: int, axis: Axis) -> Array:
    """The sum over devices, in a wide type, of which each keeps its share: `A[I] {U_X} -> A[I_X]`."""
    return axis.reduce_scatter(_wide(x), scatter_dimension=dim, tiled=True)


def _wide(x: Array) -> Array:
    return x.astype(precision.wide(x.dtype))


def _share(x: Array, dim: int, axis: Axis) -> Array:
    """This device's share of `x`, which all devices have whole: `A[I] -> A[I_X]`."""
    share = x.shape[dim] // axis.size()
    return lax.dynamic_slice_in_dim(x, axis.index() * share, share, dim)


def _inside(axis: Axis) -> bool:
    """Whether this runs inside a map over the axis, on blocks, and not outside, on global arrays."""
    try:
        lax.axis_size(axis.names)
    except NameError:
        return False
    return True
