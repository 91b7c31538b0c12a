"""The recipe that composes the axes for a decoder: its train step over data x stage x tensor, whatever its layers are.

    prepared = decoder.prepare(gpt2.FAMILY, gpt2.SMALL, optax.adamw(3e-4), layout, mesh, batch=64, key=jax.random.key(0))

It is short on purpose: copy it, and change a line. What a layout's words mean is said in `layout.words`, what a model is in
`models.family`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from parallax import cross_entropy, mesh, precision, remat, rules
from parallax.collectives import Axis, AxisLike
from parallax.layout import Layout, words
from parallax.layout.rows import Functions, Placed
from parallax.models.family import Batch, Configuration, Family
from parallax.models.prepared import PLAIN, Compute, Partly, Prepared, Train
from parallax.step import State, make_scaled, planned

__all__ = [
    "PLAIN",
    "Batch",
    "Compute",
    "Configuration",
    "Family",
    "Prepared",
    "Train",
    "joined",
    "loss_step",
    "prepare",
    "rules_of",
    "sequence_keys",
    "stored",
    "train_step",
]


def train_step(*arguments: Any, **options: Any) -> tuple[State, Train]:
    """A decoder over data x stage x tensor: the state, and the compiled step `(state, windows) -> (state, info)`.

    Arguments and errors are those of `prepare`, which it calls, to make the state at once.
    """
    prepared = prepare(*arguments, **options)
    return prepared.init(), prepared.train


def prepare(
    family: Family,
    config: Configuration,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    mesh_: Mesh,
    *,
    batch: int,
    key: Key[Array, ""],
    axes: Mapping[str, AxisLike] | None = None,
    compute: Compute = PLAIN,
) -> Prepared:
    """A decoder over data x stage x tensor: the step `(state, windows) -> (state, info)`, and how its state is made.

    The step donates the state. `windows` is the global batch, [batch, T + 1] tokens, placed or not. The weights and the
    dropout masks come from `key` and from logical positions, so every layout computes the same run.

    Args:
        family: the kind of decoder, such as `gpt2.FAMILY`.
        config: the model's sizes.
        optimizer: one that acts element by element, or one of `parallax.optimizers`.
        layout: the sizes of the axes, and what is split, shortened or computed again; with stages, the blocks of the model in
            the state are [v, L / v, ...], and `joined` makes them [L, ...] again.
        mesh_: its mesh, as `mesh.make(**layout.axes)` makes it.
        batch: sequences in the global batch.
        key: the seed of the run.
        axes: who moves data along which axis, such as `{"data": bucketed(ring("data")), "tensor": "tensor"}`; along those that
            are left out, rings.
        compute: how the model computes.

    Raises:
        ValueError: the layout does not divide the model or the batch, or is not the mesh's; or `axes` names another axis.
    """
    layout.check(**config.sizes, batch=batch)
    _check_mesh(layout, mesh_)
    does = _functions(layout, axes, compute, platform_of(mesh_))
    weights_key, dropout_key = jax.random.split(key)
    make_model = _maker(family, config, does, weights_key, compute.dtype)
    rule, shared = rules_of(family, layout)
    placed = _placed(family, make_model, does, shared, mesh_)
    scale = does.numbers.scale()
    of_parameters = does.replicas.parameters(whole=rule, share=shared)
    state = planned(
        *(make_model, optimizer, of_parameters, mesh_), optimizer_rule=shared, scale=scale, trainable=compute.trainable
    )
    enter, stage, head = _stages(family, config, does, placed, attention_of(family, compute, platform_of(mesh_)))

    def grad_of(scale):
        of_loss = head if scale is None else precision.scaled(head, scale)
        grad = does.outside(does.grad(enter, stage, of_loss, placed, compute.trainable), placed)
        grad = grad if scale is None else precision.unscaled(grad, scale)
        return lambda model, batch: grad(model, _weighted(batch, does.axes["data"]))

    axes_of_norm = tuple(does.axes.values())
    update = does.optimizer(optimizer, placed)
    local = make_scaled(grad_of, update, max_norm=compute.max_norm, axes=axes_of_norm, specs=state.specs.model)
    step = mesh.spmd(local, mesh=mesh_, in_specs=(state.specs, P("data"), P()), out_specs=(state.specs, P()))
    drops = family.drops(config)

    static = eqx.filter(state.shapes, mesh.is_array, inverse=True)

    @functools.partial(jax.jit, donate_argnums=0)
    def train(arrays, windows, weights=None, limit=None):
        keys = sequence_keys(dropout_key, arrays.step, batch) if drops else None
        new, info = step(eqx.combine(arrays, static), Batch(windows, keys, weights), limit)
        return eqx.filter(new, mesh.is_array), info

    cut = _on_blocks(family, lambda blocks: does.stages.cut(blocks, does.chunks))
    init = lambda model=None: state.init() if model is None else state.init(cut(model))
    compiled = cast("Train", train)
    return Prepared(init, state.shapes, Partly(compiled, static) if jax.tree.leaves(static) else compiled)


def loss_step(
    family: Family,
    config: Configuration,
    layout: Layout,
    mesh_: Mesh,
    *,
    axes: Mapping[str, AxisLike] | None = None,
    compute: Compute = PLAIN,
) -> Callable[..., Float[Array, ""]]:
    """The compiled `(model, windows, weights=None) -> loss` of `train_step`'s model, without dropout, to evaluate with.

    The batch may be of another size than in training; it must divide by data x microbatches. It computes in the parameters'
    own precision, and gathers a model that lives as shares (ZeRO-3) layer by layer too. Of `compute` it uses `attend` and
    `schedule`; `axes` as in `prepare`.
    """
    compute = Compute(attend=compute.attend, schedule=compute.schedule)
    does = _functions(dataclasses.replace(layout, remat="none"), axes, compute, platform_of(mesh_))
    make_model = _maker(family, config, does, jax.random.key(0), jnp.dtype(jnp.float32))
    rule, shared = rules_of(family, layout)
    placed = _placed(family, make_model, does, does.replicas.parameters(whole=rule, share=shared), mesh_)
    enter, stage, head = _stages(family, config, does, placed, attention_of(family, compute, platform_of(mesh_)))

    def loss_alone(*arguments):
        value = head(*arguments)
        return value[0] if isinstance(value, tuple) else value

    loss, data = does.value(enter, stage, loss_alone, placed), does.axes["data"]
    local = lambda model, batch: data.all_mean(loss(model, _weighted(batch, data)))
    evaluate = mesh.spmd(local, mesh=mesh_, in_specs=(placed.specs, P("data")), out_specs=P())
    static = eqx.filter(eqx.filter_eval_shape(make_model), mesh.is_array, inverse=True)
    run = lambda arrays, windows, weights=None: evaluate(eqx.combine(arrays, static), Batch(windows, None, weights))
    compiled = jax.jit(run)
    partly = lambda model, windows, weights=None: compiled(eqx.filter(model, mesh.is_array), windows, weights)
    return partly if jax.tree.leaves(static) else compiled


def joined(family: Family, layout: Layout, model: Any) -> Any:
    """The model of a state under `layout` as one device has it: blocks as [L, ...]. Other trees stay as they are."""
    return _on_blocks(family, words.read(layout).stages.joined)(model)


def stored(family: Family, layout: Layout) -> dict[str, Callable[..., Any]]:
    """How a state goes into a checkpoint that any layout can read, and back: arguments for `run.checkpoint.Checkpoints`.

    Wherever the state holds a model of the family (the parameters, the optimizer's moments), its blocks are stored as [L, ...].
    """
    does = words.read(layout)
    cut = lambda blocks: does.stages.cut(blocks, does.chunks)
    return does.stages.of(
        alone={}, piped={"to_disk": _on_blocks(family, does.stages.joined), "from_disk": _on_blocks(family, cut)}
    )


def rules_of(family: Family, layout: Layout) -> tuple[rules.Rule, rules.Rule]:
    """The rule of a layout's model, and the rule of what the replicas share (ZeRO)."""
    does = words.read(layout)
    rule = family.rules("tensor", stage=does.stages.axis, size=layout.tensor)
    keep = {f"{family.blocks}.**": tuple(range(does.stages.loops))}
    return rule, does.replicas.state(whole=rule, share=rules.fsdp("data", size=layout.data, keep=keep, inside=rule))


def sequence_keys(key: Key[Array, ""], step: Int[Array, ""], batch: int) -> Key[Array, " batch"]:
    """One random key for each sequence of the global batch at `step`: the same wherever the sequence is computed."""
    fold = functools.partial(jax.random.fold_in, jax.random.fold_in(key, step))
    return jax.vmap(fold)(jnp.arange(batch, dtype=jnp.uint32))


def platform_of(mesh_: Mesh) -> str:
    """What kind of devices a mesh has: "cpu", "gpu" or "tpu"."""
    return mesh_.devices.flat[0].platform


def _functions(layout: Layout, axes: Mapping[str, AxisLike] | None, compute: Compute, platform: str) -> Functions:
    """`layout` as functions, with what is fastest on the platform, and what `compute` puts in their place."""
    does, table, block = words.read(layout, axes), compute.schedule, compute.remat
    if platform == "tpu":  # behind a barrier, or with two layers in a loop's body, its compiler copies all that is kept
        does = does._replace(kept=does.kept._replace(block=remat.in_a_loop(does.kept.block)))
        does = does._replace(replicas=does.replicas._replace(unroll=1))
    does = does if table is None else does._replace(table=lambda: table)
    return does if block is None else does._replace(kept=does.kept._replace(block=block))


def _maker(family: Family, config: Configuration, does: Functions, key: Key[Array, ""], dtype: DTypeLike) -> Callable[[], Any]:
    """How the model of a layout is made."""
    cut = _on_blocks(family, lambda blocks: does.stages.cut(blocks, does.chunks))
    return lambda: cut(family.model(config, key=key, dtype=dtype))


def _on_blocks(family: Family, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """From a tree to the same with the blocks of each model in it changed."""
    is_model = lambda leaf: isinstance(leaf, family.model)
    changed = lambda model: eqx.tree_at(family.where, model, change(family.where(model)))
    return lambda tree: jax.tree.map(lambda leaf: changed(leaf) if is_model(leaf) else leaf, tree, is_leaf=is_model)


def _placed(family: Family, make_model: Callable[[], Any], does: Functions, rule: rules.Rule, mesh_: Mesh) -> Placed:
    """Where the parts of the model live under `rule`."""
    specs = rules.specs(eqx.filter_eval_shape(make_model), rule, mesh_)
    return Placed(specs, family.where, does.stages.loops)


def attention_of(family: Family, compute: Compute, platform: str) -> Callable[..., Any]:
    """The attention function: what was asked for, or the family's, on TPUs by its kernel."""
    own = family.kernel if platform == "tpu" else None
    return compute.attend or own or family.attend


def _stages(family: Family, config: Configuration, does: Functions, placed: Placed, attend: Callable[..., Any]):
    """The family's `(enter, stage, head)` under a layout."""
    return family.stages(
        config,
        does.stages.of(alone=(), piped=does.axes["stage"]),
        does.axes["tensor"],
        joins=does.tokens.joins,
        attend=does.again.attend(attend),
        remat=lambda block: does.block(block, placed),
        unroll=does.replicas.unroll,
    )


def _weighted(batch: Batch, data: Axis) -> Batch:
    """The batch with weights whose mean over the tokens of all devices is 1, where it has any."""
    return batch if batch.weights is None else batch._replace(weights=cross_entropy.normalized(batch.weights, data))


def _check_mesh(layout: Layout, mesh_: Mesh) -> None:
    for name, size in layout.axes.items():
        if mesh_.shape.get(name) != size:
            raise ValueError(
                f"decoder: the layout has {name}={size}, and the mesh {dict(mesh_.shape)}. Make it with mesh.make(**layout.axes)."
            )
