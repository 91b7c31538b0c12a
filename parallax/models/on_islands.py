"""A decoder on islands, which are groups of devices: each island trains its own copy of the model
by the recipe of `decoder`, and every H steps a round averages the copies' changes.

    devices = mesh.make(island=2, **layout.axes)
    optimizer, options = optax.adamw(3e-4), {"batch": 64, "key": key}
    one_island = decoder.train_step(gpt2.FAMILY, config, optimizer, layout, devices, **options)
    made = on_islands.train_step(one_island, islands.outer_nesterov(), every=50)
    state, info = made.train(made.init(), windows)  # windows: [2 x 64, T + 1]; info.loss: [islands]

`one_island.local` is the step of an island on one device's blocks, before it is mapped over the
mesh.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import optax
from jax.sharding import PartitionSpec as P

from parallax import islands
from parallax import mesh as meshes
from parallax.collectives import AxisLike
from parallax.collectives.int8 import ErrorFeedback
from parallax.islands import ALL_AT_ONCE, Stream
from parallax.layout import Layout
from parallax.models import decoder
from parallax.models.family import Family
from parallax.schedule import Schedule
from parallax.trees import DiskForm


class TrainStep(NamedTuple):
    """A step of islands that is checked and ready to compile, and the state that it needs. Nothing
    is computed yet.

    Attributes:
        init: makes each part of the `islands.State` on its devices; `init(model)` starts all
            islands from the weights of that model.
        shapes: the `jax.ShapeDtypeStruct`s of the state, with their shardings.
        train: the step `(state, windows, weights=None, limit=None, present=None) -> (state, info)`,
            under `jit`; it donates the state. Each leaf of `info` has a first dim, [islands].
            `present` is explained at `islands.local`.
    """

    init: Callable[..., islands.State]
    shapes: islands.State
    train: Any


def train_step(
    one_island: decoder.TrainStep,
    outer: optax.GradientTransformation,
    *,
    every: int,
    axis: AxisLike | ErrorFeedback = "island",
    stream: Stream = ALL_AT_ONCE,
) -> TrainStep:
    """Returns the train step of islands: each island trains by the step `one_island`, and every
    `every` steps a round averages the changes of their models. The global batch is split over the
    islands first, and then inside each island.

    Args:
        one_island: the step of one island, on its part of the global batch, on a mesh that also has
            the axes of the islands: `mesh.make(island=2, **layout.axes)`.
        outer: the outer optimizer, such as `islands.outer_nesterov()`.
        every: H, the number of steps from one round to the next.
        axis: the axis of the islands, as in `islands.local`.
        stream: the part of the model that a round exchanges, and the delay until its use, as in
            `islands.local`.

    Raises:
        ValueError: `islands.local` or `islands.init` refuses the arguments.
    """
    names, setup = islands.axis_names(axis), one_island.setup
    sequences = one_island.batch * islands.number_of_islands(axis, setup.mesh)
    options = {"axis": axis, "stream": stream}
    # A `StateInit`: the shapes and specs of the state, and the function `init` that makes it.
    state = islands.state_init(
        one_island.shapes,
        one_island.specs,
        outer,
        setup.mesh,
        **options,
        trainable=setup.compute.trainable,
    )

    def keys(number):
        """Returns the random keys of step `number`, for the sequences of all islands."""
        return one_island.keys(number, sequences)

    train = decoder.compiled(
        islands.local(one_island.local, outer, every=every, **options),
        state.shapes,
        state.specs,
        functools.partial(meshes.spmd, mesh=setup.mesh),
        keys,
        batch_spec=P((*names, *setup.layout.batch_axes)),
        info_spec=P(names),
        options=2,  # `limit` and `present`
    )
    return TrainStep(lambda model=None: state.init(one_island.init(model)), state.shapes, train)


def stored(family: Family, layout: Layout, *, schedule: Schedule | None = None) -> DiskForm | None:
    """Returns the form in which a state of islands is stored, so that any layout can read the
    checkpoint; None without a pipeline. The form is two functions, one to it and one back from it.
    They change the models in the state as `decoder.stored` does for one island.
    """

    def on_islands(change):
        """Returns `change`, a function of one model, as a function of a state of islands."""
        change_stacked = eqx.filter_vmap(change)  # for arrays [islands, ...]

        def changed(state):
            """Returns the state with `change` applied to all parts that hold models, or trees like
            them.

            The islands' own parts have a first dim of islands, which `change_stacked` maps over:
            the models and optimizers in `inner`, and the errors of quantization, `error`. The outer
            `model` and `optimizer`, and the changes `sent` to other islands, have no such dim.
            """
            inner = eqx.tree_at(
                lambda inner: (inner.model, inner.optimizer),
                state.inner,
                replace_fn=change_stacked,
            )
            errors = (None if error is None else change_stacked(error) for error in state.error)
            return islands.State(
                inner,
                change(state.model),
                change(state.optimizer),
                tuple(errors),
                change(state.sent),
            )

        return changed

    # Applies `on_islands` to both functions of the `DiskForm`; None stays None.
    return jax.tree.map(on_islands, decoder.stored(family, layout, schedule=schedule))
