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
from parallax.schedule.places import is_looped
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

    A `DiskForm` has two functions: `to_disk` converts a state into the stored form, and `from_disk`
    converts a stored state back. Both treat each model in the state as `decoder.stored` treats the
    model of one island: on disk the blocks are [layers, ...], in the order of the model. If the
    step's `decoder.Compute` has a schedule, pass it as `schedule`. None means the schedule that the
    layout names.

    `to_disk` raises `ValueError` if a fragment (the part of the model that one round exchanges) has
    only some chunks of each stage, and the schedule does not place the chunks in the order of the
    layers.
    """
    # A looped placement is in the order of the layers, as that of the layout's own schedule is. So
    # below, None stands for this order, and a schedule for another order.
    if schedule is not None and is_looped(schedule.placed):
        schedule = None
    whole = decoder.stored(family, layout, schedule=schedule)
    if whole is None:
        return None

    def to_disk(state):
        """Returns the state with the blocks of all its models as [layers, ...]."""
        if schedule is not None:
            _check_all_chunks(family, layout, state)
        return _on_all_models(state, whole.to_disk)

    def from_disk(state):
        """Returns a stored state in the form that it had before `to_disk`. A fragment may have
        fewer layers than the model, so the number of layers is read from the islands' models."""
        blocks = eqx.filter(family.where(state.inner.model), meshes.is_array)
        layers = jax.tree.leaves(blocks)[0].shape[1]  # [islands, layers, ...]
        form = decoder.stored(family, layout, schedule=schedule, layers=layers)
        assert form is not None  # as `whole`
        return _on_all_models(state, form.from_disk)

    return DiskForm(to_disk, from_disk)


def _on_all_models(state: islands.State, change: Callable[[Any], Any]) -> islands.State:
    """Returns the state with `change` applied to all parts that hold models, or trees with the
    structure of a model, such as an optimizer's moments. `change` takes any tree, and changes the
    blocks of each model in the tree: it is `to_disk` or `from_disk` of a `decoder.stored` result.

    The islands' models and optimizers (`inner`) and their errors of quantization (`error`) have a
    first dim of islands, which `change_stacked` maps over. The outer `model` and `optimizer`, and
    the changes `sent` to other islands, have no such dim.
    """
    change_stacked = eqx.filter_vmap(change)  # for arrays [islands, ...]
    inner = eqx.tree_at(
        lambda inner: (inner.model, inner.optimizer), state.inner, replace_fn=change_stacked
    )
    # `error` and `sent` have an entry for each fragment. The fragment's arrays stand in a tree like
    # the model, which has None for all other leaves. An entry is None if it is not used: `vmap`
    # refuses such an entry, and `change` returns it unchanged.
    errors = tuple(None if error is None else change_stacked(error) for error in state.error)
    return islands.State(
        inner, change(state.model), change(state.optimizer), errors, change(state.sent)
    )


def _check_all_chunks(family: Family, layout: Layout, state: islands.State) -> None:
    """Raises `ValueError` if a fragment, the part of the model that one round exchanges, has only
    some chunks of each stage. The fragment's arrays do not say which chunks these are, so the order
    of their layers is not known. `stored` makes this check only if the schedule does not place the
    chunks in the order of the layers."""

    def is_model(leaf):
        return isinstance(leaf, family.model)

    # Each tree with the index of the dim of chunks: in `error`, islands are dim 0.
    for tree, dim in ((state.optimizer, 0), (state.sent, 0), (state.error, 1)):
        models = filter(is_model, jax.tree.leaves(tree, is_leaf=is_model))
        for leaf in jax.tree.leaves(list(map(family.where, models))):
            if leaf.shape[dim] != layout.chunks:
                raise ValueError(
                    f"on_islands.stored: a fragment has {leaf.shape[dim]} of the {layout.chunks} "
                    "chunks of each stage, and the schedule does not place the chunks in the order "
                    "of the layers, so the fragment cannot be stored in that order. Use "
                    "islands.by_layers(1) or islands.by_path, or a schedule with "
                    "schedule.looped_placement."
                )
