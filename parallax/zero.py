"""ZeRO: the optimizer's state, the gradients and the parameters themselves split over the replicas, which would each hold all.

n devices of the axis split the batch. Where plain data parallelism all-reduces every gradient and keeps n equal copies, here

    ZeRO-1   `reduce_scattered` round `accumulated`, and `sharded` optimizer      state 1/n
    ZeRO-2   `accumulated` round `reduce_scattered`, and `sharded` optimizer      state and sums of gradients 1/n
    ZeRO-3   `gathered` blocks, `gathered_once` rest, round it `averaged`      state, gradients and parameters 1/n

The first moves what data parallelism moves, 2 (n - 1)/n of the parameters' bytes a step, as one reduce-scatter and one
all-gather; the second scatters once a microbatch; the third gathers twice (again in the backward pass) and scatters once a
microbatch.

Which dim of a leaf is split is told by a tree of specs, as `rules.specs` makes with `rules.fsdp`: the dim whose entry names
the axis. A leaf without one stays whole (`rules.explain` says why) and is all-reduced. Sums are taken in float32 or wider.
With a tuple of axes each leaf is scattered over those that its spec names, summed over the others, and left alone along
those that split the parameter itself (experts); a mean divides by the size of all of them.

`ZeRO` says it once: of a stage, an axis and the model's rule it makes all of these, which must agree.

Source: Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models (arXiv 1910.02054).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from parallax import elementwise, grads, remat, rules, trees
from parallax.collectives.axis import Axis, AxisLike
from parallax.collectives.cpu import ordered
from parallax.collectives.types import linear, replicated, varying_axes, wide
from parallax.grads import (
    Grad,
    axes_of,
    copied,
    local,
    loss_of,
    map_loss_and_aux,
    matching_parameters,
    mean_of_devices,
    replicated_axes,
    summed_over,
)
from parallax.typed import PyTree, Rule, Specs


class Split(NamedTuple):
    """A dim of a leaf, and the axes that split it."""

    dim: int
    axis: Axis


def reduce_scattered(
    grad: Grad,
    axis: AxisLike,
    specs: Specs,
    *,
    aux: Callable[[Any, Axis], Any] = mean_of_devices,
) -> Grad:
    """The mean of `grad` over the devices of `axis`, of which each keeps its share: `A[I] {U_X} -> A[I_X]`.

    (n - 1)/n of the parameters' bytes move, half of what `grads.averaged` moves. Leaves that stay whole are all-reduced, as is
    the loss. Gradients that `reduce_scatter` has split inside `grad` already are divided only.

    Args:
        grad: a grad arrow.
        axis: the axis, or the axes, that split the batch.
        specs: of the shares, a tree like the parameters, as `rules.specs(model, rules.fsdp(axis, size=n))` makes it.
        aux: as in `grads.averaged`.

    Raises:
        ValueError: a dim of `specs` is split over `axis` and, inside that, over another axis.
    """
    axis = Axis.of(axis)

    def wrapped(params, batch):
        n, found = axis.size(), trees.by_path(specs)
        _, *own_values = local(grad, params, batch, axis, loss=True)
        value, gradients = ordered(own_values, own_values)
        weights = matching_parameters(gradients, params)
        splits = lambda path, weight: splits_of(path, found, axis.over(copied(weight, axis)))

        def own(path, gradient, weight):
            return _wide(_scatter(gradient, splits(path, weight)) if gradient.shape == weight.shape else gradient)

        def rest(path, weight):
            done = {name for split in splits(path, weight) for name in axes_of(split.axis)}
            return tuple(name for name in copied(weight, axis) if name not in done)

        shares = jax.tree.map_with_path(own, gradients, weights)
        total, sums = summed_over(
            (loss_of(value), shares), (axes_of(axis), jax.tree.map_with_path(rest, weights)), axis, after=shares
        )
        value = map_loss_and_aux(value, lambda _: total / n, lambda values: aux(ordered(values, (total, sums)), axis))
        return value, jax.tree.map(lambda g: g / n, sums)

    return wrapped


def reduce_scatter(gradients: PyTree, axis: AxisLike, specs: Specs) -> PyTree:
    """The sums of `gradients` over `axis`, of which each device keeps its share; leaves that stay whole are left local.

    It is the half of `reduce_scattered` that goes into `pipeline.value_and_grad(scatter=...)`, with `reduce_scattered` round
    it. `axis` is that of the shares alone: an axis along which a parameter is split itself, such as
    that of experts, is not one of them.
    """
    axis = Axis.of(axis)
    found = trees.by_path(specs)
    return jax.tree.map_with_path(lambda path, g: _scatter(g, splits_of(path, found, axis)), gradients)


def sharded(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    axis: AxisLike,
    specs: Specs,
) -> optax.GradientTransformationExtraArgs:
    """`optimizer` with 1/n of its state and its work on each device: ZeRO-1 and 2, for any that acts element by element.

    Its `update` takes each device's share of the gradients (from `reduce_scattered`), updates that share of the parameters, and
    gathers the updates: (n - 1)/n of the parameters' bytes. Local gradients of full shape it first averages and scatters itself,
    and of gradients averaged already it takes its share. Its `init`, inside the map, gives the share of the state; outside, where
    arrays are global, the whole, to be placed by `rules.optimizer_specs(optimizer, params, specs)`.

    Arguments are those of `reduce_scattered`. An optimizer that looks at more than one element at a time would see the
    shares alone, and is refused: wrap it in `optimizers.whole` or `optimizers.by_matrix` instead. Clip in `step.make` or
    `grads.clipped`, which know shares from wholes.

    Raises:
        ValueError: `update` is called without the parameters; or the optimizer mixes the elements of a leaf that is split.
    """

    axis, optimizer = Axis.of(axis), elementwise.with_extra(optimizer)

    def own_splits(params):
        found = trees.by_path(specs)
        return lambda path, weight: splits_of(path, found, axis.over(replicated_axes(weight, axis)))

    def shares(weights, splits):
        return jax.tree.map_with_path(lambda path, w: share(w, splits(path, w)), weights)

    def init(params):
        weights = eqx.filter(params, trees.is_inexact)
        return optimizer.init(shares(weights, own_splits(params)) if inside(axis) else weights)

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("zero.sharded: update needs the parameters, whose shapes tell shares from wholes. Pass params.")
        splits, weights = own_splits(params), matching_parameters(updates, params)
        if elementwise.COMPARES.get():
            return elementwise.right((weights, state))

        def own(path, gradient, weight):
            if gradient.shape != weight.shape:
                return gradient
            local = [name for name in replicated_axes(weight, axis) if name in varying_axes(gradient)]
            if not local:
                return share(gradient, splits(path, weight))
            gradient, left = _wide(gradient), set(local)
            for dim, part in splits(path, weight):
                if left >= set(axes_of(part)):
                    gradient, left = _scatter(gradient, [Split(dim, part)]), left - set(axes_of(part))
                else:
                    over = part.over(tuple(left))
                    gradient = share(over.all_reduce(gradient) if over.names else gradient, [Split(dim, part)])
                    left -= set(axes_of(over))
            over = axis.over(tuple(name for name in axes_of(axis) if name in left))
            total = over.all_reduce(gradient) if over.names else gradient
            return total / axis.over((*local, *(name for name in axes_of(axis) if name in varying_axes(weight)))).size()

        def whole(path, share, weight):
            for dim, part in splits(path, weight):
                share = replicated(part.all_gather(share, axis=dim, tiled=True), part.names)
            return share

        own_gradients, own_weights = jax.tree.map_with_path(own, updates, weights), shares(weights, splits)
        _check_state(optimizer, state, own_weights, weights)
        one = lambda g, s, w: optimizer.update(g, s, w, **extra)
        wholes = elementwise.wholes(weights, trees.by_path(specs))
        elementwise.check(one, own_gradients, state, own_weights, wholes=wholes, at="zero.sharded")
        shared, state = one(own_gradients, state, own_weights)
        return elementwise.right((jax.tree.map_with_path(whole, shared, weights), state))

    return optax.GradientTransformationExtraArgs(init, update)


def _check_state(optimizer: optax.GradientTransformation, state: PyTree, shares: PyTree, weights: PyTree) -> None:
    """Refuse the state of whole weights where that of shares is needed."""
    shapes = lambda tree: [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)]
    made_of = lambda tree: shapes(jax.eval_shape(optimizer.init, tree))
    if shapes(state) not in (made_of(shares), []) and shapes(state) == made_of(weights):
        raise ValueError(
            "zero.sharded: the optimizer's state is that of whole parameters, and each device needs that of its shares. Give "
            "step.init the rule of the shares, optimizer_rule=rules.fsdp(axis, size=n) or ZeRO.optimizer_rule, or make the state "
            "by this optimizer's own init inside the map."
        )


def gathered(
    function: Callable[..., Any],
    axis: AxisLike,
    specs: Specs,
) -> Callable[..., Any]:
    """`function(params, ...)` of parameters that live as shares: gathered before it, their gradients scattered after it. ZeRO-3.

    `A[I_X] -> A[I]` for each leaf that `specs` split over `axis`; the gradient is the reduce-scattered sum. Round a block
    that a loop runs, it gathers layer by layer; with `remat.gathers` or another of `remat` round it, again in the backward
    pass, so that no gathered layer is kept:

        again = lambda block: remat.gathers(zero.gathered(block, "data", block_specs))

    Args:
        function: a loss arrow, or a block; its first argument is the tree of parameters.
        specs: of the shares, a tree like that argument.
        axis: the axis that splits the batch.

    Raises:
        ValueError: a dim is split over `axis` and, inside that, over another axis: then what is gathered is not one block.
    """

    def wrapped(params, *arguments):
        return function(_wholes(params, Axis.of(axis), specs), *arguments)

    return wrapped


def gathered_once(
    grad: Grad,
    axis: AxisLike,
    specs: Specs,
) -> Grad:
    """`grad` of parameters that live as shares: gathered once before it, their gradients summed and scattered after it.

    For what is needed in all microbatches and too small to be gathered in each, such as embeddings beside `gathered` blocks.
    Leaves whose spec is None or does not name `axis` pass as they are. Wrap it in `grads.averaged`.
    """

    axis = Axis.of(axis)

    def wrapped(params, batch):
        wholes, found = _wholes(params, axis, specs), trees.by_path(specs)
        gathered = jax.tree.map_with_path(lambda path, x: x if splits_of(path, found, axis) else None, wholes)
        local = grad(eqx.combine(ordered(gathered, gathered), wholes), batch)
        value, gradients = ordered(local, local)
        return value, reduce_scatter(gradients, axis, specs)

    return wrapped


class PartSpecs(NamedTuple):
    """The specs that the parts of a model need whose parameters live as shares.

    Attributes:
        ends: of what is needed in all microbatches, with None for the blocks: for `gathered_once`, or `gathered` round the loss.
        stage: of the blocks as a stage of a pipeline sees them, [layers, ...]; without a pipeline, as the model has them.
        layer: of one layer: for `gathered` round the block that a loop runs.
    """

    ends: Specs
    stage: Specs
    layer: Specs


def part_specs(
    specs: Specs, axis: AxisLike, *, blocks: Callable[[Any], Any] = lambda specs: specs.blocks, loops: int = 1
) -> PartSpecs:
    """The specs for `gathered_once` and `gathered` from those of the whole model, whose blocks are stacked.

    Args:
        specs: of the model, as `rules.specs` gives them.
        axis: the axis of the shares.
        blocks: picks the blocks.
        loops: how many first dims of the blocks' arrays are looped over: 1, the layers, or 2, the chunks and layers of a
            pipeline.

    Raises:
        ValueError: a dim that is looped over is split over `axis`: each device would run some of the layers.
    """
    names = set(axes_of(Axis.of(axis)))

    def without(count):
        def inner(path, spec):
            split = [dim for dim, entry in enumerate(spec[:count]) if names & set(trees.entry_axes(entry))]
            if split:
                raise ValueError(
                    f"zero.part_specs: dim {split[0]} of {trees.dotted(path) or 'the blocks'}, which is looped over, is split "
                    f"over {axis!r} by {spec}, so each device would run some of the layers. Spare it: "
                    f"rules.fsdp(..., keep={{'blocks.**': {tuple(range(loops))}}})."
                )
            return PartitionSpec(*spec[count:])

        return jax.tree.map_with_path(inner, blocks(specs), is_leaf=trees.is_spec)

    ends = eqx.tree_at(blocks, specs, None, is_leaf=trees.is_spec)
    return PartSpecs(ends, stage=without(loops - 1), layer=without(loops))


def splits_of(path: Sequence[Any], specs: dict[str, PartitionSpec], axis: Axis) -> list[Split]:
    """The dims of the leaf at `path` that `axis` splits, each with those of the axes that do."""
    found = []
    for dim, entry in enumerate(specs.get(trees.dotted(path), ())):
        names = trees.entry_axes(entry)
        own = tuple(name for name in names if name in axes_of(axis))
        if own and names[-len(own) :] != own:
            inner = tuple(name for name in names if name not in own)
            raise ValueError(
                f"zero: dim {dim} of {trees.dotted(path) or 'the leaf'} is split over {names!r}, the last of them innermost, and "
                f"gathered or scattered over {own!r}. A device's blocks would not lie one after another. Name those axes last, "
                f"{(*inner, *own)!r}, or split another dim over them."
            )
        if own:
            found.append(Split(dim, axis.over(own)))
    return found


def _wholes(params: PyTree, axis: Axis, specs: Specs) -> PyTree:
    axis.size()  # refuses an axis that is not there
    found = trees.by_path(specs)

    def whole(path, x):
        for dim, part in splits_of(path, found, axis):
            x = linear(
                x,
                forward=lambda x, dim=dim, part=part: part.all_gather(x, axis=dim, tiled=True),
                backward=lambda ct, dim=dim, part=part: _scatter(ct, [Split(dim, part)]).astype(ct.dtype),
                name=remat.GATHERED,
            )
        return x

    return jax.tree.map_with_path(whole, params)


def _scatter(x: Array, splits: Sequence[Split]) -> Array:
    """The sum over devices, in a wide type, of which each keeps its share: `A[I] {U_X} -> A[I_X]`; without splits, `x`."""
    for dim, axis in splits:
        x = axis.reduce_scatter(_wide(x), scatter_dimension=dim, tiled=True)
    return x


def _wide(x: Array) -> Array:
    return x.astype(wide(x.dtype))


def share(x: Array, splits: Sequence[Split]) -> Array:
    """This device's share of `x`, which all devices have whole: `A[I] -> A[I_X]`."""
    for dim, axis in splits:
        share = x.shape[dim] // axis.size()
        x = lax.dynamic_slice_in_dim(x, axis.index() * share, share, dim)
    return x


def inside(axis: Axis) -> bool:
    """Whether this runs inside a map over the axis, on blocks, and not outside, on global arrays."""
    try:
        lax.axis_size(axis.names)
    except NameError:
        return False
    return True


@dataclass(frozen=True, eq=False)
class ZeRO:
    """ZeRO said once: its stage, the axis of the replicas and the model's own rule, and all that must agree follows from them.

        sharing = zero.ZeRO(1, ring("data"), rule, eqx.filter_eval_shape(make_model), devices)
        state, specs = step.init(make_model, optimizer, sharing.rule, devices, optimizer_rule=sharing.optimizer_rule)
        grad = sharing.grad(eqx.filter_value_and_grad(sharing.loss(loss)))
        train = step.make(grad, sharing.optimizer(optimizer))

    Args:
        stage: 1, 2 or 3.
        axis: the axis, or the axes, that split the batch.
        inside: the rule of the model without ZeRO, such as `tensor.rule(model)` and P() for what that does not know.
        model: its arrays or their shapes, all of them whole.
        mesh: the mesh that the step runs on.
        min_size: leaves of fewer elements stay whole, as in `rules.fsdp`.
        keep: dims that are not split, as in `rules.fsdp`.

    Attributes:
        optimizer_rule: where the optimizer's state lives, for `step.init`: the rule of the shares.
        specs: of the shares, a tree like the model, for the functions of this module.

    Raises:
        ValueError: there is no such stage, or no such axis in the mesh; or as `rules.specs` does.
    """

    stage: int
    axis: AxisLike
    inside: Rule
    model: PyTree
    mesh: trees.AnyMesh
    min_size: int = field(default=2**10, kw_only=True)
    keep: Mapping[str, Sequence[int]] = field(default_factory=dict, kw_only=True)
    optimizer_rule: Rule = field(init=False)
    specs: Specs = field(init=False)

    def __post_init__(self):
        names = axes_of(Axis.of(self.axis))
        if self.stage not in (1, 2, 3):
            raise ValueError(f"ZeRO has the stages 1, 2 and 3; got stage={self.stage!r}. Data parallelism is grads.averaged.")
        if strange := [name for name in names if name not in self.mesh.shape]:
            raise ValueError(
                f"ZeRO over {strange[0]!r} needs that axis, and the mesh has {dict(self.mesh.shape)}. Use one of those."
            )
        size = math.prod(self.mesh.shape[name] for name in names)
        over = names[0] if len(names) == 1 else names
        shares = rules.fsdp(over, size=size, min_size=self.min_size, keep=self.keep, inside=self.inside)
        object.__setattr__(self, "optimizer_rule", shares)
        object.__setattr__(self, "specs", rules.specs(self.model, shares, self.mesh, batch_axes=names))

    @property
    def rule(self) -> Rule:
        """Where the parameters live, for `step.init`: in stage 3 as shares, otherwise as `inside` says."""
        return self.optimizer_rule if self.stage == 3 else self.inside

    def loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """`loss` of the parameters as they live: in stage 3 gathered before it, otherwise as they are."""
        return self._checked(gathered(loss, self.axis, self.specs), "loss") if self.stage == 3 else loss

    def grad(self, grad: Grad, *, microbatches: int = 1) -> Grad:
        """The mean of `grad` over microbatches and over the devices of the axis, of which each keeps its share.

        In stage 2 each microbatch's gradients are scattered before they are added up, in stage 1 their sum is.
        """

        def scattered_grad(params, batch):
            value, gradients = grad(params, batch)
            return value, reduce_scatter(gradients, self.axis, self.specs)

        grads.refuse_clipped(grad, "ZeRO.grad", "the gradients of one device")
        accumulated = grads.accumulated(scattered_grad if self.stage == 2 else grad, microbatches=microbatches)
        if self.stage == 3:
            return self._checked(grads.averaged(accumulated, self.axis), "grad")
        return self._checked(reduce_scattered(accumulated, self.axis, self.specs), "grad")

    def optimizer(
        self, optimizer: optax.GradientTransformation | optax.MultiSteps
    ) -> optax.GradientTransformation | optax.MultiSteps:
        """`optimizer` on the shares; in stage 3 they are all that it sees, so it stays as it is."""
        return optimizer if self.stage == 3 else sharded(optimizer, self.axis, self.specs)

    def _checked(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`function(params, ...)`, which refuses parameters that do not live as `rule` says."""
        specs = trees.by_path(rules.specs(self.model, self.rule, self.mesh))
        shapes = {
            trees.dotted(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(eqx.filter(self.model, trees.is_array))
        }

        def check(path, leaf):
            at = trees.dotted(path)
            if at not in shapes:
                raise ValueError(
                    f"ZeRO.{name}: the parameters have a leaf {at!r}, and the model that ZeRO was given has none. Give it the "
                    "shapes of the model that is trained."
                )
            needed = NamedSharding(self.mesh, specs[at]).shard_shape(shapes[at])
            if leaf.shape != needed:
                raise ValueError(
                    f"ZeRO.{name}: in stage {self.stage} a device has {needed} of {at or 'the parameter'}, {shapes[at]} as a "
                    f"whole, by {specs[at]}; got {leaf.shape}. Give step.init this object's rule, ZeRO.rule, and run the step on "
                    f"its mesh, {dict(self.mesh.shape)}."
                )

        def wrapped(params, *arguments):
            for path, leaf in jax.tree.leaves_with_path(eqx.filter(params, trees.is_inexact)):
                check(path, leaf)
            return function(params, *arguments)

        return wrapped
