"""Computes the bytes of a decoder's parameters, optimizer state and inputs on one device under a
layout. The rules of the model tell how its arrays are split, so no device is needed.

A leaf is one array of the model. With ZeRO, the leaf is split over devices, and its share is the
part that a device has. A *rule* is a function from a leaf's path and shape to its `PartitionSpec`,
or to None for a leaf that is whole on each device.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from parallax import mesh, rules
from parallax.layout import Layout
from parallax.models import recipe
from parallax.plan.families import Config, family_of


class Leaf(NamedTuple):
    """One array of the model, as a device has it.

    Attributes:
        path: the array's path in the model, such as "blocks.mlp.up.weight".
        elements: how many numbers of the array a device has without ZeRO.
        share: how many numbers of the array a device has with ZeRO over n devices. This is 1/n of
            `elements`, or all of `elements` if no dim is a multiple of n.
        axes: the mesh axes that split the array, without the axes over which ZeRO splits it.
    """

    path: str
    elements: int
    share: int
    axes: tuple[str, ...]

    @property
    def block(self) -> bool:
        """Whether the array belongs to the layers."""
        return self.path.startswith("blocks.")

    @property
    def split(self) -> bool:
        """Whether ZeRO splits the array over replicas."""
        return self.share < self.elements


@functools.lru_cache(maxsize=64)
def shapes(config: Config, chunks: int | None) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Returns the path and shape of each array of the whole model. The arrays of the layers are
    stacked. Their shapes are [layers, ...] or, if `chunks` is given as in a pipeline, [chunks,
    layers / chunks, ...]."""
    model_class = family_of(config).model
    model = jax.eval_shape(lambda: model_class(config, key=jax.random.key(0)))
    shapes_by_path = {path: leaf.shape for path, leaf in rules.paths(model)}
    for path, (layers, *dims) in shapes_by_path.items():
        # The first dim of an array of the layers is the number of layers.
        if chunks is not None and path.startswith("blocks."):
            shapes_by_path[path] = (chunks, layers // chunks, *dims)
    return tuple(shapes_by_path.items())


def leaves(config: Config, layout: Layout) -> tuple[Leaf, ...]:
    """Returns the model's arrays as a device of `layout` has them. Layouts with the same numbers of
    optimizer shards, stages, tensor devices and chunks get the same cached result."""
    return _leaves(config, layout.optimizer_shards, layout.stage, layout.tensor, layout.chunks)


@functools.lru_cache(maxsize=4096)
def _leaves(config: Config, data: int, stage: int, tensor: int, chunks: int) -> tuple[Leaf, ...]:
    """Returns the model's arrays on a device. `data` is the number of devices over which ZeRO
    splits the arrays; it is 1 without ZeRO."""
    # Only the rules of this layout matter. ZeRO-1, 2 and 3 split a leaf in the same dim, so ZeRO-1
    # stands for all three. The number of microbatches must be a multiple of the stages.
    layout = Layout(
        data=data,
        stage=stage,
        tensor=tensor,
        chunks=chunks,
        microbatches=stage,
        zero=1 if data > 1 else 0,
    )
    # The rule without ZeRO, and the rule that also splits leaves over `data`.
    rule, shared = recipe.rules_of(family_of(config), layout)
    found = []
    for path, shape in shapes(config, chunks if layout.pipelined else None):
        leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
        names = [name for entry in rule(path, leaf) or () for name in mesh.entry_axes(entry)]
        elements = leaf.size // math.prod(layout.axes[name] for name in names)
        split = data > 1 and "data" in [
            name for entry in shared(path, leaf) or () for name in mesh.entry_axes(entry)
        ]
        found.append(Leaf(path, elements, elements // data if split else elements, tuple(names)))
    return tuple(found)


def parameter_bytes(config: Config, layout: Layout, *, itemsize: int = 4) -> int:
    """Returns the bytes of the parameters on a device, `itemsize` bytes for each number. With
    ZeRO-3 a device has only its shares of the parameters."""
    return itemsize * sum(
        leaf.share if layout.zero == 3 else leaf.elements for leaf in leaves(config, layout)
    )


def optimizer_bytes(
    config: Config,
    layout: Layout,
    optimizer: optax.GradientTransformation,
    *,
    itemsize: int = 4,
) -> int:
    """Returns the bytes of the optimizer's state on a device, if each element of the parameters has
    `itemsize` bytes. The optimizer must act element by element. With ZeRO a device has only the
    state of its shares of the parameters."""
    bytes_per_parameter, rest = _state(optimizer, itemsize)
    return (
        bytes_per_parameter
        * sum(leaf.share if layout.zero else leaf.elements for leaf in leaves(config, layout))
        + rest
    )


@functools.lru_cache(maxsize=64)
def _state(optimizer: optax.GradientTransformation, itemsize: int) -> tuple[int, int]:
    """Returns the bytes of the optimizer's state for each parameter, and the bytes of the rest of
    the state, such as a step count. To tell the two apart, the function makes the state for one
    array of 64 parameters. The arrays of 64 numbers in this state have one number for each
    parameter."""
    count = 64
    leaf = jax.ShapeDtypeStruct(
        (count,), {2: jnp.bfloat16, 4: jnp.float32, 8: jnp.float64}[itemsize]
    )
    state = jax.tree.leaves(jax.eval_shape(optimizer.init, {"w": leaf}))

    def size(leaf):
        return leaf.size * leaf.dtype.itemsize

    moments = [leaf for leaf in state if leaf.shape == (count,)]
    return sum(map(size, moments)) // count, sum(map(size, state)) - sum(map(size, moments))


def batch_bytes(config: Config, layout: Layout, batch: int) -> int:
    """Returns the bytes that a step's arguments have on a device, without parameters and optimizer
    state. These arguments are the token windows, the step's number and the loss scale. A window has
    int32 tokens, one more than the model's context; `batch` counts the windows of all devices.
    """
    scale = jax.eval_shape(lambda: recipe.first_scale(layout))
    scale_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(scale))
    # Tokens and the step's number have 4 bytes each.
    return 4 * (batch // layout.replicas) * (config.context + 1) + 4 + scale_bytes
