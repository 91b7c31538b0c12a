"""ZeRO: the optimizer's state, the gradients and the parameters themselves split over the replicas, which would each hold all.

n devices of the axis split the batch. Where plain data parallelism all-reduces every gradient and keeps n equal copies, here

    ZeRO-1   `scattered` round `accumulated`, and `sharded` optimizer      state 1/n
    ZeRO-2   `accumulated` round `scattered`, and `sharded` optimizer      state and sums of gradients 1/n
    ZeRO-3   `gathered` blocks, `unsharded` rest, round it `averaged`      state, gradients and parameters 1/n

The first moves what data parallelism moves, 2 (n - 1)/n of the parameters' bytes a step, as one reduce-scatter and one
all-gather; the second scatters once a microbatch; the third gathers twice (again in the backward pass) and scatters once a
microbatch.

Which dim of a leaf is split is told by a tree of specs, as `rules.specs` makes with `rules.fsdp`: the dim whose entry is
`axis_name`. A leaf without one stays whole (`rules.explain` says why) and is all-reduced. Sums are taken in float32 or wider.
For a split inside a group with copies across groups, put `grads.averaged(..., "group")` round it.

Source: Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models (arXiv 1910.02054).
"""

from collections.abc import Callable

import equinox as eqx
import jax
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from parallax import mesh, precision, remat, rules
from parallax.collectives.replicated import AxisName, axes, linear, ordered, replicated, size, varying
from parallax.grads import Grad, varies

Specs = PyTree[PartitionSpec | None]


def scattered(
    grad: Grad,
    axis_name: AxisName,
    *,
    specs: Specs | None = None,
    all_reduce: Callable = lax.psum,
    reduce_scatter: Callable = lax.psum_scatter,
) -> Grad:
    """The mean of `grad` over the devices of `axis_name`, of which each keeps its share: `A[I] {U_X} -> A[I_X]`.

    (n - 1)/n of the parameters' bytes move, half of what `grads.averaged` moves. Leaves that stay whole are all-reduced, as is
    the loss. Gradients that `scatter` has split inside `grad` already are divided only.

    Args:
        grad: a grad arrow.
        axis_name: the axis that splits the batch.
        specs: of the shares, a tree like the parameters; by default those of `rules.fsdp(axis_name, size=n)`.
        all_reduce: joins what stays whole.
        reduce_scatter: joins the rest.
    """

    def wrapped(params, batch):
        weights = eqx.filter(params, eqx.is_inexact_array)
        n, split = size(axis_name), _dims(weights, axis_name, specs)
        local = grad(varying(params, axis_name), batch)
        loss, gradients = ordered(local, local)

        def own(dim, gradient, weight):
            if dim is None:
                return all_reduce(_wide(gradient), axis_name)
            return _scatter(gradient, dim, axis_name, reduce_scatter) if gradient.shape == weight.shape else gradient

        sums = _mapped(own, split, gradients, weights)
        return all_reduce(loss, axis_name) / n, jax.tree.map(lambda g: g / n, sums)

    return wrapped


def scatter(gradients: PyTree, axis_name: AxisName, *, specs: Specs, reduce_scatter: Callable = lax.psum_scatter) -> PyTree:
    """The sums of `gradients` over `axis_name`, of which each device keeps its share; leaves that stay whole are left local.

    It is the half of `scattered` that goes into `pipeline.value_and_grad(..., scatter=)`, with `scattered` round it.
    """
    own = lambda dim, g: g if dim is None else _scatter(g, dim, axis_name, reduce_scatter)
    return _mapped(own, _dims(gradients, axis_name, specs), gradients)


def sharded(
    optimizer: optax.GradientTransformation,
    axis_name: AxisName,
    *,
    specs: Specs | None = None,
    all_reduce: Callable = lax.psum,
    reduce_scatter: Callable = lax.psum_scatter,
    all_gather: Callable = lax.all_gather,
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

    def shares(params):
        own = lambda dim, w: w if dim is None else _share(w, dim, axis_name)
        return _mapped(own, _dims(params, axis_name, specs), params)

    def init(params):
        return optimizer.init(shares(params) if _inside(axis_name) else params)

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("zero.sharded: update needs the parameters, whose shapes tell shares from wholes. Pass params.")
        weights = eqx.filter(params, eqx.is_inexact_array)
        n, split = size(axis_name), _dims(weights, axis_name, specs)

        def own(dim, gradient, weight):
            local = varies(gradient, axis_name) and not varies(weight, axis_name)
            if dim is None:
                return all_reduce(_wide(gradient), axis_name) / n if local else gradient
            if gradient.shape != weight.shape:
                return gradient
            if local:
                return _scatter(gradient, dim, axis_name, reduce_scatter) / n
            return _share(gradient, dim, axis_name)

        def whole(dim, share):
            return share if dim is None else replicated(all_gather(share, axis_name, axis=dim, tiled=True), axis_name)

        shared, state = optimizer.update(_mapped(own, split, updates, weights), state, shares(weights))
        return _mapped(whole, split, shared), state

    return optax.GradientTransformation(init, update)


def gathered(
    function: Callable,
    specs: Specs,
    axis_name: AxisName,
    *,
    all_gather: Callable = lax.all_gather,
    reduce_scatter: Callable = lax.psum_scatter,
) -> Callable:
    """`function(params, ...)` of parameters that live as shares: gathered before it, their gradients scattered after it. ZeRO-3.

    `A[I_X] -> A[I]` for each leaf that `specs` split over `axis_name`; the gradient is the reduce-scattered sum. Round a block
    that a loop runs, it gathers layer by layer; with `remat.gathers` or another of `remat` round it, again in the backward
    pass, so that no gathered layer is kept:

        checkpoint = lambda block: remat.gathers(zero.gathered(block, block_specs, "data"))

    Args:
        function: a loss arrow, or a block; its first argument is the tree of parameters.
        specs: of the shares, a tree like that argument.
        axis_name: the axis that splits the batch.
        all_gather: forward.
        reduce_scatter: its transpose.
    """

    def wrapped(params, *arguments):
        return function(_wholes(params, axis_name, specs, all_gather, reduce_scatter), *arguments)

    return wrapped


def unsharded(
    grad: Grad,
    axis_name: AxisName,
    *,
    specs: Specs,
    all_gather: Callable = lax.all_gather,
    reduce_scatter: Callable = lax.psum_scatter,
) -> Grad:
    """`grad` of parameters that live as shares: gathered once before it, their gradients summed and scattered after it.

    For what is needed in all microbatches and too small to be gathered in each, such as embeddings beside `gathered` blocks.
    Leaves whose spec is None or does not name `axis_name` pass as they are. Wrap it in `grads.averaged`.
    """

    def wrapped(params, batch):
        wholes = _wholes(params, axis_name, specs, all_gather, reduce_scatter)
        dims = _dims(params, axis_name, specs)
        gathered = _mapped(lambda dim, x: None if dim is None else x, dims, wholes)
        local = grad(eqx.combine(ordered(gathered, gathered), wholes), batch)
        loss, gradients = ordered(local, local)
        return loss, scatter(gradients, axis_name, specs=specs, reduce_scatter=reduce_scatter)

    return wrapped


def _dims(tree: PyTree, axis_name: AxisName, specs: Specs | None) -> dict[str, int | None]:
    """The dim that each array of `tree`, by its path, is split along; None where it stays whole."""
    if specs is None:
        specs = rules.specs(eqx.filter(tree, eqx.is_array), rules.fsdp(axis_name, size=size(axis_name)))
    return {mesh.dotted(path): _dim(spec, axis_name) for path, spec in jax.tree.leaves_with_path(specs, is_leaf=mesh.is_spec)}


def _dim(spec: PartitionSpec, axis_name: AxisName) -> int | None:
    """The dim whose entry names the axis."""
    found = [dim for dim, entry in enumerate(spec) if set(axes(axis_name)) & set(mesh.entry_axes(entry))]
    return found[0] if found else None


def _mapped(f: Callable, dims: dict[str, int | None], tree: PyTree, *others: PyTree) -> PyTree:
    """`f(dim, leaf, ...)` of each leaf of `tree`, which may lack leaves that `dims` has."""
    return jax.tree.map_with_path(lambda path, *leaves: f(dims.get(mesh.dotted(path)), *leaves), tree, *others)


def _wholes(params: PyTree, axis_name: AxisName, specs: Specs, all_gather: Callable, reduce_scatter: Callable) -> PyTree:
    size(axis_name)  # refuses an axis that is not there

    def whole(dim, x):
        if dim is None:
            return x
        return linear(
            x,
            forward=lambda x: all_gather(x, axis_name, axis=dim, tiled=True),
            backward=lambda ct: _scatter(ct, dim, axis_name, reduce_scatter).astype(ct.dtype),
            name=remat.GATHERED,
        )

    return _mapped(whole, _dims(params, axis_name, specs), params)


def _scatter(x: Array, dim: int, axis_name: AxisName, reduce_scatter: Callable) -> Array:
    """The sum over devices, in a wide type, of which each keeps its share: `A[I] {U_X} -> A[I_X]`."""
    return reduce_scatter(_wide(x), axis_name, scatter_dimension=dim, tiled=True)


def _wide(x: Array) -> Array:
    return x.astype(precision.wide(x.dtype))


def _share(x: Array, dim: int, axis_name: AxisName) -> Array:
    """This device's share of `x`, which all devices have whole: `A[I] -> A[I_X]`."""
    share = x.shape[dim] // size(axis_name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * share, share, dim)


def _inside(axis_name: AxisName) -> bool:
    """Whether this runs inside a map over the axis, on blocks, and not outside, on global arrays."""
    try:
        lax.axis_size(axis_name)
    except NameError:
        return False
    return True
