"""The jobs of a pipeline on one device: pure functions, each of them traced once.

Legend: P stages, M microbatches, v chunks a stage, F forward, B backward, or in two halves I, the input's cotangent, and W, the
gradients of the weights.

A job takes the parameters, what was saved in a slot, and what arrived. It returns what is sent, what is to be saved, and terms
of the sums. When a job runs, and what becomes of its results, is for the executors to say: `lockstep` and `per_stage`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from parallax import taps
from parallax._typing import PyTree
from parallax.collectives import Axis, send_next
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import match_varying, varying, varying_axes
from parallax.grads import axes_of, split_into_microbatches, varies_along
from parallax.jaxprs import opened
from parallax.pipeline import checks, traced
from parallax.pipeline.buffers import (
    Counts,
    added,
    chosen,
    loaded,
    masked,
    put,
    saved_in,
    slots_for,
    stacked,
    wide_zeros,
)
from parallax.pipeline.exchange import Exchange
from parallax.pipeline.rows import Row
from parallax.pipeline.save import Save
from parallax.pipeline.traced import Traced, trace
from parallax.schedule import Schedule
from parallax.split_backward import split


class Functions(NamedTuple):
    """The user's functions, and how they see parameters: arguments of `pipeline.value_and_grad`."""

    embed: Callable[..., Any]
    stage: Callable[..., Any]
    head: Callable[..., Any]
    blocks: Callable[[PyTree], PyTree]
    trainable: PyTree


class Parameters(NamedTuple):
    """Parameters by what becomes of them: four trees of one structure, with None for what is in another.

    Attributes:
        blocks: what is trained of the blocks: [v, ...] each, or one chunk of them.
        ends: what is trained of the rest.
        fixed_blocks: the blocks' other arrays.
        fixed: all that is left, and what is no array.
    """

    blocks: PyTree
    ends: PyTree
    fixed_blocks: PyTree
    fixed: PyTree

    def whole(self) -> PyTree:
        """The parameters as the user's functions take them."""
        return eqx.combine(*self)


class Task(NamedTuple):
    """This stage's job in a tick.

    Attributes:
        microbatch: its number.
        chunk: of this stage's layers.
        position: the chunk's place in the model.
        valid: whether the table has a job here; True where nothing would run otherwise.
    """

    microbatch: Int[Array, ""]
    chunk: Int[Array, ""]
    position: Int[Array, ""]
    valid: Counts


class Trained(NamedTuple):
    """What a stage is differentiated in: its chunk of the blocks, and those of the ends that it reads."""

    blocks: PyTree
    ends: PyTree


class Given(NamedTuple):
    """What else a stage is given, at hand in its forward and in its backward tick: no slot needs to hold it."""

    params: Parameters
    microbatch: PyTree
    position: Int[Array, ""]
    number: Int[Array, ""] | None  # of the microbatch, or -1: for taps, while a record is made


class Sums(NamedTuple):
    """What is added up over a step.

    Attributes:
        loss: the head's.
        terms: the stages' own terms of the loss; None where they have none.
        of_head: the head's auxiliary values, [M, ...] each.
        of_stages: the stage's auxiliary values, [M, v, ...] each.
        ends: gradients of what is not split over the stages.
        blocks: and of what is, [v, ...] each.
    """

    loss: Float[Array, ""]
    terms: Float[Array, ""] | None
    of_head: PyTree
    of_stages: PyTree
    ends: PyTree
    blocks: PyTree


class Carry(NamedTuple):
    """What one tick hands to the next, and one job to those after it.

    Attributes:
        arrived: activations and cotangents that came, or are to be sent; the executor says in what form.
        saved: the slots of what F saves for B, or for I and W.
        handed: the slots of what I hands to W.
        sums: of loss and gradients.
    """

    arrived: Any
    saved: list[Array]
    handed: list[Array]
    sums: Sums

    def with_arrived(self, **fields: PyTree) -> "Carry":
        """The carry with these fields of `arrived` replaced."""
        return self._replace(arrived=self.arrived._replace(**fields))


class Jobs:
    """The jobs of one device. Made once a call, it traces each function of the user once, and refuses misuse.

    Attributes:
        params: this device's.
        x: what travels between stages, as zeros with its replication types; `moving` has its floating-point leaves.
        index: of this stage; `first` and `last` tell whether it is one of those.
        saved: the types of what F saves of a microbatch.
        handed: the types of what I hands to W.
        differentiates: whether the loss alone is not enough.
        programs: the traced jobs, by name.
    """

    def __init__(
        self,
        functions: Functions,
        schedule: Schedule,
        axis: Axis,
        params: PyTree,
        batch: PyTree,
        *,
        save: Save | None,
        send: Exchange,
        scatter: Callable[[PyTree], PyTree] = lambda gradients: gradients,
        in_halves: bool = False,
    ):
        """Trace.

        Args:
            functions: the user's.
            schedule: the table.
            axis: of the stages.
            params: this device's.
            batch: this device's.
            save: what F saves; None for the loss alone.
            send: how messages are sent.
            scatter: what becomes of each microbatch's gradients before they are added up.
            in_halves: whether to trace I and W instead of B.
        """
        checks.check(schedule, axis, functions.blocks(params))
        checks.check_batch(batch)
        self.functions, self.schedule, self.axis, self.send, self.scatter = (
            functions,
            schedule,
            axis,
            send,
            scatter,
        )
        self.params = _split(varying(params, axis.names), functions)
        self.microbatches = split_into_microbatches(batch, schedule.microbatches)
        self.index = axis.index()
        self.first, self.last = self.index == 0, self.index == schedule.stages - 1
        self._trace_functions(
            eqx.filter(eqx.filter(params, functions.trainable), eqx.is_inexact_array)
        )
        self.saved: list[Any] = []
        self.handed: list[Any] = []
        self.differentiates = save is not None
        self.programs: dict[str, Traced] = {}
        self._trace_stage(save, in_halves)
        self._trace_ends()

    # The jobs: `(params, carry, row, what came) -> (what is sent, carry)`.

    def task(self, row: Row, lane: str) -> Task:
        """This stage's job of a lane."""
        job = row.jobs[lane][self.index]
        microbatch, chunk = jnp.divmod(jnp.maximum(job, 0), self.schedule.chunks)
        return Task(microbatch, chunk, self._position(chunk), self.schedule.per_stage or job >= 0)

    def embed(self, params: Parameters, microbatch: Int[Array, ""]) -> PyTree:
        """What enters the first stage."""
        return match_varying(self._embed(params, self._rows(microbatch), microbatch), self.x)

    def forward(
        self, params: Parameters, carry: Carry, row: Row, entered: PyTree, came: PyTree
    ) -> tuple[PyTree, Carry]:
        """F: a chunk of layers, of what enters at the first place or of what came."""
        task = self.task(row, "forward")
        trained, given = self._at_hand(params, task)
        x = chosen(task.position == 0, entered, came)
        ((moving, loss), (still, aux)), saved = self.programs["forward"](trained, x, given)

        def with_value(values, value):
            place = task.microbatch, task.chunk
            return values.at[place].set(
                value if task.valid is True else jnp.where(task.valid, value, values[place])
            )

        sums = carry.sums._replace(
            terms=None if loss is None else added(carry.sums.terms, loss, task.valid),
            of_stages=jax.tree.map(with_value, carry.sums.of_stages, aux),
        )
        slots = saved_in(carry.saved, saved, row.saved["forward"][self.index])
        return eqx.combine(moving, still), carry._replace(saved=slots, sums=sums)

    def backward(
        self, params: Parameters, carry: Carry, row: Row, ct: PyTree
    ) -> tuple[PyTree, Trained]:
        """B: the transpose of F. Returns x's cotangent and the gradients, to be added by `with_gradients`."""
        task = self.task(row, "backward")
        trained, given = self._at_hand(params, task)
        saved = self._loaded(carry, row, "backward")
        return self.programs["backward"](
            (masked(task.valid, ct), self._seed), trained, given, saved
        )

    def with_gradients(
        self, params: Parameters, carry: Carry, row: Row, ct: PyTree, gradients: Trained
    ) -> Carry:
        """B's gradients added up, with those of the embedding, whose cotangent is `ct` at the first place."""
        task = self.task(row, "backward")
        ends = self._of_embedding(params, row, masked((task.position == 0) & task.valid, ct))
        ends = jax.tree.map(
            lambda d, more: d if more is None else d + masked(task.valid, more),
            ends,
            gradients.ends,
        )
        return self._with_blocks(self._with_ends(carry, ends, True), task, gradients.blocks)

    def backward_input(
        self, params: Parameters, carry: Carry, row: Row, ct: PyTree
    ) -> tuple[PyTree, Carry]:
        """I, the first half of B: x's cotangent, and into a slot what W needs beside what F saved."""
        task = self.task(row, "backward")
        trained, given = self._at_hand(params, task)
        saved = self._loaded(carry, row, "backward")
        ct, handed = self.programs["backward_input"](
            (masked(task.valid, ct), self._seed), trained, given, saved
        )
        return ct, carry._replace(
            handed=saved_in(carry.handed, handed, row.handed["backward"][self.index])
        )

    def backward_weight(self, params: Parameters, carry: Carry, row: Row) -> Carry:
        """W, the second half of B: the gradients, of which no other stage needs any."""
        task = self.task(row, "weight")
        trained, given = self._at_hand(params, task)
        handed = loaded(carry.handed, self.handed, row.handed["weight"][self.index])
        gradients = self.programs["backward_weight"](
            trained, given, self._loaded(carry, row, "weight"), handed
        )
        return self._with_blocks(
            self._with_ends(carry, gradients.ends, task.valid), task, gradients.blocks
        )

    def embed_backward(self, params: Parameters, carry: Carry, row: Row, ct: PyTree) -> Carry:
        """The gradients of what `embed` reads; `ct` is 0 on all stages but the first."""
        return self._with_ends(carry, self._of_embedding(params, row, ct), True)

    def head(self, params: Parameters, carry: Carry, row: Row, y: PyTree) -> tuple[PyTree, Carry]:
        """The loss of what the last stage has finished, its gradient, and the cotangent that B begins with; or the loss alone."""
        (loss, aux), (ends, ct) = self.programs["head"](params, y, *self._finished(row.finished))
        of_head = put(carry.sums.of_head, aux, row.finished)
        sums = carry.sums._replace(loss=added(carry.sums.loss, loss, True), of_head=of_head)
        return ct, self._with_ends(carry._replace(sums=sums), ends, self.counts)

    def moved(self, tree: PyTree, *, distance: int) -> PyTree:
        """The tree of the stage so many before this one."""
        if not distance:
            return tree
        return jax.tree.map(lambda leaf: send_next(leaf, self.axis.names, distance=distance), tree)

    # What they hold.

    def start(self, arrived: Any, saved: int, handed: int) -> Carry:
        """The carry before the first tick, with so many slots: sums of zeros."""
        M, v = self.schedule.microbatches, self.schedule.chunks
        zeros = lambda tree: jax.tree.map(wide_zeros, jax.eval_shape(self.scatter, tree))
        loss, of_head = self._head.out
        sums = Sums(
            loss=wide_zeros(loss),
            terms=None if self.terms.loss is None else wide_zeros(self.terms.loss),
            of_head=jax.tree.map(lambda value: stacked(value, M), of_head),
            of_stages=jax.tree.map(lambda value: stacked(value, M, v), self.terms.aux),
            ends=zeros(self.params.ends),
            blocks=zeros(self.params.blocks),
        )
        return Carry(
            arrived,
            slots_for(self.saved, saved, self.axis),
            slots_for(self.handed, handed, self.axis),
            sums,
        )

    def _loaded(self, carry: Carry, row: Row, lane: str) -> list[Any]:
        """What F saved for this job."""
        return loaded(carry.saved, self.saved, row.saved[lane][self.index])

    def _with_ends(self, carry: Carry, gradients: PyTree, counts: Counts) -> Carry:
        ends = added(carry.sums.ends, self.scatter(gradients), counts)
        return carry._replace(sums=carry.sums._replace(ends=ends))

    def _with_blocks(self, carry: Carry, task: Task, gradients: PyTree) -> Carry:
        """The carry with the gradients of a chunk of the blocks added. `scatter` sees them as blocks of one chunk."""
        as_blocks = self.scatter(jax.tree.map(lambda d: d[None], gradients))

        def leaf(total, d):
            return total.at[task.chunk].add(masked(task.valid, d[0]).astype(total.dtype))

        return carry._replace(
            sums=carry.sums._replace(blocks=jax.tree.map(leaf, carry.sums.blocks, as_blocks))
        )

    def _of_embedding(self, params: Parameters, row: Row, ct: PyTree) -> PyTree:
        return self.programs["embed_backward"](params, self._rows(row.leaving), row.leaving, ct)

    def shared_out(self, value: Array) -> bool:
        """Whether all stages have the head's value together; else it counts on the last."""
        along = [name for name in axes_of(self.axis) if name in varying_axes(value)]
        if along and not varies_along(value, self.axis):
            raise ValueError(
                f"pipeline: what the head returns differs along {along}, and is the same along the rest of {self.axis.names!r}. "
                "A head that the stages share must sum over all of these axes, and one that they do not share over none."
            )
        return not along

    # What the jobs are given.

    def params_after(self, carry: PyTree) -> Parameters:
        """The parameters; where a collective needs nothing else, only after `carry`."""
        return sequence_after(self.params, carry) if self._moves_early else self.params

    def _position(self, chunk: Int[Array, ""]) -> Int[Array, ""]:
        """The place in the model of one of this stage's chunks."""
        places = self.schedule.placed
        if np.array_equal(places.reshape(-1), np.arange(places.size)):
            return chunk * self.schedule.stages + self.index
        return jnp.asarray(places)[chunk, self.index]

    def _at_hand(self, params: Parameters, task: Task) -> tuple[Trained, Given]:
        """What F, B, I and W are given beside what comes or waits."""
        params = self._of_chunk(params, task.chunk)
        trained = Trained(params.blocks, eqx.filter(params.ends, self._read_by_stage))
        number = taps.job(task.microbatch, task.valid)
        return trained, Given(params, self._rows(task.microbatch), task.position, number)

    def _finished(self, microbatch: Int[Array, ""]) -> tuple[PyTree, Any]:
        return self._rows(microbatch), varying(taps.job(microbatch, self.counts), self.axis.names)

    def _rows(self, microbatch: Int[Array, ""]) -> PyTree:
        """One microbatch of the batch."""
        return jax.tree.map(
            lambda leaf: lax.dynamic_index_in_dim(leaf, microbatch, keepdims=False),
            self.microbatches,
        )

    def _of_chunk(self, params: Parameters, chunk: Int[Array, ""]) -> Parameters:
        one = lambda w: (
            w[0]
            if self.schedule.chunks == 1
            else lax.dynamic_index_in_dim(w, chunk, keepdims=False)
        )
        return params._replace(
            blocks=jax.tree.map(one, params.blocks),
            fixed_blocks=jax.tree.map(one, params.fixed_blocks),
        )

    # How they are traced.

    def _trace_functions(self, trained: PyTree) -> None:
        """Trace the user's functions, for the types and what each reads. `trained` are the parameters as the user has them."""
        axis, functions = self.axis, self.functions
        zero, zero_everywhere = (
            self.index * 0,
            jnp.zeros((), jnp.int32),
        )  # the first differs between stages
        chunk = self._of_chunk(self.params, zero)

        def traced_function(name, f, params, *arguments) -> Traced:
            program = trace(f, params, *arguments)
            traced.refuse_closures(
                name,
                program.program.consts,
                (trained, self.params.blocks, self.params.ends, chunk.blocks),
            )
            return program

        def embed(params, rows, microbatch):
            with taps.at(microbatch=microbatch):
                x = functions.embed(params.whole(), rows)
            return varying(jax.tree.map(jnp.asarray, x), axis.names)

        def stage(params, x, rows, position, number):
            with taps.at(microbatch=number):
                return checks.output(functions.stage(params.whole(), x, rows, position))

        def head(params, y, rows, number):
            with taps.at(microbatch=number):
                return checks.loss_and_aux(functions.head(params.whole(), y, rows))

        self._embed = traced_function(
            "embed", embed, self.params, self._rows(zero_everywhere), zero_everywhere
        )
        checks.activation(self._embed.out)
        self.x = jax.tree.map(jnp.zeros_like, self._embed.out)
        while (
            True
        ):  # until x has the replication types that it keeps through a stage: they only grow
            given = self._rows(zero), self._position(zero), taps.job(zero, zero == 0)
            self._stage = traced_function("stage", stage, chunk, self.x, *given)
            output = self._stage.out
            checks.same_form(output.x, self.x)
            x = match_varying(jax.tree.map(jnp.zeros_like, output.x), self.x)
            if _types(x) == _types(self.x):
                break
            self.x = x
        self.moving = eqx.filter(self.x, eqx.is_inexact_array)
        of_stage = lambda value: varying(
            jnp.zeros_like(value), axis.names
        )  # it differs between stages
        self.terms = checks.Output(
            None, *(jax.tree.map(of_stage, value) for value in (output.loss, output.aux))
        )
        self.counts: Counts = self.last
        self._head = traced_function(
            "head", head, self.params, self.x, *self._finished(zero_everywhere)
        )
        if self.shared_out(jnp.zeros_like(self._head.out[0])):
            self.counts = True
        checks.head(self._head, axis)
        for name, program in (("embed", self._embed), ("head", self._head)):
            used = program.used[0]
            traced.refuse_reading(name, eqx.combine(used.blocks, used.fixed_blocks), axis.names)
        self._read_by_stage = self._stage.used[0].ends
        self._moves_early = any(map(traced.moves_early, (self._embed, self._stage, self._head)))

    def _differentiable_stage(
        self, trained: Trained, x: PyTree, given: Given
    ) -> tuple[PyTree, PyTree]:
        """The stage as `save` takes it: `((moving, loss), (still, aux))`, floating-point leaves of x moving."""
        params = given.params._replace(
            blocks=trained.blocks, ends=eqx.combine(trained.ends, given.params.ends)
        )
        output = self._stage(params, x, given.microbatch, given.position, given.number)
        moving, still = eqx.partition(match_varying(output.x, self.x), eqx.is_inexact_array)
        return (moving, varying(output.loss, self.axis.names)), (still, output.aux)

    def _trace_stage(self, save: Save | None, in_halves: bool) -> None:
        """Trace F, and B or I and W; with no `save` F alone."""
        zero = self.index * 0
        trained, given = self._at_hand(
            self.params, Task(zero, zero, self._position(zero), zero == 0)
        )
        if save is None:
            f = lambda *arguments: (self._differentiable_stage(*arguments), [])
            self.programs["forward"] = trace(f, trained, self.x, given)
            return
        forward, backward = save(self._differentiable_stage)

        def transposed(ct, trained, given, saved):
            gradients, ct = backward(trained, given, saved)(ct)
            return ct, gradients

        self.programs["forward"] = trace(forward, trained, self.x, given)
        (out, _), self.saved = self.programs["forward"].out
        self._seed = None if out[1] is None else jnp.ones_like(out[1])
        whole = trace(transposed, out, trained, given, self.saved)
        if not in_halves:
            self.programs["backward"] = whole
            return
        ct, gradients = whole.out
        count = len(jax.tree.leaves(ct))
        first, second = split(whole.program, cotangents=len(jax.tree.leaves(out)), inputs=count)
        self.handed = [variable.aval for variable in opened(first).outvars[count:]]
        self.programs["backward_input"] = Traced(first, (ct, self.handed), whole.used)
        self.programs["backward_weight"] = Traced(second, gradients, whole.used)

    def _trace_ends(self) -> None:
        """Trace `head`, and its gradient and that of `embed`."""

        def differentiated(params, y, rows, number):
            moving, still = eqx.partition(y, eqx.is_inexact_array)

            def loss_of(ends, moving):
                loss, aux = self._head(
                    params._replace(ends=ends), eqx.combine(moving, still), rows, number
                )
                return masked(self.counts, loss), aux

            if not self.differentiates:
                return loss_of(params.ends, moving), eqx.filter((params.ends, moving), False)
            return jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(params.ends, moving)

        def embed_backward(params, rows, microbatch, ct):
            def moving_of(ends):
                x = match_varying(self._embed(params._replace(ends=ends), rows, microbatch), self.x)
                return eqx.filter(x, eqx.is_inexact_array)

            return jax.vjp(moving_of, params.ends)[1](ct)[0]

        zero = jnp.zeros((), jnp.int32)
        rows = self._rows(zero)
        self.programs["head"] = trace(differentiated, self.params, self.x, *self._finished(zero))
        if not self.differentiates:
            return
        self.programs["embed_backward"] = trace(
            embed_backward, self.params, rows, zero, self.moving
        )


def _split(params: PyTree, functions: Functions) -> Parameters:
    """`params` by what becomes of them."""
    all_true = lambda subtree: jax.tree.map(lambda _: True, subtree)
    in_blocks = eqx.tree_at(
        functions.blocks, jax.tree.map(lambda _: False, params), replace_fn=all_true
    )
    trained = eqx.filter(eqx.filter(params, functions.trainable), eqx.is_inexact_array)
    fixed = jax.tree.map(lambda x, trained: x if trained is None else None, params, trained)
    arrays, static = eqx.partition(fixed, eqx.is_array)
    blocks = lambda tree: eqx.filter(tree, in_blocks)
    ends = lambda tree: eqx.filter(tree, in_blocks, inverse=True)
    return Parameters(
        blocks(trained), ends(trained), blocks(arrays), eqx.combine(ends(arrays), static)
    )


def _types(tree: PyTree) -> list[Any]:
    return [varying_axes(leaf) for leaf in jax.tree.leaves(tree)]
