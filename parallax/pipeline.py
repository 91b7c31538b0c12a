"""Pipeline parallelism: a checked table of jobs, run by all stages in step, without a conditional and in constant memory.

Legend: P stages, M microbatches, v chunks a stage, F forward, B backward. One program runs on all devices. In each tick every
stage runs the same lanes (F, the head, B), and where the table gives it no job, it computes on what is there and throws the
result away. Which lanes run anywhere is constant over stretches of ticks, so each stretch is one `lax.scan`: a
collective never stands under a predicate that differs between devices, where it would hang.

What a microbatch needs for its backward pass (the residuals of `jax.vjp`, weights left out, or with `remat` the stage's input)
waits in as many slots as the schedule holds at once: 2P - 1 for 1F1B, whatever M is.

Source: Narayanan et al., Efficient large-scale language model training on GPU clusters (arXiv 2104.04473), section 2.2, for
1F1B and its interleaved form; Yeung et al., Balancing pipeline parallelism with vocabulary parallelism (arXiv 2411.05288), for
the shared vocabulary.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Inexact, PyTree, Shaped

from parallax import precision, ticks
from parallax.collectives import ring
from parallax.collectives.replicated import AxisName, like, ordered, size, varying, varying_axes
from parallax.grads import Grad, in_parts
from parallax.schedule import Schedule


def value_and_grad(
    enter: Callable,
    stage: Callable,
    head: Callable,
    schedule: Schedule,
    axis_name: AxisName,
    *,
    where: Callable[[PyTree], PyTree] = lambda params: params.blocks,
    remat: bool = False,
    moves_blocks: bool = False,
    all_reduce: Callable = lax.psum,
    scatter: Callable[[PyTree], PyTree] = lambda gradients: gradients,
) -> Grad:
    """The grad arrow of `head(stage(... stage(enter(batch))))`, its stages run as `schedule` says: inside `mesh.spmd`.

    It equals `jax.value_and_grad` of the mean over M equal microbatches, on one device. The batch has its sequences as the
    first dim of every leaf, and is cut into M parts in order. Gradients are summed, and returned, in float32 or wider; those of
    parameters that are the same on all stages are all-reduced over the stages once, at the end.

    Each tick sends one activation to the next stage and one cotangent to the one before, by a `ppermute` each. The time is
    that of `schedule.makespan`; what is held at once is `schedule.slot_count` times a chunk's residuals.

    Args:
        enter: `(params, part) -> x`: the array that enters the first stage. It runs on all stages in each forward tick, and
            counts on the first. It may be shared out over them, with collectives over `axis_name` inside.
        stage: `(blocks, x, part, position) -> x`: one chunk of layers; `position`, 0 to vP - 1, is its place in the model.
        head: `(params, x, part) -> loss`: a microbatch's mean loss. It runs on all stages, in the ticks in which the last one
            has finished a microbatch. A loss that varies over `axis_name` counts on the last stage; one that is the same on
            all was shared out (begin with `from_last`).
        schedule: the table; its stages are the size of `axis_name`.
        where: picks from `params` what is split over the stages. Each of its arrays has a first dim of v chunks.
        remat: keep the stage's input alone, and recompute the rest in the backward tick.
        moves_blocks: the stage gathers its blocks from other devices (ZeRO-3): they wait for their turn too.
        all_reduce: joins the gradients of the parameters that all stages have.
        scatter: what becomes of each microbatch's gradients before they are added up, such as `zero.scatter`, by which each
            replica keeps sums for its share alone (ZeRO-2). It is given a tree like `params`, with None for what a lane
            does not differentiate and one chunk of the blocks, and runs in each tick of that lane.

    Raises:
        ValueError: the schedule has other stages than the axis, or a weight lane; the batch does not divide by M; an array of
            `where(params)` has no first dim of v; or `stage` changes the shape of `x`.
    """
    if schedule.weight is not None:
        raise ValueError(
            "pipeline.value_and_grad runs schedules of a forward and a backward lane, and this one has a weight lane. "
            "Take schedule.one_f_one_b or schedule.gpipe; schedule.zero_bubble is there to compare and to draw."
        )

    def grad(params, batch):
        _check(schedule, axis_name, where(params))
        weights = eqx.filter(params, eqx.is_inexact_array)
        options = {"remat": remat, "moves_blocks": moves_blocks, "scatter": scatter}
        run = _Run(enter, stage, head, schedule, axis_name, where, varying(params, axis_name), batch, **options)
        loss, sums = run()
        means = jax.tree.map(lambda total: total / schedule.microbatches, sums)
        # What was the same on all stages is reduced; what is split over them is done.
        same = jax.tree.map(lambda w: axis_name not in varying_axes(w), weights)
        results = loss / schedule.microbatches, means
        shared, own = eqx.partition(results, (axis_name in varying_axes(loss), same))
        return eqx.combine(all_reduce(ordered(shared, results), axis_name), own)

    return grad


def value(
    enter: Callable,
    stage: Callable,
    head: Callable,
    schedule: Schedule,
    axis_name: str,
    *,
    where: Callable[[PyTree], PyTree] = lambda params: params.blocks,
    all_reduce: Callable = lax.psum,
) -> Callable[[PyTree, PyTree], Float[Array, ""]]:
    """The loss arrow that `value_and_grad` differentiates, for evaluation: the schedule's forward lane alone, nothing kept.

    Arguments and errors are those of `value_and_grad`.
    """

    def loss(params, batch):
        _check(schedule, axis_name, where(params))
        run = _Run(
            enter,
            stage,
            head,
            schedule,
            axis_name,
            where,
            varying(params, axis_name),
            batch,
            lanes=frozenset({"forward", "head"}),
        )
        loss = run()[0] / schedule.microbatches
        return all_reduce(loss, axis_name) if axis_name in varying_axes(loss) else loss

    return loss


def from_last(x: Shaped[Array, "*dims"], axis_name: AxisName, *, all_reduce: Callable) -> Shaped[Array, "*dims"]:
    """The last stage's `x` on all stages, for a head that they share. One `all_reduce`; its transpose keeps the cotangent."""
    last = lax.axis_index(axis_name) == size(axis_name) - 1
    return all_reduce(jnp.where(last, x, jnp.zeros((), x.dtype)), axis_name)


class _Carry(NamedTuple):
    """What one tick hands to the next."""

    x: Inexact[Array, "..."]  # from the stage before
    ct: Inexact[Array, "..."]  # from the stage after
    slots: list[Shaped[Array, "slots ..."]]
    pending: Inexact[Array, "places ..."]  # cotangents that the head made and the last stage has not used yet
    loss: Float[Array, ""]
    ends: PyTree  # sums of the gradients of what is not split over the stages
    blocks: PyTree  # and of what is: [v, ...]


class _Run:
    """One call: the functions, the schedule, and this device's parameters and batch."""

    def __init__(
        self,
        enter,
        stage,
        head,
        schedule,
        axis_name,
        where,
        params,
        batch,
        *,
        remat=False,
        moves_blocks=False,
        scatter=lambda gradients: gradients,
        lanes=frozenset({"forward", "head", "backward"}),
    ):
        self.user_stage, self.user_head, self.user_enter, self.where = stage, head, enter, where
        self.schedule, self.axis_name, self.remat, self.scatter, self.lanes = schedule, axis_name, remat, scatter, lanes
        self.moves_blocks = moves_blocks
        self.parts = in_parts(batch, schedule.microbatches)
        in_blocks = eqx.tree_at(where, jax.tree.map(lambda _: False, params), replace_fn=_all_true)
        blocks, ends = eqx.partition(params, in_blocks)
        self.blocks, self.static_blocks = eqx.partition(blocks, eqx.is_array)
        self.ends, self.static_ends = eqx.partition(ends, eqx.is_inexact_array)
        self.index = lax.axis_index(axis_name)
        self.first, self.last = self.index == 0, self.index == schedule.stages - 1
        self.x = self._type_of_x()

    def __call__(self) -> tuple[Float[Array, ""], PyTree]:
        """The sums of losses and gradients over all microbatches."""
        rows, stretches = ticks.rows(self.schedule), ticks.stretches(self.schedule)
        carry = self._start(rows)
        done = 0
        for repeats, pattern in ticks.loops(stretches):
            period = sum(length for _, length in pattern)
            of = jax.tree.map(lambda r: jnp.asarray(r[done : done + repeats * period]), rows)  # noqa: B023
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

    def _after(self, carry: _Carry) -> "_Run":
        """This run, where it moves the blocks with blocks that are not to be had before the carry is."""
        waiting = copy.copy(self)
        waiting.blocks = ordered(self.blocks, carry) if self.moves_blocks else self.blocks
        return waiting

    def _tick(self, lanes: frozenset[str], carry: _Carry, row: ticks.Row) -> _Carry:
        """One tick in which these lanes run on all stages: F, then the head, then B, then the exchange, in this order."""
        if "forward" in lanes:
            y, carry = self._forward(carry, row)
        if "head" in lanes:
            carry = self._head(carry, y, row)
        if "backward" in lanes:
            ct, carry = self._backward(carry, row)
            carry = carry._replace(ct=ring.send_next(ct, self.axis_name, distance=-1))
        if "forward" in lanes:  # which head and backward lane do not wait for, and ct waits for all of them
            carry = carry._replace(x=ring.send_next(ordered(y, (carry.loss, carry.ct)), self.axis_name))
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
        return like(self.user_stage(blocks, x, part, position), self.x)

    def _chunk(self, chunk):
        if self.schedule.chunks == 1:
            return jax.tree.map(lambda w: w[0], self.blocks)
        return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, chunk, keepdims=False), self.blocks)

    def _enter(self, ends, microbatch):
        return like(self.user_enter(self._whole(ends), self._part(microbatch)), self.x)

    def _head_loss(self, ends, y, microbatch):
        return self.user_head(self._whole(ends), y, self._part(microbatch))

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
        return self.axis_name not in varying_axes(loss)

    def _type_of_x(self):
        """What travels from stage to stage, as zeros with a replication type: at least what enters and what a stage makes."""
        zero = jnp.zeros((), jnp.int32)
        entering = lambda: varying(self.user_enter(self._whole(self.ends), self._part(zero)), self.axis_name)
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


def _check(schedule: Schedule, axis_name: AxisName, blocks: PyTree) -> None:
    devices = size(axis_name)
    if schedule.stages != devices:
        raise ValueError(
            f"pipeline: the schedule has {schedule.stages} stages, and the mesh axis {axis_name!r} has {devices} devices. "
            f"Make the schedule for stages={devices}."
        )
    for path, leaf in jax.tree.leaves_with_path(eqx.filter(blocks, eqx.is_array)):
        if leaf.ndim == 0 or leaf.shape[0] != schedule.chunks:
            raise ValueError(
                f"pipeline: the blocks' array {jax.tree_util.keystr(path) or 'itself'} has shape {leaf.shape} on a stage, "
                f"and its first dim must be the schedule's chunks, {schedule.chunks}. Reshape L layers to "
                f"[{schedule.chunks}, L / {schedule.chunks}, ...] and split dim 1 over {axis_name!r}."
            )
