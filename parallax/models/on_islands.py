"""A decoder on islands: the recipe of `decoder.prepare` inside each, and a round between them every H steps.

world = mesh.make(island=2, **layout.axes)
prepared = on_islands.prepare(gpt2.FAMILY, config, optax.adamw(3e-4), layout, world, islands.nesterov(), every=50,
                              batch=128, key=jax.random.key(0))
state, info = prepared.train(state, windows)          # info.loss: [islands]
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key

from parallax import islands
from parallax.collectives import AxisLike
from parallax.collectives.int8 import ErrorFeedback
from parallax.islands import ALL_AT_ONCE, Stream
from parallax.layout import Layout
from parallax.models import decoder
from parallax.models.family import Configuration, Family
from parallax.models.prepared import PLAIN, Compute
from parallax.schedule import Schedule


class Prepared(NamedTuple):
    """A step of islands that is checked and ready to compile, and the state that it will need: nothing is computed yet.

    Attributes:
        init: makes the `islands.State` in its place; `init(model)` starts all islands from the weights of that model.
        shapes: its `jax.ShapeDtypeStruct`s, with their shardings.
        train: the step `(state, windows, weights=None, limit=None, present=None) -> (state, info)`, under `jit`; it donates the
            state. What `info` holds has a first dim, [islands]. `present` as in `islands.local`.
    """

    init: Callable[..., islands.State]
    shapes: islands.State
    train: Any


def prepare(
    family: Family,
    config: Configuration,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    mesh_: Mesh,
    outer: optax.GradientTransformation,
    *,
    every: int,
    batch: int,
    key: Key[Array, ""],
    axis: AxisLike | ErrorFeedback = "island",
    stream: Stream = ALL_AT_ONCE,
    axes: Mapping[str, AxisLike] | None = None,
    compute: Compute = PLAIN,
) -> Prepared:
    """A decoder that each island trains under `layout`; the global batch is split over the islands first.

    Args:
        family: as in `decoder.prepare`, and so config, optimizer, key, axes and compute.
        config: likewise.
        optimizer: of each island.
        layout: of each island.
        mesh_: a mesh with the axes of the islands and those of the layout: `mesh.make(island=2, **layout.axes)`.
        outer: the outer optimizer, such as `islands.nesterov()`.
        every: steps between two rounds.
        batch: sequences in the global batch, of all islands together.
        key: the seed of the run.
        axis: the axis of the islands, as in `islands.local`, and so the next one.
        stream: likewise.
        axes: who moves data inside an island.
        compute: how the model computes.

    Raises:
        ValueError: as `decoder.prepare`, `islands.local` and `islands.init` do; or the batch does not divide by the islands.
    """
    names = islands.names_of(axis)
    count = islands.count(axis, mesh_)
    if batch % count:
        raise ValueError(
            f"on_islands.prepare: the batch's sequences (batch={batch}) must divide by the {count} islands. "
            f"Take batch={-(-batch // count) * count}."
        )
    made = decoder.local_step(
        *(family, config, optimizer, layout, mesh_), batch=batch // count, key=key, axes=axes, compute=compute
    )
    options = {"axis": axis, "stream": stream}
    state = islands.planned(made.state.shapes, made.state.specs, outer, mesh_, **options, trainable=compute.trainable)
    train = islands.local(made.step, outer, every=every, **options)
    keys = lambda number: decoder.sequence_keys(made.dropout, number, batch) if family.drops(config) else None
    train = decoder.compiled(*(train, state, mesh_, keys), split=P((*names, *layout.batch_axes)), of_info=P(names), options=2)
    return Prepared(lambda model=None: state.init(made.state.init(model)), state.shapes, train)


def stored(family: Family, layout: Layout, *, schedule: Schedule | None = None) -> dict[str, Callable[..., Any]]:
    """How a state of islands goes into a checkpoint that any layout can read, and back, as `decoder.stored`."""

    def on_islands(change):
        each = eqx.filter_vmap(change)  # of arrays [islands, ...]

        def changed(state):
            inner = eqx.tree_at(lambda inner: (inner.model, inner.optimizer), state.inner, replace_fn=each)
            new = islands.State(
                inner,
                change(state.model),
                change(state.optimizer),
                tuple(None if error is None else each(error) for error in state.error),
                change(state.sent),
            )
            return new

        return changed

    return jax.tree.map(on_islands, decoder.stored(family, layout, schedule=schedule))
