"""Marks for what is right on shards, and optimizers whose `update` takes any extra argument."""

from contextvars import ContextVar
from typing import Any

import jax
import optax

from parallax.collectives.types import linear
from parallax.elementwise.kinds import RIGHT
from parallax.typed import PyTree


def right(tree: PyTree) -> PyTree:
    """`tree`, marked as right on shards, for a `check` of what stands round it."""
    identity = lambda x: x
    mark = lambda x: linear(x, forward=identity, backward=identity, name=RIGHT)
    return jax.tree.map(lambda x: mark(x) if isinstance(x, jax.Array) else x, tree)


# Whether `check` compares sizes: then what is right on shards stands aside, since its collectives know the real shards alone.
COMPARES: ContextVar[bool] = ContextVar("COMPARES", default=False)


def with_extra(optimizer: optax.GradientTransformation | optax.MultiSteps) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, whose `update` takes extra arguments, and drops them where it has no use for them."""
    if isinstance(optimizer, optax.MultiSteps):
        several: Any = optimizer
        return optax.GradientTransformationExtraArgs(several.init, several.update)
    return optax.with_extra_args_support(optimizer)
