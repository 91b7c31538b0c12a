"""A decoder on islands, which are groups of devices: each island trains its own copy of the model
by the train step of `models.decoder`. Every H steps the islands communicate (a *round*): they
average the changes that their copies had since the last round.

    devices = mesh.make(island=2, **layout.axes)
    optimizer, options = optax.adamw(3e-4), {"batch": 64, "key": key}
    one_island = decoder.train_step(gpt2.FAMILY, config, optimizer, layout, devices, **options)
    made = on_islands.train_step(one_island, islands.outer_nesterov(), every=50)
    state, info = made.train(made.init(), windows)  # windows: [2 x 64, T + 1]; info.loss: [islands]

`one_island.local` is the step of an island for one device's shards. This step is not yet mapped
over the mesh.
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
    """A step of islands that is checked and ready to compile, and the function that makes the
    step's state. Nothing is computed yet.

    Attributes:
        init: a function that makes the `islands.State`, each part on the devices that keep it.
            `init()` draws new weights; `init(model)` starts all islands from the weights of
            `model`.
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
    """Returns the train step of islands, and the function that makes the step's state. Each island
    trains by the step `one_island`, and every `every` steps a round averages the changes of the
    islands' models. The global batch is split over the islands first, and then inside each island.

    Args:
        one_island: the step of one island, on the island's part of the global batch. Its mesh also
            has the axes of the islands, as `mesh.make(island=2, **layout.axes)` has.
        outer: the outer optimizer, such as `islands.outer_nesterov()`.
        every: H, the number of steps from one round to the next.
        axis: the axis of the islands, as in `islands.local`. With an `ErrorFeedback` instead of an
            axis, the islands exchange their changes as int8, and add the rounding errors of a round
            to the changes of the next one.
        stream: the part of the model that a round exchanges, and the delay until its use, as in
            `islands.local`.

    Raises:
        ValueError: `islands.local` or `islands.init` refuses the arguments.
    """
    names, setup = islands.axis_names(axis), one_island.setup
    sequences = one_island.batch * islands.number_of_islands(axis, setup.mesh)
    island_options = {"axis": axis, "stream": stream}
    # A `StateInit`: the shapes and specs of the state, and the function `init` that makes it.
    state = islands.state_init(
        one_island.shapes,
        one_island.specs,
        outer,
        setup.mesh,
        **island_options,
        trainable=setup.compute.trainable,
    )

    def keys(number):
        """Returns the random keys of step `number`, for the sequences of all islands."""
        return one_island.keys(number, sequences)

    # `compiled` maps the step for one device over the mesh by `mesh.spmd`, and puts it under `jit`.
    train = decoder.compiled(
        islands.local(one_island.local, outer, every=every, **island_options),
        state.shapes,
        state.specs,
        functools.partial(meshes.spmd, mesh=setup.mesh),
        keys,
        batch_spec=P((*names, *setup.layout.batch_axes)),
        info_spec=P(names),
        # The number of the step's arguments after the batch: `limit`, the loss above which it
        # changes nothing, and `present`, the islands that take part. They are None if left out.
        options=2,
    )

    def init(model=None):
        """Returns the state of islands, with new weights, or with the weights of `model`."""
        return state.init(one_island.init(model))

    return TrainStep(init=init, shapes=state.shapes, train=train)


def stored(family: Family, layout: Layout, *, schedule: Schedule | None = None) -> DiskForm | None:
    """Returns the form in which a state of islands is stored, so that any layout can read the
    checkpoint. Without a pipeline, the result is None.

    A `DiskForm` is a pair of functions: one converts a state into the stored form, and the other
    converts it back. Both treat each model in the state as `decoder.stored` treats the model of one
    island: on disk the blocks are [layers, ...], in the order of the model. If the step's
    `decoder.Compute` has a schedule, pass it as `schedule`. None means the schedule that the layout
    names.
    """

    def on_islands(change):
        """Returns a function that applies `change`, a function of one model, to all models in a
        state of islands."""
        change_stacked = eqx.filter_vmap(change)  # for arrays [islands, ...]

        def changed(state):
            """Returns the state with `change` applied to all parts that hold models, or trees with
            the structure of a model, such as an optimizer's moments.

            The islands' models and optimizers (`inner`) and their errors of quantization (`error`)
            have a first dim of islands, which `change_stacked` maps over. The outer `model` and
            `optimizer`, and the changes `sent` to other islands, have no such dim.
            """
            inner = eqx.tree_at(
                lambda inner: (inner.model, inner.optimizer),
                state.inner,
                replace_fn=change_stacked,
            )
            # `state.error` has an entry for each fragment of the model, None without int8. `vmap`
            # refuses None; `change`, which has no `vmap`, leaves a None in `state.sent` as it is.
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
