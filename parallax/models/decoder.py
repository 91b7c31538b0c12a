"""A decoder's train step over data x stage x context x tensor: its state, made in place, and the
compiled step.

    options = {"batch": 64, "key": jax.random.key(0)}
    made = decoder.train_step(
        gpt2.FAMILY, gpt2.SMALL, optax.adamw(3e-4), layout, mesh, **options
    )
    state = made.init()
    state, info = made.train(state, windows)

`models.recipe` composes the loss and the gradients, `models.family` says what a model is, and
`layout` what is split.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, ArrayLike, Float, Int, Key

from parallax import mesh as meshes
from parallax import pipeline, precision, rules, zero
from parallax._typing import PyTree, Specs
from parallax.layout import Layout
from parallax.models import decoder_taps, recipe
from parallax.models.family import Batch, Configuration, Family
from parallax.models.recipe import PLAIN, Compute, Setup
from parallax.schedule import Schedule
from parallax.step import Info, Planned, State, Step, make, planned
from parallax.trees import DiskForm

__all__ = [
    "PLAIN",
    "Batch",
    "Compute",
    "Configuration",
    "Family",
    "Train",
    "TrainStep",
    "compiled",
    "joined",
    "loss_step",
    "sequence_keys",
    "stored",
    "train_step",
]


@runtime_checkable
class Train(Protocol):
    """A compiled step, as `jax.jit` makes it: it donates the state."""

    def __call__(
        self,
        state: State,
        windows: Int[ArrayLike, "batch window"],
        weights: Float[ArrayLike, "batch tokens"] | None = None,
        limit: Float[ArrayLike, ""] | None = None,
        /,
    ) -> tuple[State, Info]:
        """Returns the state after the step, and the step's loss and gradient norm."""
        ...

    def lower(self, state: PyTree, windows: Any, weights: Any = None, limit: Any = None, /) -> Any:
        """Returns the program for these arrays, or shapes with shardings, to `compile()`: a
        `jax.stages.Lowered`.
        """
        ...


class TrainStep(NamedTuple):
    """A train step that is checked and ready to compile, and the state that it needs. Nothing is
    computed yet.

    Attributes:
        init: makes the state in its place: no device ever holds the whole. `init(model)` starts
            from the weights of that model, whole, in the host's memory or on one device, such as
            one that `gpt2.load` gives; each process has it.
        shapes: its `jax.ShapeDtypeStruct`s, with their shardings, to compile for and to plan with.
        train: the step `(state, windows, weights=None, limit=None) -> (state, info)`, under `jit`;
            it donates the state. With weights, [batch, T], the loss is the mean over the tokens
            that they weigh: 0 leaves one out. A loss above `limit`, a scalar, changes nothing.
        specs: of the state's arrays.
        local: the step on local blocks, `(state, batch, limit) -> (state, info)` of a `Batch`,
            before it is mapped over the mesh and compiled; for another wrapper than `mesh.spmd`,
            such as `on_islands.train_step`.
        keys: from the step's number and the sequences of the global batch to a random key for each
            of them, or to None.
        batch: sequences in the global batch.
        setup: the decoder, its layout and how it computes.
    """

    init: Callable[..., State]
    shapes: State
    train: Train
    specs: State
    local: Step
    keys: Callable[..., Any]
    batch: int
    setup: Setup


def train_step(
    family: Family,
    config: Configuration,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    mesh: meshes.AnyMesh,
    *,
    batch: int,
    key: Key[Array, ""],
    compute: Compute = PLAIN,
) -> TrainStep:
    """Returns a decoder over data x stage x context x tensor: the step
    `(state, windows) -> (state, info)`, and how its state is made.

    The step donates the state. `windows` is the global batch, [batch, T + 1] tokens, placed or not.
    The weights and the dropout masks come from `key` and from logical positions, so every layout
    computes the same run.

    Args:
        family: the kind of decoder, such as `gpt2.FAMILY`.
        config: the model's sizes.
        optimizer: one that acts element by element, or one of `parallax.optimizers`.
        layout: the sizes of the axes, and what is split, shortened or computed again; with stages,
            the blocks of the model in the state are [v, L / v, ...], and `joined` makes them [L,
            ...] again.
        mesh: its mesh, as `mesh.make(**layout.axes)` makes it; it may have more axes, such as that
            of islands.
        batch: sequences in the global batch.
        key: the seed of the run.
        compute: how the model computes.

    Raises:
        ValueError: the layout does not divide the model or the batch, or is not the mesh's;
            `compute.axes` names another axis; or a context axis splits the tokens, and the
            attention does not go over it.
    """
    layout.check(config.sizes | {"batch": batch})
    _check(family, layout, mesh, compute)
    weights_key, dropout_key = jax.random.split(key)
    state, specs = _planned_state(family, config, optimizer, layout, mesh, weights_key, compute)
    setup = Setup(family, config, layout, mesh, specs, compute)
    functions, compose = recipe.functions_of(setup), compute.grad_of or recipe.grad_of

    def grad_of(scale):
        grad = compose(functions, setup, scale)

        def weighted_grad(model, batch):
            return grad(model, recipe.weighted(batch, setup))

        return decoder_taps.gradients(weighted_grad, specs)

    if layout.zero in (1, 2):
        optimizer = zero.sharded(optimizer, setup.along(recipe.SHARDED_OVER), specs)
    local = make(
        precision.ScaledGrad(grad_of),
        optimizer,
        max_norm=compute.max_norm,
        reduce_norm_over=tuple(setup.axes.values()),
        specs=state.specs.model,
    )

    def keys(number, sequences=batch):
        if not family.uses_dropout(config):
            return None
        return sequence_keys(dropout_key, number, sequences)

    train = compiled(local, state.shapes, state.specs, mesh, keys, batch_spec=P(layout.batch_axes))
    return TrainStep(state.init, state.shapes, train, state.specs, local, keys, batch, setup)


def _planned_state(
    family: Family,
    config: Configuration,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    mesh: meshes.AnyMesh,
    key: Key[Array, ""],
    compute: Compute,
) -> tuple[Planned, Specs]:
    """Returns the state of a step, and the specs of the shards that gradients and optimizer work
    on.

    They work on shards where the state is split, whether or not the parameters are.
    """
    split_blocks = _on_blocks(family, _into_stages(layout, compute.schedule))
    rule, state_rule = recipe.rules_of(family, layout)

    def make_model():
        return split_blocks(family.model(config, key=key, dtype=compute.dtype))

    state = planned(
        make_model,
        optimizer,
        rule,
        mesh,
        optimizer_rule=state_rule,
        scale=recipe.first_scale(layout),
        trainable=compute.trainable,
        batch_axes=layout.batch_axes,
    )

    def init(model=None):
        return state.init() if model is None else state.init(split_blocks(model))

    return state._replace(init=init), rules.specs(state.shapes.model, state_rule, mesh)


def compiled(
    local: Callable[..., Any],
    shapes: PyTree,
    specs: PyTree,
    mesh: meshes.AnyMesh,
    keys: Callable[[Array], Any],
    *,
    batch_spec: P,
    info_spec: P = P(),  # noqa: B008
    options: int = 1,
) -> Train:
    """Returns the compiled step of a local one: it donates the state.

    Args:
        local: `(state, batch, *options) -> (state, info)`, of a `Batch`.
        shapes: of the state that it changes; leaves that are no arrays are those of the state.
        specs: of the state's arrays.
        mesh: the mesh.
        keys: from the step's number to the random keys of the global batch, or to None.
        batch_spec: the spec of the batch.
        info_spec: the spec of the loss and the norm.
        options: the number of its options, each the same on all devices, or None.
    """
    in_specs = (specs, batch_spec, *(P(),) * options)
    step = meshes.spmd(local, mesh=mesh, in_specs=in_specs, out_specs=(specs, info_spec))
    static = eqx.filter(shapes, meshes.is_array, inverse=True)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(arrays, windows, weights=None, *chosen):
        chosen = (*chosen, *(None,) * (options - len(chosen)))
        new, info = step(
            eqx.combine(arrays, static), Batch(windows, keys(arrays.step), weights), *chosen
        )
        return eqx.filter(new, meshes.is_array), info

    return _TrainArrays(train, static) if jax.tree.leaves(static) else train


class _TrainArrays(NamedTuple):
    """A `Train` of a state that holds other things than arrays: they stay as they are."""

    train: Any
    static: Any

    def __call__(self, state: Any, windows: Any, *options: Any) -> tuple[Any, Info]:
        """Returns the state after the step, and the step's loss and gradient norm."""
        new, info = self.train(eqx.filter(state, meshes.is_array), windows, *options)
        return eqx.combine(new, self.static), info

    def lower(self, state: PyTree, windows: Any, *options: Any) -> Any:
        """Returns the program, of the state's arrays alone."""
        return self.train.lower(eqx.filter(state, meshes.is_array), windows, *options)


def loss_step(
    family: Family,
    config: Configuration,
    layout: Layout,
    mesh: meshes.AnyMesh,
    *,
    compute: Compute = PLAIN,
) -> Callable[..., Float[Array, ""]]:
    """Returns the compiled `(model, windows, weights=None) -> loss` of `train_step`'s model, to
    evaluate with.

    Without dropout, and without the auxiliary losses of its blocks.

    The batch may be of another size than in training; it must divide by data x microbatches. It
    computes in the parameters' own precision, and gathers a model that lives as shares (ZeRO-3)
    layer by layer too. Of `compute` it uses `axes`, `attend`, `context_attention`, `documents`,
    `dispatch`, `comms` and `schedule`.
    """
    compute = dataclasses.replace(compute, remat=None, reduce_in_backward=False)
    layout = dataclasses.replace(layout, remat="none")
    _check(family, layout, mesh, compute)
    split_blocks = _on_blocks(family, _into_stages(layout, compute.schedule))

    def make_model():
        return split_blocks(family.model(config, key=jax.random.key(0), dtype=jnp.float32))

    model = eqx.filter_eval_shape(make_model)
    rule, _ = recipe.rules_of(family, layout)
    specs = rules.specs(model, rule, mesh)
    setup = Setup(family, config, layout, mesh, specs, compute)
    loss = recipe.loss_of(recipe.functions_of(setup), setup)

    def local(model, batch):
        return loss(model, recipe.weighted(batch, setup))

    evaluate = meshes.spmd(local, mesh=mesh, in_specs=(specs, P(layout.batch_axes)), out_specs=P())
    static = eqx.filter(model, meshes.is_array, inverse=True)

    @jax.jit
    def run(arrays, windows, weights=None):
        return evaluate(eqx.combine(arrays, static), Batch(windows, None, weights))

    def run_model(model, windows, weights=None):
        return run(eqx.filter(model, meshes.is_array), windows, weights)

    return run_model if jax.tree.leaves(static) else run


def joined(family: Family, layout: Layout, model: Any, *, schedule: Schedule | None = None) -> Any:
    """Returns the model of a state under `layout` as one device has it: blocks as [L, ...]. Other
    trees stay as they are.

    `schedule` is that of `Compute`, where the step has one: it says where its chunks are.
    """
    return _on_blocks(family, _out_of_stages(layout, schedule))(model)


def stored(family: Family, layout: Layout, *, schedule: Schedule | None = None) -> DiskForm | None:
    """Returns the form of a state in a checkpoint that any layout can read, for
    `run.checkpoint.Checkpoints`; None without a pipeline, where a state is stored as it is.

    Wherever the state holds a model of the family (the parameters, the optimizer's moments), its
    blocks are stored as [L, ...], in the order of the model. `schedule` is that of `Compute`, where
    the step has one: it says where its chunks are.
    """
    if not layout.pipelined:
        return None
    return DiskForm(
        to_disk=_on_blocks(family, _out_of_stages(layout, schedule)),
        from_disk=_on_blocks(family, _into_stages(layout, schedule)),
    )


def sequence_keys(key: Key[Array, ""], step: Int[Array, ""], batch: int) -> Key[Array, " batch"]:
    """Returns one random key for each sequence of the global batch at `step`: the same wherever the
    sequence is computed.
    """
    fold = functools.partial(jax.random.fold_in, jax.random.fold_in(key, step))
    return jax.vmap(fold)(jnp.arange(batch, dtype=jnp.uint32))


def _into_stages(layout: Layout, schedule: Schedule | None) -> Callable[[Any], Any]:
    """Returns a function from blocks [L, ...] to those that the state of a layout holds.

    The schedules of a layout itself have looped placements, which change no order.
    """

    def split(blocks):
        if not layout.pipelined:
            return blocks
        chunks = layout.chunks
        blocks = _on_arrays(blocks, lambda w: w.reshape(chunks, -1, *w.shape[1:]))
        return blocks if schedule is None else pipeline.to_placement(blocks, schedule.placed)

    return split


def _out_of_stages(layout: Layout, schedule: Schedule | None) -> Callable[[Any], Any]:
    """Returns the inverse of `_into_stages`."""

    def join(blocks):
        if not layout.pipelined:
            return blocks
        if schedule is not None:
            blocks = pipeline.from_placement(blocks, schedule.placed)
        return _on_arrays(blocks, lambda w: w.reshape(-1, *w.shape[2:]))

    return join


def _on_arrays(tree: PyTree, change: Callable[[Any], Any]) -> PyTree:
    return jax.tree.map(lambda leaf: change(leaf) if meshes.is_array(leaf) else leaf, tree)


def _on_blocks(family: Family, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function from a tree to the same with the blocks of each model in it changed."""

    def is_model(leaf):
        return isinstance(leaf, family.model)

    def changed(leaf):
        if not is_model(leaf):
            return leaf
        return eqx.tree_at(family.where, leaf, change(family.where(leaf)))

    return lambda tree: jax.tree.map(changed, tree, is_leaf=is_model)


def _check(family: Family, layout: Layout, mesh: meshes.AnyMesh, compute: Compute) -> None:
    """Refuses a mesh that is not the layout's, and choices of `compute` that the layout gives
    nothing to act on.
    """
    for name, size in layout.axes.items():
        if mesh.shape.get(name) != size:
            raise ValueError(
                f"decoder: the layout has {name}={size}, and the mesh {dict(mesh.shape)}. Make it "
                "with mesh.make(**layout.axes)."
            )
    by_family = family.context_attention is not None and compute.attention is None
    if layout.context > 1 and compute.context_attention is None and not by_family:
        missing = "Compute has only `attention`"
        if compute.attention is None:
            missing = f"{family.model.__name__}'s family has no `context_attention`"
        raise ValueError(
            f"decoder: the layout splits tokens over context={layout.context}, and {missing}, so "
            "that a token would see only those of its own device. Use "
            "Compute(context_attention=context.causal_attention) where attention is "
            "softmax(q k^T / sqrt(K)) v, or context.ulysses."
        )
    if compute.reduce_in_backward and (layout.pipelined or layout.microbatches > 1 or layout.zero):
        raise ValueError(
            "decoder: Compute(reduce_in_backward=True) sums a block's gradients wherever they are "
            f"made, so it needs stage=1, microbatches=1 and zero=0; got Layout({layout}). Leave it "
            "out: gradients are then reduced once, or by zero=3 where they are made."
        )
    if compute.comms is not None and not layout.sequence:
        raise ValueError(
            "decoder: Compute(comms=...) says how blocks communicate whose tokens are split over "
            f"the tensor axis, so it needs sequence=True; got Layout({layout}). Set it, or leave "
            "`comms` out."
        )
