"""Checks of a pipeline's parameters and of the values that the user's functions return.

Legend: P stages, M microbatches, v chunks per stage, L layers. `blocks` are the parameters of the
layers, split over the stages. The user passes three functions: `embed` makes the first stage's
input `x` from a microbatch; `stage` runs one chunk of layers on `x`; `head` computes the loss from
the last `x`. `aux` is a tree of values to log. An array varies along a mesh axis if its type says
that the array may differ between the devices of the axis; otherwise all of these devices have the
same array.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from parallax import mesh
from parallax._typing import PyTree
from parallax.collectives import Axis
from parallax.grads.axes import axes_of, axes_of_several_devices, replicated_axes
from parallax.pipeline import head_sums
from parallax.pipeline.traced import Misused, Traced, first_sent
from parallax.schedule import Schedule
from parallax.source_lines import source


class Output(eqx.Module):
    """The output of a stage that returns more than its `x`.

    Attributes:
        x: the input of the next stage.
        loss: a term of the loss, a scalar. The terms are summed over all chunks of layers and
            averaged over microbatches; the result is added to the head's loss, and this total is
            differentiated.
        aux: a tree of arrays, to log.
    """

    x: PyTree
    loss: Any = None
    aux: PyTree = None


def blocks_of(params: PyTree) -> PyTree:
    """Returns `params.blocks`; raises `ValueError` if the parameters have no such attribute."""
    try:
        return params.blocks
    except AttributeError:
        raise ValueError(
            f"pipeline: the parameters, a {type(params).__name__}, have no attribute `blocks`, the "
            "layers that are split over the stages. Name them so, or pass the function that picks "
            "them, such as blocks=lambda params: params['layers']."
        ) from None


def marked(blocks: Callable[[PyTree], PyTree], params: PyTree) -> PyTree:
    """Returns a tree like the parameters with a bool for each leaf: whether the leaf is in
    `blocks(params)`."""
    nowhere = jax.tree.map(lambda _: False, params)

    def everywhere(part):
        return jax.tree.map(lambda _: True, part)

    return eqx.tree_at(blocks, nowhere, replace_fn=everywhere)


def check(schedule: Schedule, axis: Axis, blocks: PyTree) -> None:
    """Raises a `ValueError` unless the schedule has one stage for each device of the axis. `blocks`
    are this device's blocks. Raises a `Misused`, a subclass of `ValueError`, if an array of
    `blocks` is not split over the axis. Raises a `ValueError` if an array's first dim is not the
    number of chunks per stage, or if its second dim, the layers of a chunk, is 0."""
    devices = axis.size()
    if schedule.stages != devices:
        raise ValueError(
            f"pipeline: the schedule has {schedule.stages} stages, and the mesh axis "
            f"{axis.names!r} has {devices} devices. Make the schedule for stages={devices}."
        )
    for path, leaf in jax.tree.leaves_with_path(eqx.filter(blocks, eqx.is_array)):
        name = f"the blocks' array {jax.tree_util.keystr(path) or 'itself'}"
        # If all stages had the same blocks, each layer would run P times, and nothing else would
        # raise an error. The type of an array says nothing about an axis of one device, so such
        # axes do not count.
        same = replicated_axes(leaf, axis)
        if math.prod(Axis(name).size() for name in same) > 1:
            raise Misused(
                "blocks-on-every-stage",
                mesh.dotted(path) or "the blocks",
                f"{name}, of shape {leaf.shape} on a stage, is the same along {axis.names!r}, so "
                f"each of the {devices} stages would run all layers.",
                f"Shape the array as [{schedule.chunks}, L / {schedule.chunks}, ...] for L "
                f"layers, and split its dim 1 by the spec P(None, {axis.names!r}); L must be a "
                f"multiple of {schedule.chunks * devices}, the number of chunks of all stages.",
            )
        if leaf.ndim == 0 or leaf.shape[0] != schedule.chunks:
            raise ValueError(
                f"pipeline: {name} has shape {leaf.shape} on a stage, and its first dim must be "
                f"{schedule.chunks}, the schedule's number of chunks. Reshape L layers to "
                f"[{schedule.chunks}, L / {schedule.chunks}, ...] and split dim 1 over "
                f"{axis.names!r}."
            )
        if leaf.ndim > 1 and leaf.shape[1] == 0:
            raise ValueError(
                f"pipeline: {name} has shape {leaf.shape} on a stage, so each of the {devices} "
                f"stages is without a layer. Use at least {schedule.chunks * devices} layers, one "
                "for each chunk of each stage, or fewer stages or chunks."
            )


def check_batch(batch: PyTree) -> None:
    """Raises a `ValueError` for a batch that has an array without rows, since there is no mean loss
    over zero rows."""
    for path, leaf in jax.tree.leaves_with_path(batch):
        if jnp.ndim(leaf) and not leaf.shape[0]:
            raise ValueError(
                f"pipeline: the batch's leaf {jax.tree_util.keystr(path) or 'itself'} has shape "
                f"{leaf.shape} on each device: it is empty, and has no mean. Use at least one row "
                "for each microbatch on each device."
            )


def activation(x: PyTree) -> None:
    """Raises a `ValueError` if `x`, the output of `embed`, has a random key, or has no array of
    floating-point numbers."""
    leaves = jax.tree.leaves_with_path(x)
    for path, leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ValueError(
                f"pipeline: embed returned {form(path, leaf)}, and random keys do not travel "
                "between stages. Put them into the batch, one for each row: every stage gets the "
                "microbatch that it works on, as the argument `microbatch`."
            )
    if not any(jnp.issubdtype(leaf.dtype, jnp.inexact) for _, leaf in leaves):
        raise ValueError(
            f"pipeline: embed returned {forms(x)}, and at least one array of floating-point "
            "numbers must go through the stages: other arrays have no cotangent, so embed would "
            "get no gradient. Let embed return the arrays that it looks up, such as embeddings; "
            "the batch itself reaches every stage, as `microbatch`."
        )


def same_form(returned: PyTree, taken: PyTree) -> None:
    """Raises a `ValueError` unless `returned`, a stage's output, has the structure, the shapes and
    the dtypes of `taken`, the stage's input."""
    # The loop over the ticks has one carry, whose shapes cannot change, so all stages exchange
    # arrays of the same shapes.
    if jax.tree.structure(returned) != jax.tree.structure(taken):
        raise ValueError(
            "pipeline: a stage must return a tree of the same structure as its input, "
            f"{forms(taken)}, since its output is the next stage's input; it returned "
            f"{forms(returned)}. To return a loss or auxiliary values as well, return "
            "pipeline.Output(output, loss=..., aux=...)."
        )
    for (path, leaf), given in zip(
        jax.tree.leaves_with_path(returned), jax.tree.leaves(taken), strict=True
    ):
        if (leaf.shape, leaf.dtype) != (given.shape, given.dtype):
            raise ValueError(
                f"pipeline: a stage must return what it takes, {form(path, given)}, since its "
                f"output is the next stage's input; it returned {form(path, leaf)}. Change the "
                "shape or the dtype only in embed or head."
            )


def head(traced: Traced, axis: Axis) -> None:
    """Raises a `ValueError` if the head computes something from each stage's own `x` and sums it
    over the stages.

    Every stage runs the head, but only the last stage's `x` is the model's output. `traced` is the
    head as a program, and `axis` the axis of the stages. `head_sums.adds_up` looks in the program
    for a sum over the stages of values that come from each stage's `x`.
    """
    # For each array among the arguments of the program: whether it is in `x`, argument 1. The
    # arguments are params, x, the microbatch, and its number, with which taps record values; the
    # number is None if nothing is recorded. `used` is the tuple of these arguments with a bool in
    # place of each array: whether the results depend on the array. Here only the number of the
    # arrays counts, and not the bools.
    of_x = [i == 1 for i, argument in enumerate(traced.used) for _ in jax.tree.leaves(argument)]
    for name in axes_of_several_devices(axes_of(axis)):
        if head_sums.adds_up(traced.program, name, of_x):
            raise ValueError(
                f"pipeline: the head's sum over {name!r} includes values that each stage computes "
                "from its own x, and only the last stage's x is the model's output. Return the "
                "loss of the argument x, without a sum over the stages and without a factor that "
                "depends on the stage's index. If the stages compute the head together, begin the "
                "head with x = pipeline.from_last(x, axis)."
            )


def refuse_sending(traced: Traced, arguments: Collection[int], axis: Axis, harm: str) -> None:
    """Raises a `ValueError` if `traced`, the program of a stage or of its backward pass, has a
    collective over `axis` whose operand is computed from arguments that must not be sent.
    `arguments` has the indices of these arguments, and `axis` is the axis of the stages. `harm`
    says what is wrong with such a collective."""
    eqn = first_sent(traced, arguments, axes_of_several_devices(axes_of(axis)))
    if eqn is not None:
        raise ValueError(
            f"pipeline: stage has a collective over {axis.names!r} ({source(eqn)}). {harm} "
            f"{without_the_stages(axis)}"
        )


def without_the_stages(axis: Axis) -> str:
    """Returns the cure for a stage that has a collective over `axis`, the axis of the stages."""
    return (
        f"Leave {axis.names!r} out of its axes. To gather a parameter, gather it in embed, and let "
        "x bring it to the stages."
    )


def output(returned: Any) -> Output:
    """Returns the result of a stage, which is an `Output` or only its `x`, as an `Output` of
    arrays."""
    returned = returned if isinstance(returned, Output) else Output(returned)
    loss = None if returned.loss is None else scalar("the stage's loss", returned.loss)
    return Output(jax.tree.map(jnp.asarray, returned.x), loss, aux_of("the stage", returned.aux))


def loss_and_aux(value: Any) -> tuple[Float[Array, ""], PyTree]:
    """Returns the head's result, `value`, as a pair `(loss, aux)`; `aux` is None if the result is
    only the loss."""
    loss, aux = value if isinstance(value, tuple) else (value, None)
    return scalar("the head's loss", loss), aux_of("the head", aux)


def aux_of(name: str, aux: PyTree) -> PyTree:
    """Returns the auxiliary values as arrays of numbers, with booleans as 1 and 0. Raises
    `ValueError` for any other array; the message says by `name` which function returned `aux`."""

    def leaf(path, value):
        """Returns one value as an array; raises `ValueError` if the array has neither numbers nor
        booleans."""
        value = jnp.asarray(value)
        if not any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.number, jnp.bool)):
            raise ValueError(
                f"pipeline: {name}'s auxiliary value {form(path, value)} is no array of numbers, "
                "so it cannot be added up over the stages. Leave it out."
            )
        # A mean over microbatches needs numbers.
        return value.astype(jnp.int32) if value.dtype == jnp.bool else value

    return jax.tree.map_with_path(leaf, aux)


def scalar(name: str, value: Any) -> Array:
    """Returns `value` as an array. If this array is not one real floating-point number, raises a
    `ValueError` that calls the array by `name`."""
    value = jnp.asarray(value)
    if value.ndim or not jnp.issubdtype(value.dtype, jnp.floating):
        raise ValueError(
            f"pipeline: {name} must be a scalar, one real floating-point number for a microbatch; "
            f"got {value.dtype}{list(value.shape)}. Take its mean or its sum."
        )
    return value


def forms(tree: PyTree) -> str:
    """Returns one text with the name, the dtype and the shape of each array of a tree."""
    named = jax.tree.leaves_with_path(tree)
    return ", ".join(form(path, leaf) for path, leaf in named) or "no array"


def form(path: Any, leaf: Any) -> str:
    """Returns a text with an array's name in its tree, its dtype and its shape."""
    return (f"{mesh.dotted(path)}: " if path else "") + f"{leaf.dtype}{list(leaf.shape)}"
