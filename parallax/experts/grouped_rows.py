"""Runs the experts of a device: pairs of a row and an expert are sorted and cut into blocks.

Pair r sends row `source[r]` of x to expert `ids[r]`. The expert's result, times `weights[r]`, is
added to the same row of the output y. An id equal to the number of experts on the device means no
expert.

Each block has rows for one expert; *filling rows* fill up the expert's last block. For each of its
rows, a block has three indices: `read`, `written` and `pair`. The row is a copy of row `read` of x.
The expert's result for the row, times the weight of pair `pair`, is added to row `written` of y.
Filling rows must add nothing to y, so their `written` and `pair` are out of range: there `_take`
gives 0, and `_add` adds nothing. An expert has `trained` arrays, which are differentiated, and
`others`, which are not.

Legend: N rows, R pairs of a row and an expert, E experts on the device, D width.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from parallax._typing import PyTree
from parallax.collectives.types import accumulation_dtype, varying, varying_axes

Expert = Callable[[Any, Float[Array, "rows width"]], Float[Array, "rows width"]]


@runtime_checkable
class ExpertCompute(Protocol):
    """Computes for each row the weighted sum of its experts' results: `x[N, D] -> y[N, D]`."""

    def __call__(
        self,
        experts: PyTree,
        x: Float[Array, "rows width"],
        source: Int[Array, " pairs"],
        ids: Int[Array, " pairs"],
        weights: Float[Array, " pairs"],
        /,
    ) -> Float[Array, "rows width"]:
        """Returns for each row the weighted sum of its experts' results, [N, D].

        The arrays of `experts` have a first dim of experts. Pair r sends row `source[r]` to expert
        `ids[r]`, and `weights[r]` is the factor of the expert's result. An id equal to the number
        of experts means no expert.
        """
        ...


def call_module(expert: Any, rows: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
    """Returns `expert(rows)`, for an expert that is a module."""
    return expert(rows)


def grouped(expert: Expert = call_module, *, size: int = 128) -> ExpertCompute:
    """Returns an `ExpertCompute` that runs `expert(parameters, rows)` block by block.

    Pairs are sorted by expert. Each expert's pairs are cut into blocks of `size` rows, and the last
    block is filled up. A loop runs over the blocks: ceil(pairs / size) blocks for each expert. So
    no work is done for an expert without tokens, whatever the routing. The loop holds the
    activations of one block. The backward pass runs the same loop and computes each block again,
    so forward and backward together take the work of 4 forward passes instead of 3.

    `expert` must treat each row by itself. The result has only a first derivative, in reverse mode.

    Args:
        expert: `(parameters, [rows, D]) -> [rows, D]`; the parameters have no dim of experts. By
            default the parameters are a module, which is called with the rows.
        size: the number of rows of a block. Use 128 on a CPU, and more on an accelerator with fast
            matmuls.

    Raises:
        ValueError: `expert` returns rows of another shape or dtype; or size is below 1.
    """
    if size < 1:
        raise ValueError(f"experts.grouped: a block needs 1 row or more; got size={size}. Use 128.")

    def compute(experts, x, source, ids, weights):
        """Returns for each row the weighted sum of its experts' results, [N, D]."""
        trained, untrained = eqx.partition(experts, eqx.is_inexact_array)
        others, static = eqx.partition(untrained, eqx.is_array)

        def apply(trained, others, rows):
            """Returns the results of one expert, from its trained and its other arrays."""
            results = expert(eqx.combine(trained, others, static), rows)
            _check_results(results, rows)
            return results

        arguments = trained, others, x, source, ids, weights
        # All axes along which an argument varies, each once; a dict keeps their order.
        axes = {name: None for leaf in jax.tree.leaves(arguments) for name in varying_axes(leaf)}
        # All arguments vary along the same axes, since a loop's carry must not change its type.
        return _loops(apply, size)(*varying(arguments, tuple(axes)))

    return compute


def _check_results(results: Array, rows: Array) -> None:
    """Raises `ValueError` unless an expert's results have the shape and dtype of its rows."""
    if (results.shape, results.dtype) != (rows.shape, rows.dtype):
        needed, got = (f"{x.dtype}{list(x.shape)}" for x in (rows, results))
        raise ValueError(
            f"experts: an expert must return rows of the same shape and dtype as its input, "
            f"{needed}; it returned {got}. Make its last layer return the model's width and dtype."
        )


class Block(NamedTuple):
    """One block of rows for one expert. If the expert has too few pairs to fill the block, the last
    rows are *filling rows*, which add nothing to the results.

    Attributes:
        expert: the number of the expert.
        read: for each row of the block, the row of x to read. Filling rows are copies of the
            expert's last row, so that all computed numbers are finite.
        written: for each row of the block, the row of the result to add to. It is the same as
            `read`, but out of range for filling rows, whose results are not written.
        pair: for each row of the block, the index of the pair (row of x, expert) that the row
            belongs to; out of range for filling rows.
    """

    expert: Int[Array, ""]
    read: Int[Array, " size"]
    written: Int[Array, " size"]
    pair: Int[Array, " size"]


def _table(
    source: Array, ids: Array, rows: int, count: int, size: int
) -> tuple[Callable[[Array], Block], Array]:
    """Returns two things: a function that takes the index of a block and returns the block, and the
    count of all blocks. A *pair* is a row of x and an expert that runs on it.

    Args:
        source: for each pair, the index of its row of x.
        ids: for each pair, the index of its expert; `count` means no expert.
        rows: the number of rows of x.
        count: the number of experts.
        size: the number of rows of a block.
    """
    pairs = len(ids)
    # Pairs without an expert have the greatest number, `count`, so they come last and are in no
    # block.
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    # starts[e]: the place of the first pair of expert e among the sorted pairs. The last entry is
    # the place after the last pair that has an expert.
    starts = jnp.searchsorted(ids[order], jnp.arange(count + 1, dtype=ids.dtype)).astype(jnp.int32)
    # ends[e]: the number of blocks of the experts 0 to e.
    ends = jnp.cumsum(-(-jnp.diff(starts) // size), dtype=jnp.int32)
    within = jnp.arange(size, dtype=jnp.int32)

    def block(j):
        """Returns block j.

        `ends[e]` is the number of blocks of the experts 0 to e, so the block's expert is the first
        e with `ends[e]` > j. `order` sorts the pairs by expert. `starts[e]` is the place of the
        first pair of expert e among the sorted pairs. Row i of the block is for the pair at
        `place[i]` among the sorted pairs. If the expert has no pair there, row i only fills up the
        block. `within[i]` is i.
        """
        expert = jnp.searchsorted(ends, j, side="right").astype(jnp.int32)
        # The number of blocks of earlier experts.
        before = jnp.where(expert > 0, ends[expert - 1], 0)
        place = starts[expert] + (j - before) * size + within
        is_pair = place < starts[expert + 1]  # false for filling rows
        # Filling rows copy the row of x of the expert's last pair. The expert computes them too,
        # and might turn rows of zeros into NaN, as a norm does.
        pair = order[jnp.minimum(place, starts[expert + 1] - 1)]
        read = source[pair]
        # The `written` and the `pair` of filling rows are out of range, so they add nothing.
        return Block(expert, read, jnp.where(is_pair, read, rows), jnp.where(is_pair, pair, pairs))

    return block, ends[-1]


def _loops(expert: Callable[[PyTree, PyTree, Array], Array], size: int) -> Callable[..., Array]:
    """Returns a function that runs all experts in a loop over blocks. The function has a custom
    derivative: its backward pass is a loop over blocks too.

    `expert` takes `(trained, others, rows)`: the trained and the other arrays of one expert, and
    the rows of one block, `size` of them.
    """

    # The number of blocks depends on the routing, and JAX does not differentiate such a loop.
    @jax.custom_vjp
    def run(trained, others, x, source, ids, weights):
        """Returns for each row the weighted sum of its experts' results, [N, D]."""
        block_of, count = _table(source, ids, len(x), _count(trained, others), size)

        def body(j, y):
            """Returns `y` with the weighted results of block j added."""
            # Each row of the block is a copy of row `read` of x. The expert's result for it, times
            # the weight of pair `pair`, is added to row `written` of y. For filling rows `written`
            # and `pair` are out of range: `_take` gives a weight of 0, and `_add` adds nothing.
            block = block_of(j)
            results = _apply(expert, others, block, _at(trained, block.expert), x[block.read])
            scale = _take(weights, block.pair)[:, None].astype(results.dtype)
            return _add(y, block.written, results * scale)

        # The sum is in float32 or wider (`_zeros`), and is cast at the end. Both bounds must have
        # one type, so the first is made from the second.
        return lax.fori_loop(jnp.zeros_like(count), count, body, _zeros(x)).astype(x.dtype)

    def forward(*arguments):
        return run(*arguments), arguments

    def backward(arguments, cotangent_of_y):
        """Returns the gradients of `trained`, `x` and `weights`, and None for other arguments."""
        trained, others, x, source, ids, weights = arguments
        block_of, count = _table(source, ids, len(x), _count(trained, others), size)

        def body(j, sums):
            """Returns the sums of the gradients of (trained, x, weights), with the terms of block j
            added.

            The block's results are computed again. `_at` picks one expert's arrays, and `_take`
            picks rows.
            """
            # Each row of the block copies row `read` of x, its gradient is added to row `written`
            # of the gradient of x, and its weight is that of pair `pair`. For filling rows
            # `written` and `pair` are out of range: `_take` gives 0, and `_add` ignores these rows.
            block = block_of(j)
            local_expert = functools.partial(_apply, expert, others, block)
            results, transpose = jax.vjp(local_expert, _at(trained, block.expert), x[block.read])
            cotangent = _take(cotangent_of_y, block.written)
            scale = _take(weights, block.pair)[:, None].astype(cotangent.dtype)
            d_trained, d_rows = transpose(cotangent * scale)
            trained_sum, x_sum, weights_sum = sums
            # The type of `weights_sum` is float32 or wider. But if complex results have real
            # weights, the product needs both parts of the results, and the sum takes the real part.
            kind = results.dtype if jnp.iscomplexobj(results) else weights_sum.dtype
            # A weight multiplies its result, so its gradient is result times cotangent.
            d_weights = jnp.sum(results.astype(kind) * cotangent.astype(kind), axis=-1)
            if not jnp.iscomplexobj(weights):
                d_weights = jnp.real(d_weights)
            return (
                jax.tree.map(functools.partial(_add_at, block.expert), trained_sum, d_trained),
                _add(x_sum, block.written, d_rows),
                _add(weights_sum, block.pair, d_weights),
            )

        # The sums are in float32 or wider (`_zeros`), and are cast to the arrays' types at the end.
        differentiated = trained, x, weights
        sums = jax.tree.map(_zeros, differentiated)
        # Both bounds must have one type, so the first is made from the second.
        sums = lax.fori_loop(jnp.zeros_like(count), count, body, sums)
        d_trained, d_x, d_weights = jax.tree.map(_as_type_of, sums, differentiated)
        no_gradient = jax.tree.map(lambda _: None, others)
        # Whole numbers, `source` and `ids`, have no gradient either.
        return d_trained, no_gradient, d_x, None, None, d_weights

    run.defvjp(forward, backward)
    return run


def _apply(
    expert: Callable[..., Array], others: PyTree, block: Block, trained: PyTree, rows: Array
) -> Array:
    """Returns the results of the block's expert for `rows`.

    `trained` has the trained arrays of this expert only, so their gradients have the size of one
    expert. `others` has the untrained arrays of all experts, with a first dim of experts.
    """
    return expert(trained, _at(others, block.expert), rows)


def _at(tree: PyTree, i: Array) -> PyTree:
    """Returns element i of each array along its first dim: the arrays of expert i."""
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, i, keepdims=False), tree)


def _take(x: Array, index: Array) -> Array:
    """Returns the rows of `x` at `index`. An index out of range gives a row of zeros."""
    return x.at[index].get(mode="fill", fill_value=0)


def _add(total: Array, index: Array, term: Array) -> Array:
    """Returns `total` with `term` added at `index`. Terms whose index is out of range are
    ignored."""
    # A router may choose an expert twice for a token, so a row may come twice in a block.
    return total.at[index].add(term.astype(total.dtype), mode="drop")


# Adds the gradient of expert i to the sum [E, ...].
def _add_at(i: Array, total: Array, term: Array) -> Array:
    return total.at[i].add(term.astype(total.dtype))


def _zeros(x: Array) -> Array:
    """Returns zeros of the shape of `x` for a sum: in float32 or wider."""
    return jnp.zeros_like(x, dtype=accumulation_dtype(x.dtype))


def _as_type_of(total: Array, x: Array) -> Array:
    return total.astype(x.dtype)


def _count(*trees: PyTree) -> int:
    """Returns the number of experts: the first dim of their arrays."""
    return jax.tree.leaves(trees)[0].shape[0]
