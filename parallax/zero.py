"""ZeRO: the replicas split the optimizer's state, the gradients and the parameters.

The n devices of an axis split the batch. Plain data parallelism all-reduces every gradient and
keeps n equal copies of everything. Here each device keeps only a share, 1/n:

    stage   share of            gradient function                           optimizer
    ZeRO-1  optimizer's state   reduce_scattered(accumulated(grad))         sharded(optimizer)
    ZeRO-2  also gradients      accumulated(reduce_scattered(grad))         sharded(optimizer)
    ZeRO-3  also parameters     averaged(gathered_once(accumulated(grad)))  optimizer

`accumulated` and `averaged` are in the module `grads`. In ZeRO-3 the loss wraps its blocks in
`gathered`, and `gathered_once` gathers all other parameters.

ZeRO-1 sends as many bytes as data parallelism: over n devices, 2 (n - 1)/n of the parameters' bytes
per step, by one reduce-scatter and one all-gather. ZeRO-2 scatters once per microbatch. In each
microbatch, ZeRO-3 gathers the blocks in the forward pass and (with `remat.gathers`) again in the
backward pass, and scatters the blocks' gradients once.

A tree of specs, as `rules.specs` makes with `rules.fsdp`, says which dim of each leaf is split: the
entry of this dim in the spec names the axis. A leaf without such a dim stays whole (`rules.explain`
says why), and its gradient is all-reduced. `A[I_X]` is split over the axis X. `{U_X}` after an
array says that the array on each device is one term of a sum over X. Sums are taken in float32 or
wider. With a tuple of axes each gradient is scattered over the axes that its leaf's spec names, and
summed over the other axes. Over an axis that splits the parameter even without ZeRO, such as the
experts' axis, the gradient is neither scattered nor summed. A mean divides by the product of the
sizes of all axes of the tuple. `splits_of(path, by_path, axis)` takes the spec of a leaf from the
dict `by_path`. It returns one `Split` for each dim that is split over axes in `axis`: the dim, and
those axes. `sequence_after(x, y)` is `x`; on a CPU each array of `x` waits for all of `y`, so that
all devices send in one order. Otherwise the devices could wait for each other forever.

The functions of this module that are used together must get the same axis and specs. The class
`ZeRO` makes all these functions, from a stage, an axis and the model's sharding rule.

Source: Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models
(arXiv 1910.02054).
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import equinox as eqx
import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from parallax import grads, remat, rules, shards, trees
from parallax._typing import PyTree, Rule, Specs
from parallax.collectives.axis import Axis, AxisLike
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import accumulation_dtype, linear, varying_axes
from parallax.grads import Grad, mean_over_devices
from parallax.grads.axes import axes_of, replicated_axes
from parallax.grads.devices import value_and_sums
from parallax.grads.local import local_gradients
from parallax.optimizers.elementwise import checked, with_extra
from parallax.optimizers.programs import right_on_shards
from parallax.shards import Split, splits_of


def reduce_scattered(
    grad: Grad,
    axis: AxisLike,
    specs: Specs,
    *,
    aux: Callable[[Any, Axis], Any] = mean_over_devices,
) -> Grad:
    """Returns a gradient function for the mean of `grad` over the devices of `axis`. Each device
    keeps one share of the gradients: `A[I] {U_X} -> A[I_X]`. `{U_X}` says that `A` on each device
    is one term of a sum over X, and `A[I_X]` is split over X.

    Each of the n devices sends (n - 1)/n of the parameters' bytes, half as many as in
    `grads.averaged`. The gradients of leaves that stay whole are all-reduced, and so is the loss.
    `grad` may return gradients that `zero.reduce_scatter` has already scattered, as in a pipeline.
    These gradients are divided by n, but not scattered again.

    Args:
        grad: a gradient function.
        axis: the axis, or the axes, that split the batch.
        specs: the specs of the shares, a tree like the parameters, as
            `rules.specs(model, rules.fsdp(axis, size=n))` makes it.
        aux: a function `(values, axis)` that combines the auxiliary values of the devices, as in
            `grads.averaged`.

    Raises:
        ValueError: a spec splits a dim over `axis` first, and then over another axis, as
            `("data", "tensor")` does if `axis` is "data".
    """
    axis, by_path = Axis.of(axis), trees.by_path(specs)

    # `value_and_sums` also passes this device's own gradient, `term`, so that a result can take the
    # dtype of `term`. This mean stays in float32 or wider instead.
    def mean(total, term):
        return total / axis.size()

    def scatter(value, gradients, params, names):
        """Scatters the gradients; `names` has for each leaf the axes over which its gradient is to
        be summed.

        Returns the value (the loss, or loss and aux), the shares of the gradients, and for each
        leaf the axes over which its gradient must still be summed.
        """

        # The splits of a leaf over the axes over which it is summed. An axis that splits the
        # parameter itself, such as the experts' axis, is not among these axes: along it no sum is
        # left to take.
        def splits_of_leaf(path, gradient, names):
            return splits_of(path, by_path, axis.over(names))

        def scattered(gradient, param, splits):
            """Returns this device's share of one gradient, in float32 or wider. Without splits,
            the gradient is not summed here: `value_and_sums` all-reduces it later."""
            # A gradient that does not have the parameter's shape was already scattered inside
            # `grad`: a pipeline whose argument `scatter` is `zero.reduce_scatter` scatters once in
            # each microbatch (ZeRO-2). `shards.reduce_scatter` sums in float32 or wider; the cast
            # after it is for gradients that are not scattered here.
            if gradient.shape == param.shape:
                gradient = shards.reduce_scatter(gradient, splits)
            return gradient.astype(accumulation_dtype(gradient.dtype))

        def names_left(gradient, names, splits):
            """Returns the axes over which this gradient must still be summed: those along which
            it was scattered neither by `scattered` nor inside `grad`."""
            done = shards.names_of(splits)
            return tuple(name for name in names if name not in done)

        # All arrays wait for each other before the first reduce-scatter. Otherwise devices on a CPU
        # could begin with different leaves, and wait for each other forever.
        value, gradients = sequence_after((value, gradients), (value, gradients))
        splits = jax.tree.map_with_path(splits_of_leaf, gradients, names)
        shares = jax.tree.map(scattered, gradients, params, splits)
        return value, shares, jax.tree.map(names_left, gradients, names, splits)

    def wrapped(params, batch):
        # `local` has this device's value and gradients, and the parameters. `value_and_sums` finds
        # the axes over which each gradient is to be summed, calls `scatter` with them (`names`),
        # and all-reduces over the axes that `scatter` returns.
        local = local_gradients(grad, params, batch, axis)
        return value_and_sums(local, axis, mean, aux=aux, scatter=scatter)

    return wrapped


def reduce_scatter(gradients: PyTree, axis: AxisLike, specs: Specs) -> PyTree:
    """Returns this device's shares of the sums of `gradients` over `axis`; leaves that stay whole
    are returned unchanged, not summed.

    Pass `reduce_scatter` to `pipeline.value_and_grad(scatter=...)`, and wrap the resulting gradient
    function in `reduce_scattered`. `reduce_scattered` recognises shares by their shape, sums the
    leaves that stay whole, and divides all gradients by the number of devices. `specs` must not
    have the splits over `axis` that the parameters have without ZeRO, such as that of experts:
    along these, gradients are split already. In a pipeline, pass the specs of the whole model: the
    gradients of its blocks have the first dim of the blocks, the dim of chunks.

    Raises:
        ValueError: the size of a dim is not a multiple of the number of devices that split it.
    """
    axis, by_path = Axis.of(axis), trees.by_path(specs)

    def share(path, gradient):
        splits = splits_of(path, by_path, axis)
        for dim, over in splits:
            if dim >= gradient.ndim or gradient.shape[dim] % over.size():
                raise ValueError(
                    f"zero.reduce_scatter: the spec of {trees.dotted(path)} splits dim {dim} over "
                    f"the {over.size()} devices of {' x '.join(over.names)}, but its gradient has "
                    f"shape {gradient.shape}. Pass the specs of the whole model. In a pipeline, "
                    "blocks have a first dim of chunks."
                )
        return shards.reduce_scatter(gradient, splits)

    return jax.tree.map_with_path(share, gradients)


def sharded(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    axis: AxisLike,
    specs: Specs,
) -> optax.GradientTransformationExtraArgs:
    """Returns `optimizer` with 1/n of the state and of the work on each of the n devices: ZeRO-1
    and 2, for an optimizer that acts element by element.

    The returned `update` takes each device's share of the gradients (from `reduce_scattered`),
    computes the updates of the same share of the parameters, and gathers these updates. Each of the
    n devices sends (n - 1)/n of the parameters' bytes. `update` also takes gradients of full shape:
    it averages and scatters them itself, or, if they are the same on all devices, takes them for
    averaged, and only cuts out the device's share. Plain `jax.grad` of replicated parameters gives
    sums over the devices instead: wrap it in `grads.averaged` first. Inside `shard_map`, the
    returned `init` makes the device's share of the state. Outside, where arrays are global, `init`
    returns the whole state; `rules.optimizer_specs(optimizer, params, specs)` gives its specs.

    `axis` has the axes that split the batch, and `specs` are the specs of the shares. An optimizer
    that combines elements of a gradient, as by a norm, would see only the elements of a share, so
    `sharded` refuses it: wrap such an optimizer in `optimizers.whole` or `optimizers.by_matrix`
    instead. Clip in `step.make` or `grads.clipped`, which take the norm over all shares.

    Raises:
        ValueError: `update` is called without the parameters; or the optimizer mixes the elements
            of a leaf that is split.
    """

    axis, optimizer, by_path = Axis.of(axis), with_extra(optimizer), trees.by_path(specs)
    # Refuses an optimizer that does not act element by element.
    update_shares = checked(optimizer.update, by_path, at="zero.sharded")

    # The splits of a leaf into shares. An axis that splits the parameter itself, such as the
    # experts' axis, is left out.
    def splits(path, weight):
        return splits_of(path, by_path, axis.over(replicated_axes(weight, axis)))

    def share(path, weight):
        return shards.take(weight, splits(path, weight))

    def gradient_share(path, gradient, weight):
        """Returns this device's share of one gradient, averaged over the devices."""
        if gradient.shape != weight.shape:  # already a share, from `reduce_scattered`
            return gradient
        # The axes along which the devices have the same parameter and different gradients.
        local = set(replicated_axes(weight, axis)) & set(varying_axes(gradient))
        # If there are none, the gradient is averaged already: no device needs to send anything.
        if not local:
            return share(path, gradient)
        return _mean_share(gradient, weight, splits(path, weight), axis, local)

    def whole(path, update, weight):
        return shards.gather(update, splits(path, weight))

    def init(params):
        """Returns the optimizer's state for this device's shares; outside a map over `axis`, the
        state for the whole leaves."""
        # Outside a map the arrays are global, so the state is whole, and `rules.optimizer_specs`
        # gives the specs that split it.
        weights = eqx.filter(params, trees.is_inexact)
        return optimizer.init(
            jax.tree.map_with_path(share, weights) if shards.runs_over(axis) else weights
        )

    def update(updates, state, weights, **extra):
        """Returns the updates of whole leaves, and the state for this device's shares. The argument
        `updates` has the gradients, as in optax.
        Only this device's shares are updated, by `update_shares`, and then the updates are
        gathered.
        """
        gradients = jax.tree.map_with_path(gradient_share, updates, weights)
        weight_shares = jax.tree.map_with_path(share, weights)
        updates, state = update_shares(gradients, state, weight_shares, **extra)
        return jax.tree.map_with_path(whole, updates, weights), state

    # Marked as right for the check of `step.make`: `update_shares` has its own check.
    checked_update = right_on_shards(update, at="zero.sharded")
    return optax.GradientTransformationExtraArgs(init, checked_update)


def _mean_share(
    gradient: Array, weight: Array, splits: Sequence[Split], axis: Axis, local: set[str]
) -> Array:
    """Returns this device's share of the mean of `gradient`. The shapes of `gradient` and of its
    parameter, `weight`, are equal. `local` are those axes along which all devices have the same
    parameter and different gradients. `splits` are the splits into shares."""
    # The devices have different terms only along the axes in `local`. These terms are summed by a
    # reduce-scatter along the splits over such axes, and by an all-reduce along the other axes in
    # `local`.
    scattered = [split for split in splits if shards.names_of([split]) <= local]
    gradient = shards.reduce_scatter(gradient.astype(accumulation_dtype(gradient.dtype)), scattered)
    summed = axis.over(
        tuple(name for name in axes_of(axis) if name in local - shards.names_of(scattered))
    )
    total = summed.all_reduce(gradient) if summed.names else gradient
    # Along the other splits all devices have the same gradient, so each device cuts its share out
    # of that gradient.
    total = shards.take(total, [split for split in splits if split not in scattered])
    # To get the mean, a sum is divided by the number of devices. Along `local` the sum was taken
    # above. Along axes on which the parameter itself varies, such as the experts' axis, the
    # gradient came as a sum. Along any other axis all devices have the same gradient, which is
    # already a mean. `over` keeps only the names in `axis`.
    return total / axis.over((*local, *varying_axes(weight))).size()


def gathered(
    function: Callable[..., Any],
    axis: AxisLike,
    specs: Specs,
) -> Callable[..., Any]:
    """Returns `function(params, ...)` for parameters that are stored as shares: the parameters are
    gathered before the function, and their gradients are scattered after it. This is ZeRO-3.

    Each leaf that `specs` split over `axis` is gathered, `A[I_X] -> A[I]`; the gradient of such a
    leaf is the sum of the devices' gradients, reduce-scattered. If `gathered` wraps a block that a
    loop runs, one layer at a time is gathered. Wrap the result in `remat.gathers`, or in another
    policy of `remat`, to gather again in the backward pass, so that no gathered layer is kept:

        again = lambda block: remat.gathers(zero.gathered(block, "data", block_specs))

    Args:
        function: a loss function, or a block; its first argument is the tree of parameters.
        axis: the axis, or the axes, that split the batch.
        specs: the specs of the shares, a tree like the function's first argument. Leave out
            splits that must stay inside `function`, such as the split of experts over `axis`.

    Raises:
        ValueError: a spec splits a dim over `axis` first, and then over another axis, as
            `("data", "tensor")` does if `axis` is "data". Then the blocks that one gather joins
            would not be neighbours in the whole leaf. Or `specs` has splits over `axis`, but only
            at paths that the parameters lack.
    """

    axis, by_path = Axis.of(axis), trees.by_path(specs)

    def wrapped(params, *arguments):
        return function(_wholes(params, axis, by_path), *arguments)

    return wrapped


def gathered_once(
    grad: Grad,
    axis: AxisLike,
    specs: Specs,
) -> Grad:
    """Returns `grad` for parameters that are stored as shares: the parameters are gathered once
    before `grad`, and their gradients are summed and scattered after it.

    Use it for parameters that all microbatches need, and that are so small that their whole leaves
    can be kept instead of being gathered again in each microbatch. An example is the embeddings of
    a model whose blocks use `gathered`. Leaves whose spec is None or does not name `axis` are
    passed unchanged, and so are their gradients. Wrap the result in `grads.averaged`, which sums
    the gradients of the unchanged leaves, and divides all gradients by the number of devices.
    """

    axis, by_path = Axis.of(axis), trees.by_path(specs)

    def wrapped(params, batch):
        """Returns `(value, gradients)`. The gradients of split leaves are shares, summed over
        `axis`; the gradients of whole leaves are those of this device."""

        # Only gathered leaves wait for each other: whole leaves need not wait for the gathers.
        def only_split(path, x):
            return x if splits_of(path, by_path, axis) else None

        wholes = _wholes(params, axis, by_path)
        gathered = jax.tree.map_with_path(only_split, wholes)
        # `sequence_after(x, x)` makes each array wait for all. So a value that `grad` computes from
        # a gathered leaf waits for all gathers, since `grad` may send too. `combine` takes whole
        # leaves from `wholes`.
        results = grad(eqx.combine(sequence_after(gathered, gathered), wholes), batch)
        # The reduce-scatters wait for all results of `grad`, so that all devices send in one order.
        value, gradients = sequence_after(results, results)
        return value, reduce_scatter(gradients, axis, specs)

    return wrapped


class PartSpecs(NamedTuple):
    """Specs for the parts of a model whose parameters are stored as shares.

    Attributes:
        ends: the specs of the model, with None in place of the blocks. They are for
            `gathered_once`, or for `gathered` around the loss.
        stage: the specs of the blocks of a pipeline stage, whose arrays are [layers, ...]; without
            a pipeline, the specs of the model's blocks.
        layer: the specs of one layer, for `gathered` around the block that a loop runs.
    """

    ends: Specs
    stage: Specs
    layer: Specs


def part_specs(
    specs: Specs,
    axis: AxisLike,
    *,
    blocks: Callable[[Any], Any] = lambda specs: specs.blocks,
    loops: int = 1,
) -> PartSpecs:
    """Returns three trees of specs, from the specs of a whole model whose blocks are stacked.
    `ends` is for `gathered_once`: the specs of the model (embeddings, head), with None in place of
    the blocks. `layer` has the specs of one block, for `gathered`; `stage` has the specs of a
    pipeline stage's blocks.

    Args:
        specs: the specs of the model, as `rules.specs` gives them.
        axis: the axis of the shares.
        blocks: a function that takes the model, or a tree like it, and returns its blocks.
        loops: the number of leading dims of the blocks' arrays that are looped over: 1 for the
            layers, or 2 for the chunks and layers of a pipeline.

    Raises:
        ValueError: a dim that is looped over is split over `axis`: each device would run only some
            of the layers.
    """
    names = set(axes_of(Axis.of(axis)))

    def without(count):
        """Returns the specs of the blocks without their first `count` dims."""

        def inner(path, spec):
            """Returns the spec of one leaf without its first `count` dims; raises `ValueError` if
            one of these dims is split over the axes `names`."""
            split = [
                dim
                for dim, entry in enumerate(spec[:count])
                if names & set(trees.entry_axes(entry))
            ]
            # The cure in the message is to keep all looped dims whole, not only the first `count`.
            # Its pattern, 'blocks.**', is that of the default `blocks`.
            if split:
                raise ValueError(
                    f"zero.part_specs: dim {split[0]} of {trees.dotted(path) or 'the blocks'}, "
                    f"which is looped over, is split over {axis!r} by {spec}, so each device would "
                    "run only some of the layers. Keep it whole: rules.fsdp(..., "
                    f"keep={{'blocks.**': {tuple(range(loops))}}})."
                )
            return PartitionSpec(*spec[count:])

        return jax.tree.map_with_path(inner, blocks(specs))

    ends = eqx.tree_at(blocks, specs, None)
    # A stage gets one chunk at a time: its specs lack the dim of chunks, if there is one.
    return PartSpecs(ends, stage=without(loops - 1), layer=without(loops))


def _wholes(params: PyTree, axis: Axis, by_path: dict[str, PartitionSpec]) -> PyTree:
    """Returns `params` with its shares gathered over `axis` to whole leaves; the transpose is a
    reduce-scatter. `by_path` are the specs of the shares."""
    # This call is made only for its error: it refuses an axis that the mesh lacks. Otherwise
    # `splits_of` would find no split over the axis, and the shares would count as whole leaves.
    axis.size()
    _check_paths(params, axis, by_path)

    def gather_dim(x, split):
        """Returns `x` gathered along one dim; its cotangent is reduce-scattered."""

        def gather(x):
            return split.axis.all_gather(x, axis=split.dim, tiled=True)

        def scatter(cotangent):
            return shards.reduce_scatter(cotangent, [split]).astype(cotangent.dtype)

        # By this name `remat.gathers` finds the result, to gather it again in the backward pass.
        return linear(x, forward=gather, backward=scatter, name=remat.GATHERED)

    def whole(path, x):
        return functools.reduce(gather_dim, splits_of(path, by_path, axis), x)

    return jax.tree.map_with_path(whole, params)


def _check_paths(params: PyTree, axis: Axis, by_path: dict[str, PartitionSpec]) -> None:
    """Raises `ValueError` if `by_path` has splits over `axis`, but only at paths that `params`
    lacks, as if the specs were those of another tree."""
    split = [
        path
        for path, spec in by_path.items()
        if any(set(axes_of(axis)) & set(trees.entry_axes(entry)) for entry in spec)
    ]
    paths = [trees.dotted(path) for path, _ in jax.tree.leaves_with_path(params)]
    if split and set(paths).isdisjoint(split):
        raise ValueError(
            "zero.gathered and zero.gathered_once need specs for the tree that they gather; the "
            f"specs split {split[0] or 'a single array'!r} over {axes_of(axis)}, and the tree has "
            f"no leaf that they split. Its leaves are {paths[:3]}. For a part of a model, pass the "
            "specs of that part, as zero.part_specs gives them."
        )


@dataclass(frozen=True, eq=False)
class ZeRO:
    """All functions of one stage of ZeRO. They are made from the same stage, axis and sharding rule
    of the model, so they fit each other.

        >>> devices, rule, optimizer = mesh.make(data=8), rules.match("**", P()), optax.adam(0.1)
        >>> make_model, loss = lambda: jnp.ones((16, 64)), lambda w, x: jnp.mean((x @ w) ** 2)
        >>> sharing = zero.ZeRO(1, "data", rule, jax.eval_shape(make_model), devices)
        >>> places = {"rule": sharing.rule, "optimizer_rule": sharing.optimizer_rule}
        >>> state, specs = step.init(make_model, optimizer, mesh=devices, **places)
        >>> grad = sharing.grad(jax.value_and_grad(sharing.loss(loss)))
        >>> train = step.make(grad, sharing.optimizer(optimizer))
        >>> splits = {"in_specs": (specs, P("data")), "out_specs": (specs, P())}
        >>> train = jax.jit(mesh.spmd(train, mesh=devices, **splits))
        >>> print(train(state, jnp.ones((8, 16)))[1].loss)
        256.0

    Args:
        stage: 1, 2 or 3.
        axis: the axis, or the axes, that split the batch.
        inside: the rule of the model without ZeRO, such as `rules.first(tensor.rule(model),
            rules.match("**", P()))`. Its splits, such as those of experts over an axis in `axis`,
            stay in all stages.
        model: the model's arrays or their shapes, all of them whole.
        mesh: the mesh that the step runs on.
        min_size: the least number of elements of a leaf that is split, as in `rules.fsdp`.
        keep: dims that are not split, as in `rules.fsdp`.

    Attributes:
        optimizer_rule: the rule that splits leaves as `inside` does, and also over `axis`, into one
            share for each device. `step.init` splits the optimizer's state by this rule.
        specs: the specs that `optimizer_rule` gives, a tree like the model, for the functions of
            this module.

    Raises:
        ValueError: there is no such stage, or no such axis in the mesh; or `rules.specs` refuses
            the specs.
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
        """Checks `stage` and `axis`, and sets `optimizer_rule` and `specs`."""
        names = axes_of(Axis.of(self.axis))
        if self.stage not in (1, 2, 3):
            raise ValueError(
                f"ZeRO has the stages 1, 2 and 3; got stage={self.stage!r}. Data parallelism is "
                "grads.averaged."
            )
        if strange := [name for name in names if name not in self.mesh.shape]:
            raise ValueError(
                f"ZeRO over {strange[0]!r} needs a mesh with that axis; the axes are "
                f"{dict(self.mesh.shape)}. Use one of these."
            )
        size = math.prod(self.mesh.shape[name] for name in names)
        axis_name = names[0] if len(names) == 1 else names
        shares = rules.fsdp(
            axis_name, size=size, min_size=self.min_size, keep=self.keep, inside=self.inside
        )
        # The dataclass is frozen, so that its parts always agree. In a frozen dataclass only
        # `object.__setattr__` can set a field.
        object.__setattr__(self, "optimizer_rule", shares)
        object.__setattr__(
            self, "specs", rules.specs(self.model, shares, self.mesh, batch_axes=names)
        )

    @property
    def rule(self) -> Rule:
        """The rule of the parameters, for `step.init`. In stage 3 this rule is `optimizer_rule`,
        which splits leaves into shares; otherwise it is `inside`, the model's rule without ZeRO."""
        return self.optimizer_rule if self.stage == 3 else self.inside

    def loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `loss` for the parameters as they are stored. In stage 3 the result checks the
        shapes of the parameters, gathers the parameters, and then calls `loss`. In the other stages
        the result is `loss` itself."""
        return (
            self._checked(gathered(loss, self.axis, self._own_specs()), "loss")
            if self.stage == 3
            else loss
        )

    def grad(self, grad: Grad, *, microbatches: int = 1) -> Grad:
        """Returns a gradient function for the mean of `grad` over microbatches and over the devices
        of the axis; each device keeps its share of the gradients.

        Stage 1 scatters the sum over the microbatches. Stage 2 scatters the gradients of each
        microbatch, and adds up the shares. In stage 3 the backward pass of `loss` scatters the
        gradients, so only the gradients of leaves that stay whole are still summed over devices. In
        all stages the returned function raises `ValueError` if the parameters on this device do not
        have the shapes that `rule` gives.
        """

        def scattered_grad(params, batch):
            value, gradients = grad(params, batch)
            return value, reduce_scatter(gradients, self.axis, self._own_specs())

        accumulated = grads.accumulated(
            scattered_grad if self.stage == 2 else grad, microbatches=microbatches
        )
        if self.stage == 3:
            return self._checked(grads.averaged(accumulated, self.axis), "grad")
        # In stage 2 the gradients are shares already, which `reduce_scattered` sees by their shape.
        # So `reduce_scattered` only divides the shares, and all-reduces the loss and the leaves
        # that stay whole: once, not once per microbatch as with the nesting in this file's head.
        return self._checked(reduce_scattered(accumulated, self.axis, self.specs), "grad")

    def optimizer(
        self, optimizer: optax.GradientTransformation | optax.MultiSteps
    ) -> optax.GradientTransformation | optax.MultiSteps:
        """Returns `optimizer` for the shares. In stage 3 `optimizer` is unchanged, since parameters
        and gradients are shares already."""
        return optimizer if self.stage == 3 else sharded(optimizer, self.axis, self.specs)

    def _own_specs(self) -> Specs:
        """Returns `specs` without the splits that `inside` made."""
        # The experts' axis may be in `axis`, since it splits the batch too. The experts stay split
        # over it: tokens of all its devices reach each expert, so the gradients are sums already.
        inside = trees.by_path(rules.specs(self.model, self.inside, self.mesh))

        def own(path, spec):
            split_inside = inside[trees.dotted(path)]
            # `fsdp` splits only dims that `inside` leaves whole.
            pairs = itertools.zip_longest(spec, split_inside)
            return PartitionSpec(*(None if before else entry for entry, before in pairs))

        return jax.tree.map_with_path(own, self.specs)

    def _checked(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Returns `function(params, ...)` with a check. A call raises `ValueError` if the
        parameters on this device do not have the shapes that `rule` gives. `name` is the name of
        the calling method, for messages."""
        specs = trees.by_path(rules.specs(self.model, self.rule, self.mesh))
        wholes = {
            trees.dotted(path): leaf.shape
            for path, leaf in jax.tree.leaves_with_path(self.model)
            if trees.is_array(leaf)
        }

        def check(path, shape):
            """Raises `ValueError` if the model has no leaf at `path`, or if `shape` is not the
            shape that the leaf's spec gives on one device. `specs` maps each path to a spec, and
            `wholes` maps each path to the shape of the whole leaf."""
            if path not in wholes:
                raise ValueError(
                    f"ZeRO.{name}: the parameters have a leaf {path!r}, and the model that ZeRO "
                    "was given has no leaf at this path. Give ZeRO the shapes of the model that is "
                    "trained."
                )
            needed = NamedSharding(self.mesh, specs[path]).shard_shape(wholes[path])
            if shape != needed:
                raise ValueError(
                    f"ZeRO.{name}: in stage {self.stage}, a device needs a part of shape {needed} "
                    f"of {path or 'the parameter'}; got {shape}. The whole shape is "
                    f"{wholes[path]}, and the spec is {specs[path]}. Pass the attribute `rule` of "
                    "this ZeRO object to step.init, and run the step on this object's mesh, "
                    f"{dict(self.mesh.shape)}."
                )

        def wrapped(params, *arguments):
            """Checks the shapes of the parameters, and then calls the function."""
            # With a wrong rule the shapes of the parameters often still fit each other, and the
            # step would train another model.
            for path, leaf in jax.tree.leaves_with_path(eqx.filter(params, trees.is_inexact)):
                check(trees.dotted(path), leaf.shape)
            return function(params, *arguments)

        return wrapped
