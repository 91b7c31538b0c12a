"""A decoder's compiled train step over data x stage x context x tensor, and the function that makes
the step's state. That function makes each part of the state on the devices that keep the part.

    options = {"batch": 64, "key": jax.random.key(0)}
    made = decoder.train_step(
        gpt2.FAMILY, gpt2.SMALL, optax.adamw(3e-4), layout, mesh, **options
    )
    state = made.init()
    state, info = made.train(state, windows)

`models.recipe` composes the loss and the gradients. A `Family` has the functions of one kind of
model. A `Layout` has the sizes of the axes, and a `Compute` has the choices that a `Layout` leaves
open. The L blocks are one tree of arrays [L, ...]. In a pipeline with v chunks of layers per stage,
the arrays are [v, L / v, ...]: index c of dim 0 holds the c-th chunk of every stage, and dim 1 is
split over the stages. A model's *static* leaves are those that are not arrays.
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
from parallax.step import Info, Planned, State, Step, planned
from parallax.step import make as make_step
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
    """A compiled step, as `jax.jit` makes it. It donates the state, which the caller must not use
    again.
    """

    def __call__(
        self,
        state: State,
        windows: Int[ArrayLike, "batch window"],
        weights: Float[ArrayLike, "batch tokens"] | None = None,
        limit: Float[ArrayLike, ""] | None = None,
        /,
    ) -> tuple[State, Info]:
        """Returns the state after the step, and the step's loss and gradient norm.

        `windows` are sequences of T + 1 tokens, and `weights` the weights of their last T tokens in
        the loss. None: all weights are 1. If the loss is above `limit`, the step changes nothing;
        None: there is no limit.
        """
        ...

    def lower(self, state: PyTree, windows: Any, weights: Any = None, limit: Any = None, /) -> Any:
        """Returns the program for these arrays, or for shapes with shardings, as a
        `jax.stages.Lowered`, which has a method `compile`.
        """
        ...


class TrainStep(NamedTuple):
    """A train step that is checked and ready to compile, and the function `init` that makes the
    step's state. Nothing is computed yet.

    Attributes:
        init: makes the state; each device makes only the shards that it keeps. `init(model)` starts
            from the weights of `model`, a whole model such as `gpt2.load` returns. Each process
            must have this model, in the host's memory or on one device.
        shapes: the `jax.ShapeDtypeStruct`s of the state, with their shardings. With them the step
            can be compiled, and its memory planned, before any array exists.
        train: the step `(state, windows, weights=None, limit=None) -> (state, info)`, under `jit`;
            it donates the state. With weights, [batch, T], the loss is the weighted mean over the
            targets; a weight of 0 leaves a target out. If the loss is above `limit`, a scalar, the
            step changes nothing.
        specs: the specs of the state's arrays.
        local: the step for one device's shards, `(state, batch, limit) -> (state, info)`, where
            `batch` is a `Batch`. This function is not yet mapped over the mesh or compiled. It is
            for wrappers other than `mesh.spmd`, such as `on_islands.train_step`.
        keys: a function `(number, sequences=batch)` that returns random keys for `sequences`
            sequences at the step `number`; it returns None without dropout. `on_islands` passes the
            number of sequences of all islands together.
        batch: the number of sequences in the global batch.
        setup: the decoder, its layout and its `Compute`.
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
    """Returns the `TrainStep` of a decoder over data x stage x context x tensor. Its `train` is the
    train step `(state, windows) -> (state, info)`, and its `init` makes the step's state.
    `on_islands` builds a step for several groups of devices (islands) from the `TrainStep`.

    The step donates the state. `windows` is the global batch, [batch, T + 1] tokens; it need not be
    on the devices yet. The initial weights and the dropout masks depend on `key`, but not on the
    layout.

    Args:
        family: the kind of decoder, such as `gpt2.FAMILY`.
        config: the model's sizes.
        optimizer: an optimizer that acts element by element, or one of `parallax.optimizers`. A
            mask of leaves, such as that of a weight decay, must choose them by their paths: their
            numbers of dims depend on the layout.
        layout: the sizes of the axes, ZeRO, the precision and rematerialisation. With stages, the
            L blocks of the model in the state are [v, L / v, ...], for v chunks per stage, and
            `joined` makes them [L, ...] again.
        mesh: the mesh of the layout, `mesh.make(**layout.axes)`. The mesh may have more axes, such
            as the axis of islands.
        batch: the number of sequences in the global batch.
        key: the seed of the run.
        compute: the choices that the layout does not make.

    Raises:
        ValueError: the layout does not divide the model or the batch; the mesh has another size
            along an axis of the layout; `compute.axes` names an axis that the layout lacks; or a
            context axis splits the tokens, and the attention is over each device's own tokens only.
    """
    layout.check(config.sizes | {"batch": batch})
    _check(family, layout, mesh, compute)
    weights_key, dropout_key = jax.random.split(key)
    # `specs` are those of the gradients that the optimizer gets.
    state, specs = _planned_state(family, config, optimizer, layout, mesh, weights_key, compute)
    setup = Setup(family, config, layout, mesh, specs, compute)
    functions, compose = recipe.functions_of(setup), compute.grad_of or recipe.grad_of

    def grad_of(scale):
        """Returns the gradient function of the loss times `scale`, or of the loss itself if `scale`
        is None.
        """
        grad = compose(functions, setup, scale)

        def weighted_grad(model, batch):
            """Scales the weights of the targets, if the batch has weights, so that their mean is 1,
            and returns the loss and the gradients.
            """
            return grad(model, recipe.weighted(batch, setup))

        # The same function, which also reports the gradients to a recording by `bisect`.
        return decoder_taps.gradients(weighted_grad, specs)

    # Under ZeRO-1 and ZeRO-2 a device has all its weights, but only a share of the gradients and of
    # the optimizer's state. `zero.sharded` computes the updates of that share, and gathers them.
    # Under ZeRO-3 a device has the same share of all three, so a plain optimizer fits.
    if layout.zero in (1, 2):
        optimizer = zero.sharded(optimizer, setup.along(recipe.SHARDED_OVER), specs)
    local = make_step(
        precision.ScaledGrad(grad_of),  # gets the state's loss scale, None without one
        optimizer,
        max_norm=compute.max_norm,
        # The axes, with their algorithms, over which the shards' sums of squares are added.
        reduce_norm_over=tuple(setup.axes.values()),
        # The specs of the parameters, for the check of the optimizer. The norm needs no specs.
        specs=state.specs.model,
    )

    def keys(number, sequences=batch):
        """Returns random keys for `sequences` sequences at step `number`, or None without dropout.
        `on_islands` passes the number of sequences of all islands together."""
        if not family.uses_dropout(config):
            return None
        return sequence_keys(dropout_key, number, sequences)

    on_mesh = functools.partial(meshes.spmd, mesh=mesh)
    train = compiled(
        local, state.shapes, state.specs, on_mesh, keys, batch_spec=P(layout.batch_axes)
    )
    return TrainStep(
        init=state.init,
        shapes=state.shapes,
        train=train,
        specs=state.specs,
        local=local,
        keys=keys,
        batch=batch,
        setup=setup,
    )


def _planned_state(
    family: Family,
    config: Configuration,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    mesh: meshes.AnyMesh,
    key: Key[Array, ""],
    compute: Compute,
) -> tuple[Planned, Specs]:
    """Returns the planned state of a step, and the specs of the gradients that the optimizer gets.

    A `Planned` (step.py) describes a state: its shapes, its specs, and the function `init` that
    makes the state. The optimizer gets gradients that are split like the optimizer's state. Under
    ZeRO-1 and ZeRO-2, that state is split over more axes than the parameters.
    """
    # Brings the blocks of a model from [L, ...] to the form of the layout.
    split_blocks = _on_blocks(family, _into_stages(layout, compute.schedule))
    rule, state_rule = recipe.rules_of(family, layout)  # of the parameters, of the optimizer

    def make_model():
        return split_blocks(family.model(config, key=key, dtype=compute.dtype))

    state = planned(
        make_model,
        optimizer,
        rule,
        mesh,
        optimizer_rule=state_rule,
        scale=recipe.first_scale(layout),  # of the loss, for float16; else None
        trainable=compute.trainable,
        batch_axes=layout.batch_axes,
    )

    def init(model=None):
        """Returns the state, with new weights, or with the weights of `model`, whose blocks are [L,
        ...].
        """
        return state.init() if model is None else state.init(split_blocks(model))

    return state._replace(init=init), rules.specs(state.shapes.model, state_rule, mesh)


def compiled(
    local: Callable[..., Any],
    shapes: PyTree,
    specs: PyTree,
    spmd: Callable[..., Any],
    keys: Callable[[Array], Any],
    *,
    batch_spec: P,
    info_spec: P = P(),  # noqa: B008
    options: int = 1,
) -> Train:
    """Returns the step `local`, mapped over the mesh and compiled. It donates the state.

    Args:
        local: the step for one device's shards, `(state, batch, *options) -> (state, info)`, where
            `batch` is a `Batch`.
        shapes: the shapes of the state; its leaves that are not arrays become part of the program.
        specs: the specs of the state's arrays.
        spmd: the function that maps the step over the mesh: `mesh.spmd` with the argument `mesh`
            bound, or `same_bits.spmd` with `mesh` and `cells` bound.
        keys: a function from the step's number to the random keys of the global batch; it returns
            None without dropout.
        batch_spec: the spec of the batch.
        info_spec: the spec of the loss and of the gradient norm.
        options: the number of arguments that `local` takes after the batch, such as `limit`. Each
            such argument is the same on all devices; an argument that the caller leaves out is
            None.
    """
    in_specs = (specs, batch_spec, *(P(),) * options)
    step = spmd(local, in_specs=in_specs, out_specs=(specs, info_spec))
    static = eqx.filter(shapes, meshes.is_array, inverse=True)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(arrays, windows, weights=None, *given):
        """Returns the new arrays of the state, and the step's info. `arrays` has the arrays of the
        state, and `static` the state's other leaves. `weights`, [batch, T], are the weights of the
        targets. `given` are the options that the caller passes; the other options are None.
        """
        all_options = (*given, *(None,) * (options - len(given)))
        new, info = step(
            eqx.combine(arrays, static), Batch(windows, keys(arrays.step), weights), *all_options
        )
        return eqx.filter(new, meshes.is_array), info

    # `jax.jit` cannot take the static leaves of a state, so `_TrainArrays` removes them before the
    # call and puts them back after it.
    return _TrainArrays(train, static) if jax.tree.leaves(static) else train


class _TrainArrays(NamedTuple):
    """A `Train` for a state that also has leaves other than arrays. `jax.jit` cannot take these
    leaves.

    Attributes:
        train: the compiled step, which takes and returns only the state's arrays.
        static: the leaves of the state that are not arrays; the step does not change them.
    """

    train: Any
    static: Any

    def __call__(self, state: Any, windows: Any, *options: Any) -> tuple[Any, Info]:
        """Returns the state after the step, and the step's loss and gradient norm."""
        new, info = self.train(eqx.filter(state, meshes.is_array), windows, *options)
        return eqx.combine(new, self.static), info

    def lower(self, state: PyTree, windows: Any, *options: Any) -> Any:
        """Returns the lowered program. The program takes the arrays of `state`; the leaves that are
        not arrays are constants in the program."""
        return self.train.lower(eqx.filter(state, meshes.is_array), windows, *options)


def loss_step(
    family: Family,
    config: Configuration,
    layout: Layout,
    mesh: meshes.AnyMesh,
    *,
    compute: Compute = PLAIN,
) -> Callable[..., Float[Array, ""]]:
    """Returns the compiled loss `(model, windows, weights=None) -> loss` of the model that
    `train_step` trains, for evaluation: without dropout, and without the auxiliary losses of the
    blocks. `model` is the field `model` of a state: its blocks have the form that the layout needs.
    `windows` are sequences of T + 1 tokens, and `weights` the weights of their last T tokens. None:
    all weights are 1. The loss is the (weighted) mean over these tokens, in nats.

    The size of the batch may differ from training, and must be a multiple of data x microbatches.
    The loss computes in the precision of the parameters. If ZeRO-3 splits the model, the layers of
    the model are gathered one by one. The loss uses the fields `axes`, `attention`,
    `context_attention`, `documents`, `expert_dispatch`, `comms` and `schedule` of `compute`.
    """
    # These choices concern only the backward pass, and an evaluation has none.
    compute = dataclasses.replace(compute, remat=None, reduce_in_backward=False)
    layout = dataclasses.replace(layout, remat="none")
    _check(family, layout, mesh, compute)
    # Brings the blocks of a model from [L, ...] to the form of the layout.
    split_blocks = _on_blocks(family, _into_stages(layout, compute.schedule))

    def make_model():
        return split_blocks(family.model(config, key=jax.random.key(0), dtype=jnp.float32))

    # Only the shapes are used, for the specs, so the key and the dtype do not matter.
    model = eqx.filter_eval_shape(make_model)
    rule, _ = recipe.rules_of(family, layout)  # an evaluation has no optimizer's state
    specs = rules.specs(model, rule, mesh)
    setup = Setup(family, config, layout, mesh, specs, compute)
    loss = recipe.loss_of(recipe.functions_of(setup), setup)

    def local(model, batch):
        """Returns the loss on this device's shards of the model and of the batch."""
        return loss(model, recipe.weighted(batch, setup))

    evaluate = meshes.spmd(local, mesh=mesh, in_specs=(specs, P(layout.batch_axes)), out_specs=P())
    static = eqx.filter(model, meshes.is_array, inverse=True)

    @jax.jit
    def run(arrays, windows, weights=None):
        """Returns the loss of a model: `arrays` has the model's arrays, and `static` the model's
        other leaves.
        """
        return evaluate(eqx.combine(arrays, static), Batch(windows, None, weights))

    def run_model(model, windows, weights=None):
        """Returns the loss of `model`. Only the model's arrays go to `run`: `jax.jit` cannot take
        the static leaves, and `run` has them already."""
        return run(eqx.filter(model, meshes.is_array), windows, weights)

    return run_model if jax.tree.leaves(static) else run


def joined(family: Family, layout: Layout, model: Any, *, schedule: Schedule | None = None) -> Any:
    """Returns `model` with blocks [L, ...], as a model on one device has them. `model` comes from a
    train state of `layout`, or is a tree that contains such models. Other leaves of the tree are
    returned unchanged.

    If `Compute` has a schedule, pass it as `schedule`: the schedule gives the order of the chunks.
    """
    return _on_blocks(family, _out_of_stages(layout, schedule))(model)


def stored(
    family: Family, layout: Layout, *, schedule: Schedule | None = None, layers: int | None = None
) -> DiskForm | None:
    """Returns the functions `to_disk` and `from_disk`, by which `run.checkpoint.Checkpoints`
    converts a state before it is stored and after it is read, so that any layout can read it.
    Without a pipeline, the result is None, and the state is stored unchanged.

    Wherever the state holds a model of the family (the parameters, the optimizer's moments), the
    model's blocks are stored as [L, ...], in the order of the model. If `Compute` has a schedule,
    pass it as `schedule`: the schedule gives the order of the chunks. If the state also holds
    models with only some of the chunks, as a state of `on_islands` may, pass `layers`, the number
    of layers of the whole model. `from_disk` needs `layers` to compute the layers per chunk.
    """
    if not layout.pipelined:
        return None
    return DiskForm(
        to_disk=_on_blocks(family, _out_of_stages(layout, schedule)),
        from_disk=_on_blocks(family, _into_stages(layout, schedule, layers)),
    )


def sequence_keys(key: Key[Array, ""], step: Int[Array, ""], batch: int) -> Key[Array, " batch"]:
    """Returns one random key for each of the `batch` sequences of the global batch at `step`, from
    the seed `key`.

    A key depends only on the seed, the step and the sequence's number, so it is the same under
    every layout.
    """
    fold = functools.partial(jax.random.fold_in, jax.random.fold_in(key, step))
    return jax.vmap(fold)(jnp.arange(batch, dtype=jnp.uint32))


def _into_stages(
    layout: Layout, schedule: Schedule | None, layers: int | None = None
) -> Callable[[Any], Any]:
    """Returns a function that turns blocks [L, ...] into the form that they have in the train state
    of `layout`. For v chunks per stage, this form is [v, L / v, ...]: index c of dim 0 holds the
    c-th chunk of every stage, in the order of the stages.

    `schedule` is the schedule of `Compute`, which may place the chunks in another order than that
    of the layers. None: the layout's own schedule, which keeps the chunks in the order of the
    layers. If the blocks have only some of the chunks, `layers` is the L of the whole model.
    """

    def split(blocks):
        """Returns `blocks`, [L, ...], as [v, L / v, ...] for v chunks per stage. Without a
        pipeline, returns `blocks` unchanged.
        """
        if not layout.pipelined:
            return blocks

        def chunked(w):
            return w.reshape(-1, (layers or len(w)) // layout.chunks, *w.shape[1:])

        blocks = _on_arrays(blocks, chunked)
        # `placed[c, s]` is the number, in the model's order, of chunk c of stage s.
        return blocks if schedule is None else pipeline.to_placement(blocks, schedule.placed)

    return split


def _out_of_stages(layout: Layout, schedule: Schedule | None) -> Callable[[Any], Any]:
    """Returns a function that turns the blocks in a train state of `layout` into blocks [L, ...].
    The returned function is the inverse of the function that `_into_stages` returns. In a pipeline
    with v chunks per stage, the blocks in the state are [v, L / v, ...].
    """

    def join(blocks):
        """Returns `blocks`, [v, L / v, ...] for v chunks per stage, as [L, ...], in the order of
        the L layers. Without a pipeline, returns `blocks` unchanged.
        """
        if not layout.pipelined:
            return blocks
        # None: the layout's own schedule, which keeps the chunks in the order of the layers.
        if schedule is not None:
            blocks = pipeline.from_placement(blocks, schedule.placed)
        return _on_arrays(blocks, lambda w: w.reshape(-1, *w.shape[2:]))

    return join


def _on_arrays(tree: PyTree, change: Callable[[Any], Any]) -> PyTree:
    """Returns `tree` with its arrays changed by `change`, and its other leaves as they are."""

    def changed(leaf):
        # Adafactor has arrays [1] in place of moments that it does not use.
        return change(leaf) if meshes.is_array(leaf) and leaf.shape != (1,) else leaf

    return jax.tree.map(changed, tree)


def _on_blocks(family: Family, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that takes a tree with models of the family in it, such as a state, and
    applies `change` to the blocks of each of these models. `family.model` is the class of the
    models, and `family.where` picks the blocks of one model. In a state, the parameters are a
    model, and so are the optimizer's moments.
    """

    def is_model(leaf):
        # Such a model counts as a leaf of the tree, so `change` gets all its blocks at once.
        return isinstance(leaf, family.model)

    def changed(leaf):
        """Returns `leaf`. If `leaf` is a model, its blocks are changed by `change`."""
        if not is_model(leaf):
            return leaf
        return eqx.tree_at(family.where, leaf, change(family.where(leaf)))

    return lambda tree: jax.tree.map(changed, tree, is_leaf=is_model)


def _check(family: Family, layout: Layout, mesh: meshes.AnyMesh, compute: Compute) -> None:
    """Raises `ValueError` if the mesh does not match the layout, or if the layout cannot use a
    choice in `compute`.
    """
    for name, size in layout.axes.items():
        if mesh.shape.get(name) != size:
            raise ValueError(
                f"decoder: the layout has {name}={size}, and the mesh {dict(mesh.shape)}. Make it "
                "with mesh.make(**layout.axes)."
            )
    # The family's context attention fits only the family's own attention.
    family_can = family.context_attention is not None and compute.attention is None
    if layout.context > 1 and compute.context_attention is None and not family_can:
        missing = "Compute has only `attention`"
        if compute.attention is None:
            missing = f"{family.model.__name__}'s family has no `context_attention`"
        raise ValueError(
            f"decoder: the layout splits tokens over context={layout.context}, and {missing}, so "
            "each token would see only the tokens of its own device. Use "
            "Compute(context_attention=context.causal_attention) if the attention is "
            "softmax(q k^T / sqrt(K)) v, and context_attention=context.ulysses if it is not."
        )
    if compute.reduce_in_backward and (layout.pipelined or layout.microbatches > 1 or layout.zero):
        raise ValueError(
            "decoder: Compute(reduce_in_backward=True) sums gradients in the backward pass of "
            f"each block, so it needs stage=1, microbatches=1 and zero=0; got Layout({layout}). "
            "Leave reduce_in_backward out: gradients are then reduced once per step, or with "
            "zero=3 block by block."
        )
    if compute.unroll is not None and compute.unroll < 1:
        raise ValueError(
            f"decoder: Compute needs unroll of 1 layer or more; got {compute.unroll}. Leave unroll "
            "out, or set it to the number of layers to get a program without a loop over the "
            "layers."
        )
    if compute.comms is not None and not layout.sequence:
        raise ValueError(
            "decoder: Compute(comms=...) is for blocks that split tokens over the tensor axis, so "
            f"it needs sequence=True; got Layout({layout}). Set sequence=True, or leave `comms` "
            "out."
        )
