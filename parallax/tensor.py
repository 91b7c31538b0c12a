"""Tensor parallelism: a layer's weights are split over an axis, in Megatron's pair of layers.

The first layer of a pair is column-parallel: each device has some of the layer's outputs. The
second layer is row-parallel: each device has some of the layer's inputs. A device's outputs of the
first layer are the same device's inputs of the second, so nothing is sent between the two layers.
`copy_to` stands before the pair (identity forward, all-reduce backward), and `reduce_from` stands
after the pair (all-reduce forward, identity backward). In place of one axis, several may be given.
With `()` nothing is split, and the same code runs on one device.

Legend: B batch, T tokens, D width, I inputs and J outputs of a layer, V rows of a table, X the
axis. `[I_X]` is split over X. `{U_X}` after an array says that the array on each device is one term
of a sum over X. An array varies along an axis if the array's type says that it may differ between
devices. `Axis.of(axis)` has the axis's names (`names`), its number of devices (`size()`) and this
device's index (`index()`).

Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Inexact, Integer, Shaped

from parallax._typing import PyTree, Rule
from parallax.collectives.axis import Axis, AxisLike, combined_axis
from parallax.collectives.types import (
    accumulation_dtype,
    axes,
    linear,
    match_varying,
    varying,
    varying_axes,
)
from parallax.trees import SpecsByPath


class Comms(NamedTuple):
    """The communication before and after the layers that are split over devices.

    `comms`, `sequence.comms`, `context.comms` and `experts.comms` return a `Comms`.

    Between layers there is the residual stream, [B, T, D]. Each device has all tokens of the
    stream, or some of them.

    Attributes:
        axis: the axis that the layers are split over.
        everywhere: `axis` and the other axes over which the vocabulary is split. `all_tokens` and
            `sum_partials` communicate over the axes of `everywhere`.
        all_tokens: `all_tokens(x)` takes the residual stream, and returns all tokens, [B, T, D].
            Each device may then compute something different with these tokens.
        sum_partials: `sum_partials(x)` takes partial sums for all tokens, [B, T, D], and returns
            the residual stream.
        column: `column(x, weight, bias)` applies a column-parallel layer to the residual stream.
        row: `row(x, weight, bias)` applies a row-parallel layer, and returns the residual stream.
        local_tokens: `local_tokens(x, dim)` is the part of `x` for this device's tokens of the
            residual stream; `dim` is the dim of tokens.
        copy_to: `copy_to(weight)` takes a weight that all devices of `axis` have whole, and returns
            it. Each device may then compute something different with the weight, and the devices'
            gradients of it are summed.
        token_shards: the number of devices that split the tokens of the residual stream.
        context_tokens: `context_tokens(x, dim)` is the part of `x` for the tokens that this
            device's layers process. These are all tokens, unless `context.comms` splits the
            sequence over a further axis, the context axis.
        wrap_attention: takes the model's attention function and returns a function that attends
            over the context axis.
        context_shards: the number of devices of the context axis, over which the tokens that the
            layers process are split; 1 without such an axis.
        over_tokens: the axis or axes that split the tokens of the residual stream.
        gathered: `gathered(x)` takes one row for each of this device's tokens of the residual
            stream, and returns the rows of all tokens that the layers process, [B, T, ...]. These
            rows are the same on all devices of `axis`, and no gradient flows through `gathered`.
        wrap_experts: takes the function of a mixture of experts and returns a function whose
            experts are split over an axis. `experts.comms` sets this attribute.
    """

    axis: Axis
    everywhere: Axis
    all_tokens: Callable[..., Any]
    sum_partials: Callable[..., Any]
    column: Callable[..., Any]
    row: Callable[..., Any]
    local_tokens: Callable[..., Any]
    copy_to: Callable[..., Any]
    token_shards: int
    context_tokens: Callable[..., Any] = lambda x, dim: x
    wrap_attention: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda attend: attend
    context_shards: int = 1
    over_tokens: AxisLike = ()
    gathered: Callable[..., Any] = lax.stop_gradient
    wrap_experts: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda mixture: mixture


def comms(axis: AxisLike, *, shared: AxisLike = (), on_tpu: bool = False) -> Comms:
    """Returns a `Comms` for Megatron's pairs over `axis`: the functions by which the layers of a
    model communicate.

    Every device has all tokens, so nothing gathers or splits them: `all_tokens` is only `copy_to`,
    and `local_tokens` is the identity. The vocabulary is split over `axis` and also over the axes
    `shared`, such as the stages of a pipeline. Both `sum_partials` (after the look-up of the
    embeddings) and `all_tokens` (before the output layer) communicate over all these axes. `on_tpu`
    makes the layers compute in the way that is fastest on TPUs (see `column`).
    """
    axis, everywhere = Axis.of(axis), combined_axis(shared, axis)  # all these axes as one `Axis`
    return Comms(
        axis,
        everywhere,
        all_tokens=functools.partial(copy_to, axis=everywhere),
        sum_partials=functools.partial(reduce_from, axis=everywhere),
        column=functools.partial(column, axis=axis, on_tpu=on_tpu),
        row=functools.partial(row, axis=axis, on_tpu=on_tpu),
        local_tokens=lambda x, dim: x,
        # For a whole weight between the two layers, such as that of a norm of each head's queries.
        copy_to=functools.partial(copy_to, axis=axis),
        token_shards=1,  # the tokens are not split
    )


def copy_to(x: Inexact[Array, "*dims"], axis: AxisLike) -> Inexact[Array, "*dims"]:
    """Returns `x`, typed so that each device of `axis` may compute something different with it:
    Megatron's f.

    `copy_to` is the identity forward. Backward, one all-reduce sums the devices' shares of the
    cotangent. The transpose of `copy_to` is `reduce_from`.

    Raises:
        ValueError: `x` varies along `axis` already: each device has a different `x`, so the
            devices' cotangents must not be summed.
    """
    axis = Axis.of(axis)
    already = set(axes(axis.names)) & set(varying_axes(x))
    if already:
        raise ValueError(
            f"tensor.copy_to needs an x that is the same along {axis.names!r}; this one, of shape "
            f"{x.shape}, varies along {sorted(already)}. Use `copy_to` once, before the "
            "column-parallel layer, and `reduce_from` after the row-parallel one."
        )
    # `varying` casts `x` to vary along the axis. By itself `varying` would sum the cotangent by
    # `lax.psum`, and not by the axis's own algorithm. So `linear` gets the transpose as `backward`.
    return linear(x, forward=lambda x: varying(x, axis.names), backward=axis.all_reduce)


def reduce_from(x: Inexact[Array, "*dims"], axis: AxisLike) -> Inexact[Array, "*dims"]:
    """Returns the sum of the devices' partial results, on all devices: Megatron's g.

    `reduce_from` is one all-reduce forward, and the identity backward. The transpose of
    `reduce_from` is `copy_to`.

    Raises:
        ValueError: `x` is the same along one of the axes, so the sum would count `x` several times.
    """
    axis = Axis.of(axis)
    same = set(axes(axis.names)) - set(varying_axes(x))
    if same:
        raise ValueError(
            f"tensor.reduce_from needs partial sums that differ along {axis.names!r}; this x, of "
            f"shape {x.shape}, is the same along {sorted(same)}, and would be counted once per "
            "device. Split the weights of the layer whose result `reduce_from` sums, or leave out "
            "`reduce_from`."
        )
    return axis.all_reduce(x)


def column(
    x: Float[Array, "*batch inputs"],
    weight: Float[Array, "inputs *outputs_shard"] | eqx.nn.Linear,
    bias: Float[Array, "*outputs_shard"] | None,
    axis: AxisLike,
    *,
    on_tpu: bool = False,
) -> Float[Array, "*batch_and_outputs_shard"]:
    """Returns the result of a column-parallel linear layer: `A[B, I] · W[I, J_X] + b[J_X] -> [B,
    J_X]`.

    The backward pass takes one all-reduce of the size of `x`.

    The outputs may have several dims, such as heads and head width; any of them may be split. The
    weight may be an `eqx.nn.Linear`, which is stored [outputs, inputs] and brings its own bias:
    `tensor.column(x, linear, None, axis)` computes the same as `ColumnLinear`.

    With `on_tpu` the layer computes in the way that is fastest on TPUs. A weight `[I, n, H, K]`,
    such as that of queries, keys and values, is applied in n separate products, so no copy is
    needed to separate the n results. The gradient of a bias is computed as a product with ones,
    since the matrix units add up numbers faster than the vector units. `on_tpu` has no effect on a
    `Linear`.

    Raises:
        ValueError: `x` varies along `axis` already; the weight does not take all inputs of `x`; or
            a `bias` is given besides that of a `Linear`.
    """
    if isinstance(weight, eqx.nn.Linear):  # `_with_own_bias` refuses a second one
        return ColumnLinear(_with_own_bias(weight, bias, "column"), axis)(x)
    check_column("tensor.column", x.shape[-1:], weight, axis)
    # `copy_to` is before the product, so its all-reduce backward has the size of `x`.
    return affine(copy_to(x, axis), weight, bias, on_tpu=on_tpu)


def row(
    x: Float[Array, "*batch_and_inputs_shard"],
    weight: Float[Array, "*inputs_shard outputs"] | eqx.nn.Linear,
    bias: Float[Array, " outputs"] | None,
    axis: AxisLike,
    *,
    on_tpu: bool = False,
) -> Float[Array, "... outputs"]:
    """Returns the result of a row-parallel linear layer: `A[B, I_X] · W[I_X, J] + b[J] -> [B, J]`.

    The forward pass takes one all-reduce of the size of the result.

    The inputs may have several dims: the last dims of `x` and the first dims of `weight`. The
    weight may be an `eqx.nn.Linear`, which is stored [outputs, inputs] and brings its own bias:
    `tensor.row(x, linear, None, axis)` computes the same as `RowLinear`.

    With `on_tpu` the gradient of `bias` is a product with ones, which is faster on TPUs. `on_tpu`
    has no effect on a `Linear`.

    Raises:
        ValueError: `x` or the weight is the same along `axis`; the weight does not take the inputs
            of this device; or a `bias` is given besides that of a `Linear`.
    """
    if isinstance(weight, eqx.nn.Linear):  # `_with_own_bias` refuses a second one
        return RowLinear(_with_own_bias(weight, bias, "row"), axis)(x)
    check_row("tensor.row", x, weight, axis)
    # All dims of the weight but the last are inputs. The bias is added after the sum, or each
    # device would add it.
    y = reduce_from(jnp.tensordot(x, weight, axes=weight.ndim - 1), axis)
    return y if bias is None else add_bias(y, bias, on_tpu=on_tpu)


class ColumnLinear(eqx.Module):
    """`eqx.nn.Linear` with its outputs split over an axis: `W[J_X, I] · A[B, I] + b[J_X] -> [B,
    J_X]`.

    Replace `linear` in a model by `ColumnLinear(linear, axis)`, for example with `eqx.tree_at`.
    `tensor.rule(model)` gives the specs of the new layer.

    Attributes:
        linear: the layer, with weight [outputs, inputs] and bias [outputs]. Outside `shard_map`
            both have all outputs; inside, both have only this device's outputs.
        axis: the axis or axes that the outputs are split over; `()` on one device.
    """

    linear: eqx.nn.Linear
    axis: AxisLike = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "*batch inputs"], *, key: Any = None
    ) -> Float[Array, "*batch outputs_shard"]:
        """Returns this device's outputs for one vector of inputs, or for many. `key` is ignored, as
        in Equinox.

        Raises `ValueError` if the weight is not split along its outputs, or `x` varies along the
        axis already.
        """
        # The outputs, dim 0 of the weight, are split. `column` takes weights [inputs, outputs].
        _check_linear("ColumnLinear", self.linear, Axis.of(self.axis), split=0)
        return column(x, self.linear.weight.T, self.linear.bias, self.axis)


class RowLinear(eqx.Module):
    """`eqx.nn.Linear` with its inputs split over an axis, and its bias added once: `W[J, I_X] ·
    A[B, I_X] + b[J] -> [B, J]`.

    Replace `linear` in a model by `RowLinear(linear, axis)`, for example with `eqx.tree_at`.
    `tensor.rule(model)` gives the specs of the new layer.

    Attributes:
        linear: the layer, with weight [outputs, inputs] and bias [outputs]. Outside `shard_map`
            the weight has all inputs; inside, it has only this device's inputs.
        axis: the axis or axes that the inputs are split over; `()` on one device.
    """

    linear: eqx.nn.Linear
    axis: AxisLike = eqx.field(static=True)

    def __call__(
        self, x: Float[Array, "*batch inputs_shard"], *, key: Any = None
    ) -> Float[Array, "*batch outputs"]:
        """Returns all outputs: the sum of the devices' products, plus the bias. `x` has this
        device's inputs, of one vector or of several. `key` is ignored, as in Equinox.

        Raises `ValueError` if the weight is not split along its inputs, or does not fit `x`.
        """
        # The inputs, dim 1 of the weight, are split. `row` takes weights [inputs, outputs].
        _check_linear("RowLinear", self.linear, Axis.of(self.axis), split=1)
        return row(x, self.linear.weight.T, self.linear.bias, self.axis)


class Embedding(eqx.Module):
    """`eqx.nn.Embedding` with its rows split over an axis: `W[V_X, D], ids[B] -> [B, D]`.

    A call takes one all-reduce of the size of the result.

    Replace `embedding` in a model by `Embedding(embedding, axis)`, for example with `eqx.tree_at`.
    `tensor.rule(model)` gives the specs of the new layer. A call takes one id, as
    `eqx.nn.Embedding` does, or an array of ids.

    Attributes:
        embedding: the table, with weight [rows, width]. Outside `shard_map` the weight has all
            rows; inside, it has only this device's rows.
        axis: the axis or axes that the rows are split over; `()` on one device.
    """

    embedding: eqx.nn.Embedding
    axis: AxisLike = eqx.field(static=True)

    def __call__(
        self, ids: Integer[Array, "*batch"], *, key: Any = None
    ) -> Float[Array, "*batch width"]:
        """Returns the rows `ids`; an id outside the table gives nan.

        `key` is ignored, as in Equinox.

        Raises:
            ValueError: the table's rows are not split over the axis.
        """
        # Equinox's static field, `num_embeddings`, keeps the number of rows of the whole table. So
        # a table that was not split is refused here. Otherwise, the first device would find all
        # ids, and the other devices none.
        rows, devices = self.embedding.num_embeddings, Axis.of(self.axis).size()
        weight = self.embedding.weight
        if len(weight) * devices != rows:
            raise ValueError(
                f"tensor.Embedding needs an eqx.nn.Embedding whose {rows} rows are split over the "
                f"{devices} devices of {self.axis!r}, {rows} / {devices} on each; got a weight of "
                f"{list(weight.shape)}. Give the embedding the specs of tensor.rule(model), and a "
                f"number of rows that is a multiple of {devices}. If ZeRO-3 also splits the table, "
                "gather the table first with ZeRO.loss or zero.gathered."
            )
        return embed(weight, ids, self.axis)


def rule(model: PyTree) -> Rule:
    """Returns the rule that splits each `ColumnLinear`, `RowLinear` and `Embedding` of `model`.

    The rule gives a spec only to the leaves of these layers. The rule
    `rules.first(tensor.rule(model), rules.match("**", P()))` keeps all other leaves whole. Leaves
    may be `jax.ShapeDtypeStruct`s. Layers may be stacked: a weight may have further dims in front
    of its last two, and these further dims are not split.

    Raises:
        ValueError: an `eqx.nn.MultiheadAttention` holds a `ColumnLinear` or a `RowLinear`. The
            attention reads the number of its heads from a static field, so on a shard it would
            compute narrower heads.
    """
    _check_attention(model)

    def is_layer(node):
        """Returns whether a node is a `ColumnLinear`, a `RowLinear` or an `Embedding`."""
        return isinstance(node, ColumnLinear | RowLinear | Embedding)

    specs: dict[str, P] = {}
    for path, layer in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_layer):
        if not is_layer(layer):
            continue
        names = Axis.of(layer.axis).names or None  # None for `()`, which splits nothing
        name = "embedding" if isinstance(layer, Embedding) else "linear"
        # A weight has two dims; layers that were made together by `jax.vmap` have more in front.
        stacked = [None] * (getattr(layer, name).weight.ndim - 2)
        prefix = jax.tree_util.keystr(
            (*path, jax.tree_util.GetAttrKey(name)), simple=True, separator="."
        )
        # A weight is [outputs, inputs] or [rows, width]. A `RowLinear` splits its inputs, and its
        # bias is whole. The others split the first dim: the outputs, with the bias, or the rows.
        weight, bias = ([None, names], []) if isinstance(layer, RowLinear) else ([names], [names])
        # A layer without a bias also gets a spec for it, which no leaf uses.
        specs |= {f"{prefix}.weight": P(*stacked, *weight), f"{prefix}.bias": P(*stacked, *bias)}

    # A rule that gives a leaf the spec of its path, if it has one.
    return SpecsByPath(specs)


def _check_attention(model: PyTree) -> None:
    """Raises `ValueError` if an `eqx.nn.MultiheadAttention` has a split projection."""

    def is_attention(node):
        """Returns whether a node of the model is an `eqx.nn.MultiheadAttention`."""
        return isinstance(node, eqx.nn.MultiheadAttention)

    def is_split(node):
        """Returns whether a node in the tree of an attention module is a split layer."""
        return isinstance(node, ColumnLinear | RowLinear)

    for path, node in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_attention):
        if is_attention(node) and any(map(is_split, jax.tree.leaves(node, is_leaf=is_split))):
            name = jax.tree_util.keystr(path, simple=True, separator=".") or "the model"
            raise ValueError(
                f"tensor.rule: {name} is an eqx.nn.MultiheadAttention with split projections. It "
                f"has {node.num_heads} heads on every device, so each head would be narrower than "
                "in the whole model. Use an attention that reads the number of its heads from its "
                'arrays, as on the page "Bring your own model".'
            )


def _check_linear(name: str, linear: eqx.nn.Linear, axis: Axis, *, split: int) -> None:
    """Raises `ValueError` unless the weight is split along dim `split`, and along no other dim.

    Dim 0 of the weight has the outputs, dim 1 the inputs. `name` is the layer's class, for the
    message.
    """
    # Equinox's static fields, `out_features` and `in_features`, keep the whole sizes. So a weight
    # that was not split, or was split along the other dim, is refused even if its shape happens to
    # fit.
    whole, devices = [linear.out_features, linear.in_features], axis.size()
    needed = [f"1/{devices} of {size}" if dim == split else size for dim, size in enumerate(whole)]
    # The whole shape, if this device's weight is split as it should be.
    shape = [
        size * devices if dim == split else size for dim, size in enumerate(linear.weight.shape)
    ]
    # A `Linear` of "scalar" inputs or outputs has this word for the size, and is refused too.
    if shape != whole:
        dim = ("outputs", "inputs")[split]
        raise ValueError(
            f"tensor.{name} needs an eqx.nn.Linear whose {whole[split]} {dim} are split over the "
            f"{devices} devices of {axis.names!r}: on each device a weight [outputs, inputs] of "
            f"[{', '.join(map(str, needed))}]; got {list(linear.weight.shape)}. Give the layer "
            f"the specs of tensor.rule(model), and a number of {dim} that is a multiple of "
            f"{devices}. If ZeRO-3 also splits the weight, gather the weight first with ZeRO.loss "
            "or zero.gathered."
        )


def _with_own_bias(layer: eqx.nn.Linear, bias, name: str) -> eqx.nn.Linear:
    """Returns `layer` unchanged. Raises `ValueError` if `bias` is not None, since `layer` brings
    its own bias. `name` is the name of the calling function, for the message."""
    if bias is not None:
        raise ValueError(
            f"tensor.{name}: an eqx.nn.Linear brings its own bias. Pass bias=None; got a bias "
            f"of shape {bias.shape}."
        )
    return layer


def check_column(
    name: str, inputs: tuple[int, ...], weight: Shaped[Array, "..."], axis: AxisLike
) -> None:
    """Raises `ValueError` if the weight of a column-parallel layer does not take all inputs.

    `inputs` has one number, the size of the last dim of the layer's argument. The weight's first
    dim must have this size. `name` is the name of the calling function, for the message.
    """
    if weight.shape[:1] != inputs:
        raise ValueError(
            f"{name} needs a weight [inputs, outputs of this device]: x has {inputs[0]} inputs, "
            f"and the weight is of shape {weight.shape} here. Split its outputs over "
            f"{Axis.of(axis).names!r} and not its inputs. If you have an eqx.nn.Linear, pass the "
            "layer and not its weight, which is stored as [outputs, inputs]."
        )


def check_row(
    name: str, x: Shaped[Array, "..."], weight: Shaped[Array, "..."], axis: AxisLike
) -> None:
    """Raises `ValueError` if the weight of a row-parallel layer does not fit `x`.

    The input dims of the weight are all its dims but the last. The input dims of `x` are its last
    `weight.ndim - 1` dims, and must have the same sizes as the weight's on this device. Each mesh
    axis in `axis` must split the inputs of both, or of neither. `name` is the name of the calling
    function, for the message.
    """
    axis, dims = Axis.of(axis), weight.ndim - 1  # the number of dims that are inputs
    if x.shape[x.ndim - dims :] != weight.shape[:-1]:
        raise ValueError(
            f"{name} needs a weight [inputs of this device, outputs]: x, of shape {x.shape}, has "
            f"inputs of shape {x.shape[x.ndim - dims :]} on this device, and the weight, of shape "
            f"{weight.shape}, takes inputs of shape {weight.shape[:-1]}. Split the weight's inputs "
            f"over {axis.names!r} and not its outputs. If you have an eqx.nn.Linear, pass the "
            "layer and not its weight, which is stored as [outputs, inputs]."
        )
    # If only one of the two varies along an axis, the sum over this axis is wrong. If neither
    # varies, `reduce_from` refuses the product.
    names = {axis_name for axis_name in axes(axis.names) if lax.axis_size(axis_name) > 1}
    of_x, of_weight = names.intersection(varying_axes(x)), names.intersection(varying_axes(weight))
    if same := sorted(of_weight - of_x):
        raise ValueError(
            f"{name} needs an x that is split over {axis.names!r} along the layer's inputs; this "
            f"x, of shape {x.shape}, is the same along {', '.join(map(repr, same))}, so devices "
            "would multiply the same inputs by different weights. As x, pass the "
            "result of a column-parallel layer, or pass each device's slice of the inputs."
        )
    if same := sorted(of_x - of_weight):
        raise ValueError(
            f"{name} needs a weight whose inputs are split over {axis.names!r}; this weight, of "
            f"shape {weight.shape}, is the same along {', '.join(map(repr, same))}, so devices "
            "would multiply different inputs by the same weights. Split the weight by "
            f"P({axis.names!r})."
        )


def embed(
    table: Float[Array, "rows width"],
    ids: Integer[Array, "*batch"],
    axis: AxisLike,
    *,
    weights: Shaped[Array, "*batch"] | None = None,
    vocabulary: int | None = None,
) -> Float[Array, "*batch width"]:
    """Returns the rows `ids` of a table whose rows are split over `axis`:
    `W[V_X, D], ids[B] -> [B, D]`.

    `table` has this device's rows, and `ids` are indices of rows of the whole table. `vocabulary`
    is the number of rows without padding; by default all rows. An id outside the vocabulary gives
    nan, or zeros if its weight is 0: `weights` has one weight for each of the `ids`. The weights
    have no other effect. One all-reduce sums the devices' results of `embed_partial`.
    """
    return reduce_from(
        embed_partial(table, ids, axis, weights=weights, vocabulary=vocabulary), axis
    )


def embed_partial(
    table: Float[Array, "rows width"],
    ids: Integer[Array, "*batch"],
    axis: AxisLike,
    *,
    weights: Shaped[Array, "*batch"] | None = None,
    vocabulary: int | None = None,
) -> Float[Array, "*batch width"]:
    """Returns this device's term of the sum that `embed` returns: `W[V_X, D], ids[B] -> [B, D]
    {U_X}`. Nothing is sent.

    Each device looks up the rows that it holds, and gives zeros for ids whose rows other devices
    hold. An id outside the vocabulary gives nan on every device, or zeros if the id's weight is 0.
    No row gets a gradient from such an id.

    Args:
        table: this device's rows.
        ids: indices of rows of the whole table.
        axis: the axis or axes that the rows are split over; `()` if they are whole.
        weights: the weights of the ids; only whether a weight is 0 matters.
        vocabulary: the number of rows without padding; by default all rows.

    Raises:
        ValueError: the ids are not whole numbers; the table is the same along an axis of several
            devices; or `vocabulary` is below 1 or above the number of all rows.
    """
    axis, rows = Axis.of(axis), table.shape[0]
    vocabulary = checked_vocabulary("tensor.embed", table, rows, axis, vocabulary)
    # For another device's id, `row` is outside this table, and the look-up clips `row` to some row
    # of the table. The `where` after the look-up keeps that row from getting a gradient.
    row, is_here = _held(ids, rows, axis)
    unknown = _outside(ids, vocabulary)
    is_wrong = unknown if weights is None else unknown & weights.astype(bool)
    # A wrong id gives nan on every device, and so a loss of nan. An error at run time would be
    # possible too, but it would stop all devices.
    not_here = jnp.where(is_wrong, jnp.full((), jnp.nan, table.dtype), jnp.zeros((), table.dtype))
    return jnp.where(
        (is_here & ~unknown)[..., None], table.at[row].get(mode="clip"), not_here[..., None]
    )


def cross_entropy(
    logits: Float[Array, "*batch rows"],
    targets: Integer[Array, "*batch"],
    axis: AxisLike,
    *,
    weights: Float[Array, "*batch"] | None = None,
    vocabulary: int | None = None,
) -> Float[Array, "*batch"]:
    """Returns -log softmax(logits)[targets] in nats, for logits that are split over `axis`.

    The logits are never gathered. For each position, one maximum (`lax.pmax`) and two sums (in one
    all-reduce) are sent. Columns from `vocabulary` on are padding and count as logits of minus
    infinity. The softmax and the losses are float32 or wider.

    A target outside the vocabulary has a loss of nan, or 0 if its weight is 0. Some data marks
    ignored positions by -100: pass `weights=(targets != -100).astype(logits.dtype)`.

    Args:
        logits: this device's columns.
        targets: indices of columns of the whole vocabulary.
        axis: the axis or axes that the columns are split over; `()` if they are whole.
        weights: the factors of the positions' losses. For a weighted mean over tokens, see
            `parallax.cross_entropy.normalized`.
        vocabulary: the number of columns without padding; by default all columns.

    Raises:
        ValueError: there is not one target for each position of the logits, or not one weight for
            each target; the targets are not whole numbers; the logits are the same along an axis of
            several devices; or `vocabulary` is below 1 or above the number of all columns.
    """
    axis, columns_here = Axis.of(axis), logits.shape[-1]
    check_positions("tensor.cross_entropy", logits, targets, weights)
    vocabulary = checked_vocabulary("tensor.cross_entropy", logits, columns_here, axis, vocabulary)
    # The target's column, counted from this device's first column. It is outside the logits if
    # another device has the column.
    column_here, _ = _held(targets, columns_here, axis)
    columns = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    # Padding is left out of the softmax. Without padding, this pass over the logits is not needed.
    if vocabulary < columns_here * axis.size():
        logits = jnp.where(columns + axis.index() * columns_here < vocabulary, logits, -jnp.inf)
    # The maximum cancels in the softmax, so it may be a constant for the gradient.
    peak = axis.all_max(jnp.max(lax.stop_gradient(logits), axis=-1))
    # In 16 bits, the exponentials, their sum and the losses would be rounded at each step.
    wide = accumulation_dtype(logits.dtype)
    shifted = logits.astype(wide) - peak.astype(wide)[..., None]
    # The target's logit is a sum in which all other terms are 0: XLA fuses this sum and its
    # transpose with the softmax. The transpose of a look-up would be a scatter, which XLA does not
    # fuse.
    target = jnp.sum(
        jnp.where(columns == column_here[..., None], shifted, jnp.zeros((), shifted.dtype)), axis=-1
    )
    # A target that no device has would give a logit of 0, and a loss that looks right.
    unknown = _outside(targets, vocabulary)
    nan = jnp.full((), jnp.nan, target.dtype)
    target = jnp.where(unknown, nan if weights is None else jnp.where(weights != 0, nan, 0), target)
    total, target = reduce_from(jnp.stack([jnp.sum(jnp.exp(shifted), axis=-1), target]), axis)
    losses = jnp.log(total) - target
    return losses if weights is None else weights.astype(losses.dtype) * losses


def check_positions(name: str, x: Array, targets: Array, weights: Array | None) -> None:
    """Raises `ValueError` unless `targets` and `weights` have the shape `x.shape[:-1]`, one number
    for each position of `x`. JAX would repeat an array of fewer dims for all rows of the batch.
    `name` is the name of the calling function, for the message."""
    for argument, array in (("targets", targets), ("weights", weights)):
        if array is not None and array.shape != x.shape[:-1]:
            raise ValueError(
                f"{name} needs {argument} of shape {x.shape[:-1]}, one for each position of an "
                f"array of shape {x.shape}; got {array.shape}. If one row is meant for the whole "
                "batch, use jnp.broadcast_to."
            )


def checked_vocabulary(
    name: str, shard: Array, rows: int, axis: AxisLike, vocabulary: int | None
) -> int:
    """Returns `vocabulary`, or the number of all rows if it is None.

    `shard` has this device's `rows` rows of the table, or the logits of these rows. `name` is the
    name of the calling function, for the message.

    Raises:
        ValueError: `shard` is the same along an axis of several devices, so each of its rows would
            count once per device; or `vocabulary` is below 1 or above the number of all rows.
    """
    axis = Axis.of(axis)
    split = varying_axes(shard)
    same = [name for name in axes(axis.names) if name not in split and lax.axis_size(name) > 1]
    if same:
        raise ValueError(
            f"{name} needs a vocabulary that is split over {axis.names!r}; this array, of shape "
            f"{shard.shape}, is the same along {same}, so each of its {rows} rows would count once "
            f"per device. Split the rows of the table by P({axis.names!r}), or pass axis=()."
        )
    whole = rows * axis.size()
    if vocabulary is not None and not 1 <= vocabulary <= whole:
        raise ValueError(
            f"{name} needs a vocabulary of 1 to {whole}, the number of rows of the whole table; "
            f"got {vocabulary}. Pass the number of rows that are not padding."
        )
    return whole if vocabulary is None else vocabulary


def _held(ids, rows: int, axis: Axis):
    """Returns, for each id, the index of its row counted from this device's first row, and whether
    the row is one of the `rows` rows of this device. Raises `ValueError` for ids that are not whole
    numbers.
    """
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"ids must be whole numbers; got {ids.dtype}{list(ids.shape)}. Encode a text with a "
            "tokenizer."
        )
    # An int64 id that does not fit in int32 gives some other row. The callers find such an id by
    # `_outside`, which compares it in its own dtype.
    row = ids.astype(jnp.int32) - axis.index() * rows
    return row, (row >= 0) & (row < rows)


def _outside(ids, vocabulary: int):
    """Returns whether each id is outside the vocabulary.

    Ids are compared in their own dtype, since an int64 id may not fit in int32. The last id of the
    vocabulary may not fit in the ids' dtype. It is then replaced by the largest number of this
    dtype, such as 127 for int8.
    """
    return (ids < 0) | (ids > min(vocabulary - 1, jnp.iinfo(ids.dtype).max))


def affine(
    x: Float[Array, "*batch inputs"],
    weight: Float[Array, "inputs *outputs"],
    bias: Float[Array, "*outputs"] | None,
    *,
    on_tpu: bool,
) -> Float[Array, "*batch_and_outputs"]:
    """Returns `jnp.tensordot(x, weight, axes=1) + bias`: `A[B, I] · W[I, *J] + b[*J] -> [B, *J]`.

    A weight of four dims, `[I, n, H, K]`, has n arrays of heads, such as queries, keys and values.
    With `on_tpu` each array has its own product, and the n products are stacked. If the caller
    takes the stack apart by `unstacked`, XLA leaves out the stack. One product would give one
    array, and each of the n parts would be copied out of this array for an attention kernel.
    """
    if not on_tpu or weight.ndim < 4:
        y = jnp.tensordot(x, weight, axes=1)  # over the inputs: x's last dim, weight's first
        return y if bias is None else add_bias(y, bias, on_tpu=on_tpu)
    biases = [None] * weight.shape[1] if bias is None else unstacked(bias, 0)
    parts = zip(unstacked(weight, 1), biases, strict=True)
    return jnp.stack([affine(x, *part, on_tpu=True) for part in parts], x.ndim - 1)


def unstacked(x: Shaped[Array, "..."], dim: int) -> list[Shaped[Array, "..."]]:
    """Returns the arrays whose `jnp.stack` along `dim` is `x`. In the backward pass, the gradients
    of these arrays are stacked again. With indexing, as in `x[0], x[1]`, the backward pass would
    sum arrays padded with zeros.
    """
    return [jnp.squeeze(part, dim) for part in lax.split(x, (1,) * x.shape[dim], dim)]


def add_bias(
    y: Float[Array, "..."], bias: Float[Array, "..."], *, on_tpu: bool = False
) -> Float[Array, "..."]:
    """Returns `y + bias`. The dims of `bias` are aligned with the last dims of `y`.

    The gradient of the bias is the sum of all rows of the cotangent. With `on_tpu` the sum is a
    product with ones, since the matrix units of a TPU add up numbers faster than its vector units.
    """
    if not on_tpu:
        return y + jnp.expand_dims(bias, range(y.ndim - bias.ndim))
    rows = y.shape[: y.ndim - bias.ndim]

    def repeated(bias):
        """Returns `bias` broadcast to the shape of `y`, the array to which `add_bias` adds it."""
        return jnp.broadcast_to(bias, y.shape)

    def sum_of_rows(cotangent):
        """Returns the sum of the rows of the cotangent. XLA would turn a product with one row of
        ones into a plain sum. So there are 8 rows of ones, as many as the matrix unit takes at
        once."""
        ones = match_varying(jnp.ones((8, *rows), cotangent.dtype), cotangent)
        wide = accumulation_dtype(cotangent.dtype)
        sums = jnp.tensordot(ones, cotangent, len(rows), preferred_element_type=wide)
        return sums[0].astype(cotangent.dtype)

    # The bias varies as `y` does before it is repeated, so that JAX sums its gradient, and not the
    # cotangent of `y`, over the axes along which only `y` varies.
    return y + linear(match_varying(bias, y), forward=repeated, backward=sum_of_rows)
