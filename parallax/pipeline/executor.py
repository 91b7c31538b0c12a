"""One run of a pipeline: ticks, lanes and slots, as `arrows` uses them.

Legend: P stages, M microbatches, v chunks a stage, F forward, B backward.
"""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Inexact, Shaped

from parallax import precision
from parallax.collectives import Axis, send_next
from parallax.collectives.cpu import ordered
from parallax.collectives.types import like, varying
from parallax.grads import in_parts, missing, varies
from parallax.pipeline.rows import Row, loops, rows, stretches
from parallax.schedule import Schedule
from parallax.typed import PyTree


class _Carry(NamedTuple):
    """What one tick hands to the next."""

    x: Inexact[Array, "..."]  # from the stage before
    ct: Inexact[Array, "..."]  # from the stage after
    slots: list[Shaped[Array, "slots ..."]]
    pending: Inexact[Array, "places ..."]  # cotangents that the head made and the last stage has not used yet
    loss: Float[Array, ""]
    ends: PyTree  # sums of the gradients of what is not split over the stages
    blocks: PyTree  # and of what is: [v, ...]


class Shares(NamedTuple):
    """What ZeRO does inside the stages of a pipeline.

    Attributes:
        scatter: what becomes of each microbatch's gradients before they are added up, such as `zero.scatter`, by which each
            replica keeps sums for its share alone (ZeRO-2). It is given a tree like the parameters, with None for what a lane
            does not differentiate and one chunk of the blocks, and runs in each tick of that lane.
        gathers: the stage gathers its blocks from other devices (ZeRO-3): they wait for their turn too.
    """

    scatter: Callable[[PyTree], PyTree] = lambda gradients: gradients
    gathers: bool = False


WHOLE = Shares()


class Stages(NamedTuple):
    """The user's functions, and what becomes of the parameters: the arguments of `pipeline.value_and_grad`."""

    enter: Callable[..., Any]
    stage: Callable[..., Any]
    head: Callable[..., Any]
    where: Callable[[PyTree], PyTree]
    remat: bool
    shares: Shares


class Run:
    """One call: the functions, the schedule, this device's parameters and batch. Without `backward` it makes the loss alone."""

    def __init__(self, stages: Stages, schedule: Schedule, axis: Axis, params: PyTree, batch: PyTree, *, backward: bool):
        self.user, self.where, self.remat = stages, stages.where, stages.remat
        self.scatter, self.schedule, self.axis = stages.shares.scatter, schedule, axis
        self.lanes = {"forward", "head", "backward"} if backward else {"forward", "head"}
        self.parts = in_parts(batch, schedule.microbatches)
        in_blocks = eqx.tree_at(self.where, jax.tree.map(lambda _: False, params), replace_fn=_all_true)
        blocks, ends = eqx.partition(params, in_blocks)
        self.blocks, self.static_blocks = eqx.partition(blocks, eqx.is_array)
        self.ends, self.static_ends = eqx.partition(ends, eqx.is_inexact_array)
        self.index = axis.index()
        self.first, self.last = self.index == 0, self.index == schedule.stages - 1
        self.x = self._type_of_x()

    def __call__(self) -> tuple[Float[Array, ""], PyTree]:
        """The sums of losses and gradients over all microbatches."""
        table = rows(self.schedule)
        carry = self._start(table)
        done = 0
        for repeats, pattern in loops(stretches(self.schedule)):
            period = sum(length for _, length in pattern)
            of = jax.tree.map(lambda r: jnp.asarray(r[done : done + repeats * period]), table)  # noqa: B023
            carry = self._repeat(carry, repeats, pattern, of)
            done += repeats * period
        return carry.loss, eqx.combine(carry.ends, carry.blocks)

    def _repeat(self, carry, repeats: int, pattern, rows):
        """Run `pattern`, a few stretches one after another, `repeats` times."""

        def once(carry, rows):
            begin = 0
            for lanes, length in pattern:
                of = jax.tree.map(lambda r: r[begin : begin + length], rows)  # noqa: B023
                run = lanes & self.lanes
                # XLA writes out a loop of one tick, and no collective of that may overtake the loop before.
                of, ticking = (ordered(of, carry), self._after(carry)) if length == 1 else (of, self)
                carry = lax.scan(lambda carry, row: (ticking._tick(run, carry, row), None), carry, of)[0] if run else carry  # noqa: B023
                begin += length
            return carry, None

        if repeats == 1:
            return once(carry, rows)[0]
        return lax.scan(once, carry, jax.tree.map(lambda r: r.reshape(repeats, -1, *r.shape[1:]), rows))[0]

    def _after(self, carry: _Carry) -> "Run":
        """This run, where it moves the blocks with blocks that are not to be had before the carry is."""
        waiting = copy.copy(self)
        waiting.blocks = ordered(self.blocks, carry) if self.user.shares.gathers else self.blocks
        return waiting

    def _tick(self, lanes: frozenset[str], carry: _Carry, row: Row) -> _Carry:
        """One tick in which these lanes run on all stages: F, then the head, then B, then the exchange, in this order."""
        if "forward" in lanes:
            y, carry = self._forward(carry, row)
        if "head" in lanes:
            carry = self._head(carry, y, row)
        if "backward" in lanes:
            ct, carry = self._backward(carry, row)
            carry = carry._replace(ct=send_next(ct, self.axis.names, distance=-1))
        if "forward" in lanes:  # which head and backward lane do not wait for, and ct waits for all of them
            carry = carry._replace(x=send_next(ordered(y, (carry.loss, carry.ct)), self.axis.names))
        return carry

    def _forward(self, carry, row):
        microbatch, chunk, _ = self._job(row.forward)
        x = jnp.where(self.first & (chunk == 0), self._enter(self.ends, row.entering), carry.x)
        y, residuals = self._stage_and_residuals(x, microbatch, chunk)
        slot = row.written[self.index]
        slots = [lax.dynamic_update_index_in_dim(s, r, slot, 0) for s, r in zip(carry.slots, residuals, strict=True)]
        return y, carry._replace(slots=slots)

    def _head(self, carry, y, row):
        def loss_of(ends, y):
            loss = self._head_loss(ends, y, row.finished)
            return loss if self._shared(loss) else jnp.where(self.last, loss, jnp.zeros((), loss.dtype))

        if "backward" not in self.lanes:
            return carry._replace(loss=carry.loss + loss_of(self.ends, y).astype(carry.loss.dtype))
        loss, (ends, ct) = jax.value_and_grad(loss_of, argnums=(0, 1))(self.ends, y)
        counts = jnp.ones((), bool) if self._shared(loss) else self.last
        return carry._replace(
            loss=carry.loss + loss.astype(carry.loss.dtype),
            ends=_added(carry.ends, self.scatter(ends), counts),
            pending=lax.dynamic_update_index_in_dim(carry.pending, ct, row.put, 0),
        )

    def _backward(self, carry, row):
        microbatch, chunk, valid = self._job(row.backward)
        from_head = lax.dynamic_index_in_dim(carry.pending, row.taken, keepdims=False)
        ct = jnp.where(self.last & (chunk == self.schedule.chunks - 1), from_head, carry.ct)
        ct = jnp.where(valid, ct, jnp.zeros((), ct.dtype))
        slot = row.read[self.index]
        residuals = [lax.dynamic_index_in_dim(s, slot, keepdims=False) for s in carry.slots]
        weights, ct = self._transposed(residuals, microbatch, chunk)(ct)
        weights = self._scattered(weights)
        blocks = jax.tree.map(
            lambda total, d: total.at[chunk].add(jnp.where(valid, d, jnp.zeros((), d.dtype)).astype(total.dtype)),
            carry.blocks,
            weights,
        )
        leaves = self.first & (chunk == 0) & valid
        _, enter_transposed = jax.vjp(lambda ends: self._enter(ends, row.leaving), self.ends)
        (ends,) = enter_transposed(jnp.where(leaves, ct, jnp.zeros((), ct.dtype)))
        return ct, carry._replace(blocks=blocks, ends=_added(carry.ends, self.scatter(ends), jnp.ones((), bool)))

    def _stage_and_residuals(self, x, microbatch, chunk):
        """The stage's output, and what its backward tick needs that is not at hand there."""
        weights, part = self._at_hand(microbatch, chunk)
        if "backward" not in self.lanes:
            return self._stage(weights, x, part, chunk), []
        if self.remat:
            return self._stage(weights, x, part, chunk), [x]
        y, transposed = jax.vjp(lambda weights, x: self._stage(weights, x, part, chunk), weights, x)
        known = jax.tree.leaves((weights, part))
        leaves, self.structure = jax.tree.flatten(transposed)
        self.known = [next((i for i, k in enumerate(known) if k is leaf), None) for leaf in leaves]
        return y, [leaf for leaf, i in zip(leaves, self.known, strict=True) if i is None]

    def _transposed(self, residuals, microbatch, chunk):
        """The stage's transpose, `ct -> (weights, x)`, from what `_stage_and_residuals` kept."""
        weights, part = self._at_hand(microbatch, chunk)
        if self.remat:
            return jax.vjp(lambda weights, x: self._stage(weights, x, part, chunk), weights, residuals[0])[1]
        kept, known = iter(residuals), jax.tree.leaves((weights, part))
        return jax.tree.unflatten(self.structure, [next(kept) if i is None else known[i] for i in self.known])

    def _scattered(self, weights):
        """`scatter` of one chunk's gradients, which it sees as blocks of a single chunk."""
        return jax.tree.map(lambda d: d[0], self.scatter(jax.tree.map(lambda d: d[None], weights)))

    def _at_hand(self, microbatch, chunk):
        """What is there in both ticks, and no slot needs to hold: a chunk's weights, and the microbatch."""
        return eqx.filter(self._chunk(chunk), eqx.is_inexact_array), self._part(microbatch)

    def _stage(self, weights, x, part, chunk):
        blocks = self.where(eqx.combine(weights, self._chunk(chunk), self.static_blocks))
        position = chunk * self.schedule.stages + self.index
        return like(self.user.stage(blocks, x, part, position), self.x)

    def _chunk(self, chunk):
        if self.schedule.chunks == 1:
            return jax.tree.map(lambda w: w[0], self.blocks)
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, chunk, keepdims=False), self.blocks)

    def _enter(self, ends, microbatch):
        return like(self.user.enter(self._whole(ends), self._part(microbatch)), self.x)

    def _head_loss(self, ends, y, microbatch):
        return self.user.head(self._whole(ends), y, self._part(microbatch))

    def _whole(self, ends):
        return eqx.combine(ends, self.static_ends, self.blocks, self.static_blocks)

    def _part(self, microbatch):
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, microbatch, keepdims=False), self.parts)

    def _job(self, jobs):
        """This stage's microbatch, its chunk, and whether it has a job in this tick at all."""
        job = jobs[self.index]
        microbatch, chunk = jnp.divmod(jnp.maximum(job, 0), self.schedule.chunks)
        return microbatch, chunk, job >= 0

    def _shared(self, loss) -> bool:
        return not varies(loss, self.axis)

    def _type_of_x(self):
        """What travels from stage to stage, as zeros with a replication type: at least what enters and what a stage makes."""
        zero = jnp.zeros((), jnp.int32)
        entering = lambda: varying(self.user.enter(self._whole(self.ends), self._part(zero)), self.axis.names)
        self.x = jnp.zeros_like(jax.eval_shape(entering))
        weights, part = self._at_hand(zero, zero)
        y = jax.eval_shape(lambda: self._stage(weights, self.x, part, zero))
        if (y.shape, y.dtype) != (self.x.shape, self.x.dtype):
            raise ValueError(
                f"pipeline: a stage must return what it takes, {self.x.dtype}{list(self.x.shape)}, since its output is the next "
                f"stage's input; it returned {y.dtype}{list(y.shape)}. Move what changes the shape into enter or head."
            )
        return jnp.zeros_like(y)

    def _start(self, rows) -> _Carry:
        zero = jnp.zeros((), jnp.int32)
        residuals = jax.eval_shape(lambda: self._stage_and_residuals(self.x, self.index * 0, self.index * 0)[1])
        loss = jax.eval_shape(lambda: self._head_loss(self.ends, self.x, zero))
        stacked = lambda struct, count: jnp.broadcast_to(jnp.zeros_like(struct), (count, *struct.shape))
        wide = lambda w: jnp.zeros_like(w, dtype=precision.wide(w.dtype))
        return _Carry(
            x=self.x,
            ct=self.x,
            slots=[stacked(residual, int(rows.written.max()) + 1) for residual in residuals],
            pending=stacked(self.x, int(rows.put.max()) + 1),
            loss=jnp.zeros_like(loss, dtype=precision.wide(loss.dtype)),
            ends=jax.tree.map(wide, jax.eval_shape(self.scatter, self.ends)),
            blocks=jax.tree.map(wide, jax.eval_shape(self.scatter, eqx.filter(self.blocks, eqx.is_inexact_array))),
        )


def _added(sums: PyTree, terms: PyTree, counts: Bool[Array, ""]) -> PyTree:
    """`sums` plus `terms` where they count; what does not count may be anything, even not a number."""
    zero = lambda d: jnp.zeros((), d.dtype)
    return jax.tree.map(lambda total, d: total + jnp.where(counts, d, zero(d)).astype(total.dtype), sums, terms)


def _all_true(subtree: Any) -> Any:
    return jax.tree.map(lambda _: True, subtree)


def check(schedule: Schedule, axis: Axis, blocks: PyTree) -> None:
    """Refuse with a `ValueError` a schedule of other stages than the axis, or blocks that are not cut into its chunks."""
    devices = axis.size()
    if schedule.stages != devices:
        raise ValueError(
            f"pipeline: the schedule has {schedule.stages} stages, and the mesh axis {axis.names!r} has {devices} devices. "
            f"Make the schedule for stages={devices}."
        )
    for path, leaf in jax.tree.leaves_with_path(eqx.filter(blocks, eqx.is_array)):
        same = missing(leaf, axis)
        if math.prod(Axis(name).size() for name in same) > 1:
            raise ValueError(
                f"pipeline: the blocks' array {jax.tree_util.keystr(path) or 'itself'}, of shape {leaf.shape} on a stage, is the "
                f"same along {axis.names!r}, so each of the {devices} stages would run all layers. Split its layers dim, as "
                f"[{schedule.chunks}, L / {schedule.chunks}, ...] under P(None, {axis.names!r}); L must divide by "
                f"{schedule.chunks * devices}, the chunks of all stages."
            )
        if leaf.ndim == 0 or leaf.shape[0] != schedule.chunks:
            raise ValueError(
                f"pipeline: the blocks' array {jax.tree_util.keystr(path) or 'itself'} has shape {leaf.shape} on a stage, "
                f"and its first dim must be the schedule's chunks, {schedule.chunks}. Reshape L layers to "
                f"[{schedule.chunks}, L / {schedule.chunks}, ...] and split dim 1 over {axis.names!r}."
            )
