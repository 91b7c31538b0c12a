"""Many experts on many rows: sorted by expert, a block of rows at a time, as many blocks as there
is work.

Legend: N rows, R pairs of a row and an expert, E experts here, D width.
"""

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
    """The sum over a row's experts of weight times result: `x[N, D] -> y[N, D]`."""

    def __call__(
        self,
        experts: PyTree,
        x: Float[Array, "rows width"],
        source: Int[Array, " pairs"],
        ids: Int[Array, " pairs"],
        weights: Float[Array, " pairs"],
        /,
    ) -> Float[Array, "rows width"]:
        """Pair r sends row `source[r]` to expert `ids[r]`, and to none where that is E."""
        ...


def call_module(expert: Any, rows: Float[Array, "rows width"]) -> Float[Array, "rows width"]:
    """An expert that is a module of rows: `expert(rows)`."""
    return expert(rows)


def grouped(expert: Expert = call_module, *, size: int = 128) -> ExpertCompute:
    """Runs `expert(its parameters, rows)` block after block: what is computed is what there is,
    with no room for the worst case.

    Pairs are sorted by expert, and each expert's are cut into blocks of `size` rows, the last one
    filled up. A loop runs over the blocks, so it takes sum over experts of ceil(pairs / size) times
    `size` rows of work, and holds one block of what the expert computes inside. The backward pass
    runs the same loop, and computes each block again: 4 units of work for 3.

    Any function will do that treats each row by itself. It is differentiated once, in reverse.

    Args:
        expert: `(parameters, [rows, D]) -> [rows, D]`; the parameters have no dim of experts.
        size: rows in a block. On a CPU 128; an accelerator with fast products wants more.

    Raises:
        ValueError: `expert` returns rows of another shape or type; or size is below 1.
    """
    if size < 1:
        raise ValueError(
            f"experts.grouped: a block needs 1 row or more; got size={size}. Take 128."
        )

    def compute(experts, x, source, ids, weights):
        trained, rest = eqx.partition(experts, eqx.is_inexact_array)
        others, static = eqx.partition(rest, eqx.is_array)
        run = _loops(
            lambda trained, others, rows: expert(eqx.combine(trained, others, static), rows), size
        )
        arguments = trained, others, x, source, ids, weights
        return run(
            *varying(
                arguments,
                tuple({name for leaf in jax.tree.leaves(arguments) for name in varying_axes(leaf)}),
            )
        )

    return compute


class Block(NamedTuple):
    """One block of rows, the last of which may be there to fill it up.

    Attributes:
        expert: whose rows they are.
        read: the rows of x; the last one that counts fills up, so all that is computed is finite.
        written: the same, and out of range, each another number, where a row does not count.
        pair: of each row, and out of range likewise.
    """

    expert: Int[Array, ""]
    read: Int[Array, " size"]
    written: Int[Array, " size"]
    pair: Int[Array, " size"]


def _table(
    source: Array, ids: Array, rows: int, count: int, size: int
) -> tuple[Callable[[Array], Block], Array]:
    """A function from a block's number to the block, and the number of blocks."""
    pairs = len(ids)
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    starts = jnp.searchsorted(ids[order], jnp.arange(count + 1, dtype=ids.dtype)).astype(jnp.int32)
    ends = jnp.cumsum(-(-jnp.diff(starts) // size), dtype=jnp.int32)  # of each expert, in blocks
    within = jnp.arange(size, dtype=jnp.int32)

    def block(j):
        expert = jnp.searchsorted(ends, j, side="right").astype(jnp.int32)
        before = jnp.where(expert > 0, ends[expert - 1], 0)
        place = starts[expert] + (j - before) * size + within
        counts = place < starts[expert + 1]
        pair = order[jnp.minimum(place, starts[expert + 1] - 1)]
        read = source[pair]
        return Block(
            expert,
            read,
            jnp.where(counts, read, rows + within),
            jnp.where(counts, pair, pairs + within),
        )

    return block, ends[-1]


def _loops(expert: Callable[[PyTree, PyTree, Array], Array], size: int) -> Callable[..., Array]:
    """The loop over blocks and its transpose."""
    at = lambda tree, i: jax.tree.map(
        lambda w: lax.dynamic_index_in_dim(w, i, keepdims=False), tree
    )
    add = lambda total, index, term: total.at[index].add(
        term.astype(total.dtype), mode="drop", unique_indices=True
    )
    take = lambda x, index: x.at[index].get(mode="fill", fill_value=0, unique_indices=True)
    zeros = lambda x: jnp.zeros_like(x, dtype=accumulation_dtype(x.dtype))

    def apply(trained, others, rows):
        made = expert(trained, others, rows)
        if (made.shape, made.dtype) != (rows.shape, rows.dtype):
            form = lambda x: f"{x.dtype}{list(x.shape)}"
            raise ValueError(
                f"experts: an expert must return rows like those that it takes, {form(rows)}; it "
                f"returned {form(made)}. Let its last layer be of the model's width and type."
            )
        return made

    def blocks_of(trained, others, x, source, ids):
        return _table(source, ids, len(x), _count(trained, others), size)

    @jax.custom_vjp
    def run(trained, others, x, source, ids, weights):
        block, count = blocks_of(trained, others, x, source, ids)

        def body(j, y):
            one = block(j)
            made = apply(at(trained, one.expert), at(others, one.expert), x[one.read])
            return add(y, one.written, made * take(weights, one.pair)[:, None].astype(made.dtype))

        return lax.fori_loop(jnp.zeros_like(count), count, body, zeros(x)).astype(x.dtype)

    def forward(*arguments):
        return run(*arguments), arguments

    def backward(arguments, ct):
        trained, others, x, source, ids, weights = arguments
        block, count = blocks_of(trained, others, x, source, ids)

        def body(j, sums):
            one = block(j)
            of = lambda w, rows: apply(w, at(others, one.expert), rows)
            made, transposed = jax.vjp(of, at(trained, one.expert), x[one.read])
            back = take(ct, one.written)
            d_trained, d_rows = transposed(
                back * take(weights, one.pair)[:, None].astype(back.dtype)
            )
            d_weights = jnp.sum(made.astype(sums[2].dtype) * back.astype(sums[2].dtype), axis=-1)
            return (
                jax.tree.map(
                    lambda total, d: total.at[one.expert].add(d.astype(total.dtype)),
                    sums[0],
                    d_trained,
                ),
                add(sums[1], one.written, d_rows),
                add(sums[2], one.pair, d_weights),
            )

        sums = lax.fori_loop(
            jnp.zeros_like(count), count, body, jax.tree.map(zeros, (trained, x, weights))
        )
        d_trained, d_x, d_weights = jax.tree.map(
            lambda total, x: total.astype(x.dtype), sums, (trained, x, weights)
        )
        return d_trained, jax.tree.map(lambda _: None, others), d_x, None, None, d_weights

    run.defvjp(forward, backward)
    return run


def _count(*trees: PyTree) -> int:
    return jax.tree.leaves(trees)[0].shape[0]
