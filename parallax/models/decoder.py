"""The recipe that composes the axes for GPT-2: its train step over data x stage x tensor.

It is short on purpose: copy it, and change a line.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Int, Key

from parallax import cross_entropy, grads, mesh, pipeline, precision, remat, rules, sequence, zero
from parallax.collectives import Axis, AxisLike, ring
from parallax.grads import Grad
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.schedule import Schedule
from parallax.step import Info, State, make_scaled, planned
from parallax.typed import PyTree


@dataclass(frozen=True)
class Compute:
    """How a step computes, beside what its layout says.

    Args:
        attend: the attention function, as `gpt2.loss` takes it.
        checkpoint: what becomes of each block, instead of what `layout.remat` says.
        dtype: of the weights.
        schedule: the pipeline's, where it is another than `layout.table()`.
        max_norm: clip the gradients to this global norm.
    """

    attend: Callable[..., Any] = gpt2.attention
    checkpoint: Callable[..., Any] | None = None
    dtype: DTypeLike = jnp.float32
    schedule: Schedule | None = None
    max_norm: float | None = None


PLAIN = Compute()


def along(layout: Layout, axes: Mapping[str, AxisLike] | None = None) -> dict[str, Axis]:
    """Each axis of `layout` with who moves data along it: what `axes` say, and rings along the rest.

    Raises:
        ValueError: an axis that no layout has, or one that is bound to another name.
    """
    found = {name: ring(name) for name in layout.axes}
    for name, axis in (axes or {}).items():
        if name not in found or Axis.of(axis).names != name:
            raise ValueError(
                f"axes needs movers along {', '.join(found)}, such as axes={{'data': ring('data')}}; got {name!r}: {axis!r}."
            )
        found[name] = Axis.of(axis)
    return found


@runtime_checkable
class Train(Protocol):
    """A compiled step, as `jax.jit` makes it: it donates the state."""

    def __call__(
        self, state: State, windows: Int[ArrayLike, "batch window"], weights: Float[ArrayLike, "batch tokens"] | None = None, /
    ) -> tuple[State, Info]:
        """The state after the step, and what the step measured."""
        ...

    def lower(self, state: PyTree, windows: Any, weights: Any = None, /) -> Any:
        """The program for these arrays, or shapes with shardings, to `compile()`: a `jax.stages.Lowered`."""
        ...


class Prepared(NamedTuple):
    """A train step that is checked and ready to compile, and the state that it will need: nothing is computed yet.

    Attributes:
        init: makes the state in its place: no device ever holds the whole.
        shapes: its `jax.ShapeDtypeStruct`s, with their shardings, to compile for and to plan with.
        train: the step `(state, windows, weights=None) -> (state, info)`, under `jit`; it donates the state. With weights,
            [batch, T], the loss is the mean over the tokens that they weigh: 0 leaves one out.
    """

    init: Callable[[], State]
    shapes: State
    train: Train


def train_step(*arguments: Any, **options: Any) -> tuple[State, Train]:
    """GPT-2 over data x stage x tensor: the state, and the compiled step `(state, windows) -> (state, info)`.

    Arguments and errors are those of `prepare`, which it calls, to make the state at once.
    """
    prepared = prepare(*arguments, **options)
    return prepared.init(), prepared.train


def prepare(
    config: gpt2.Config,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    mesh_: Mesh,
    *,
    batch: int,
    key: Key[Array, ""],
    axes: Mapping[str, AxisLike] | None = None,
    compute: Compute = PLAIN,
) -> Prepared:
    """GPT-2 over data x stage x tensor: the step `(state, windows) -> (state, info)`, and how its state is made.

    The step donates the state. `windows` is the global batch, [batch, T + 1] tokens, placed or not. The weights and the
    dropout masks come from `key` and from logical positions, so every layout computes the same run.

    Args:
        config: the model's sizes.
        optimizer: one that acts element by element, or one of `parallax.optimizers`.
        layout: the sizes of the axes, and what is split, shortened or computed again; with stages, the model in the state is
            `gpt2.chunked`.
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
    over = along(layout, axes)
    weights_key, dropout_key = jax.random.split(key)
    make_model, rule, shared = _model(config, layout, weights_key, compute.dtype)
    specs = rules.specs(eqx.filter_eval_shape(make_model), shared, mesh_)
    scale = precision.Scale() if layout.precision == "float16" else None
    state = planned(make_model, optimizer, shared if layout.zero == 3 else rule, mesh_, optimizer_rule=shared, scale=scale)
    if layout.zero in (1, 2):
        optimizer = zero.sharded(optimizer, over["data"], specs=specs)

    def grad_of(scale):
        loss_scale = (lambda loss: loss) if scale is None else functools.partial(precision.scaled, scale=scale)
        made = accumulated_grad if layout.stage == 1 else pipelined_grad
        grad = reduced(made(config, layout, specs, over, loss_scale, compute), layout, specs, over)
        grad = grad if scale is None else precision.unscaled(grad, scale)
        return lambda model, batch: grad(model, _weighted(batch, over["data"]))

    local = make_scaled(grad_of, optimizer, max_norm=compute.max_norm, axes=tuple(over.values()), specs=state.specs.model)
    step = mesh.spmd(local, mesh=mesh_, in_specs=(state.specs, P("data")), out_specs=(state.specs, P()))
    drops = config.dropout > 0 or config.attention_dropout > 0

    @functools.partial(jax.jit, donate_argnums=0)
    def train(state, windows, weights=None):
        keys = sequence_keys(dropout_key, state.step, batch) if drops else None
        return step(state, gpt2.Batch(windows, keys, weights))

    return Prepared(state.init, state.shapes, cast("Train", train))


def _weighted(batch: gpt2.Batch, data: Axis) -> gpt2.Batch:
    """The batch with weights whose mean over the tokens of all devices is 1, where it has any."""
    return batch if batch.weights is None else batch._replace(weights=cross_entropy.normalized(batch.weights, data))


REMAT = {
    "none": remat.none,
    "gathers": remat.gathers,
    "attention": remat.none,
    "products": remat.products,
    "block": remat.block,
    "stage": remat.none,
}


DTYPES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}


def accumulated_grad(
    config: gpt2.Config, layout: Layout, specs: PyTree, over: Mapping[str, Axis], loss_scale: Callable[..., Any], compute: Compute
) -> Grad:
    """GPT-2's grad arrow over data x tensor, microbatches one after another: local to data, or scattered once a microbatch."""
    options = _blocks(layout, specs, over["data"], compute.attend, compute.checkpoint or REMAT[layout.remat])
    grad = jax.value_and_grad(loss_scale(functools.partial(gpt2.loss, axis=over["tensor"], **options)))

    def scattering(params, part):
        loss, gradients = grad(params, part)
        return loss, zero.scatter(gradients, over["data"], specs=specs)

    return grads.accumulated(scattering if layout.zero == 2 else grad, microbatches=layout.microbatches)


def pipelined_grad(
    config: gpt2.Config, layout: Layout, specs: PyTree, over: Mapping[str, Axis], loss_scale: Callable[..., Any], compute: Compute
) -> Grad:
    """GPT-2's grad arrow over data x stage x tensor, microbatches one behind another."""
    options = _blocks(layout, specs, over["data"], compute.attend, compute.checkpoint or REMAT[layout.remat])
    enter, stage, head = gpt2.stages(config, over["stage"], over["tensor"], **options)
    shares = pipeline.Shares(gathers=layout.zero == 3)
    if layout.zero == 2:
        shares = pipeline.Shares(functools.partial(zero.scatter, axis=over["data"], specs=specs))
    table, again = compute.schedule or layout.table(), layout.remat == "stage"
    return pipeline.value_and_grad(enter, stage, loss_scale(head), table, over["stage"], remat=again, shares=shares)


def reduced(grad: Grad, layout: Layout, specs: PyTree, over: Mapping[str, Axis]) -> Grad:
    """`grad` joined over tensor (where tokens are split) and data, computed in the layout's precision."""
    if layout.sequence:
        grad = grads.summed(grad, over["tensor"])
    if layout.zero == 3:
        grad = zero.unsharded(grad, over["data"], specs=parts_of(layout, specs).ends)
    if layout.precision in DTYPES:
        grad = precision.mixed(grad, DTYPES[layout.precision])
    if layout.zero in (1, 2):
        return zero.scattered(grad, over["data"], specs=specs)
    return grads.averaged(grad, over["data"])


def _blocks(
    layout: Layout, specs: PyTree, data: Axis, attend: Callable[..., Any], checkpoint: Callable[..., Any]
) -> dict[str, Any]:
    """How the blocks join and what they keep, for `gpt2.loss` and `gpt2.stages`."""
    options: dict[str, Any] = {"checkpoint": checkpoint, "attend": attend}
    if layout.remat == "attention":
        options["attend"] = jax.checkpoint(attend)
    if layout.sequence:
        options["joins"] = sequence.joins
    if layout.zero == 3:
        gather = functools.partial(zero.gathered, specs=parts_of(layout, specs).layer, axis=data)
        again = remat.gathers if checkpoint is remat.none else checkpoint  # or every layer's weights would be kept
        # Two layers in the loop's body: the second's gather waits for nothing that the first computes.
        options |= {"checkpoint": lambda block: again(gather(block)), "unroll": 2}
    return options


def parts_of(layout: Layout, specs: PyTree) -> zero.Parts:
    """The specs of the ends, of a stage and of one layer."""
    return zero.parts(specs, "data", loops=1 if layout.stage == 1 else 2)


def loss_step(
    config: gpt2.Config,
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
    over = along(layout, axes)
    make_model, rule, shared = _model(config, layout, jax.random.key(0), jnp.dtype(jnp.float32))
    shapes = eqx.filter_eval_shape(make_model)
    specs = rules.specs(shapes, shared if layout.zero == 3 else rule, mesh_)
    options = _blocks(layout, specs, over["data"], compute.attend, remat.none)
    if layout.stage == 1:
        loss = functools.partial(gpt2.loss, axis=over["tensor"], **options)
    else:
        stages = gpt2.stages(config, over["stage"], over["tensor"], **options)
        loss = pipeline.value(*stages, compute.schedule or layout.table(), over["stage"])
    if layout.zero == 3:
        loss = zero.gathered(loss, parts_of(layout, specs).ends, over["data"])

    def local(model, batch):
        return over["data"].all_mean(loss(model, _weighted(batch, over["data"])))

    evaluate = mesh.spmd(local, mesh=mesh_, in_specs=(specs, P("data")), out_specs=P())
    return jax.jit(lambda model, windows, weights=None: evaluate(model, gpt2.Batch(windows, None, weights)))


def _model(config: gpt2.Config, layout: Layout, key, dtype) -> tuple[Callable[[], gpt2.GPT2], rules.Rule, rules.Rule]:
    """How the model of a layout is made, its rule, and the rule of what the replicas share (ZeRO)."""
    whole = functools.partial(gpt2.GPT2, config, key=key, dtype=dtype)
    return whole if layout.stage == 1 else lambda: gpt2.chunked(whole(), layout.chunks), *rules_of(layout)


def rules_of(layout: Layout) -> tuple[rules.Rule, rules.Rule]:
    """The rule of a layout's model, and the rule of what the replicas share (ZeRO)."""
    rule = gpt2.rules() if layout.stage == 1 else gpt2.rules(stage="stage")
    if layout.zero == 0:
        return rule, rule
    layers = (0,) if layout.stage == 1 else (0, 1)  # a loop runs over them
    return rule, rules.fsdp("data", size=layout.data, keep={"blocks.**": layers}, inside=rule)


def sequence_keys(key: Key[Array, ""], step: Int[Array, ""], batch: int) -> Key[Array, " batch"]:
    """One random key for each sequence of the global batch at `step`: the same wherever the sequence is computed."""
    fold = functools.partial(jax.random.fold_in, jax.random.fold_in(key, step))
    return jax.vmap(fold)(jnp.arange(batch, dtype=jnp.uint32))


def _check_mesh(layout: Layout, mesh_: Mesh) -> None:
    for name, size in layout.axes.items():
        if mesh_.shape.get(name) != size:
            raise ValueError(
                f"decoder: the layout has {name}={size}, and the mesh {dict(mesh_.shape)}. Make it with mesh.make(**layout.axes)."
            )
