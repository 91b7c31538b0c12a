"""The jobs of a pipeline on one device, and the carry that they change.

Legend: P stages, M microbatches, v chunks per stage, F forward, B backward. B may be split into I
(the input's cotangent) and W (the gradients of the weights).

A job takes the carry (messages, slots and sums), the tick's row and an array that arrived. The job
returns the array to send and the new carry. In the new carry, the slots have the arrays that the
job saved, and the sums include the job's terms. The executors, `lockstep` and `per_stage`, decide
when a job runs and send its result. A lane is one kind of job: "forward" (F), "backward" (B or I)
or "weight" (W).

A row has the numbers of one tick: `row.jobs[lane][stage]` is a job, microbatch * v + chunk, or -1
on an idle stage. In the same way `row.saved` and `row.deferred` give slots, places in a buffer
where an array waits. F of microbatch 3 may write slot 1, and B of microbatch 3 then reads slot 1.
The embedding, its backward pass and the head run on all stages; `row.jobs["embed"]`,
`row.jobs["embed_backward"]` and `row.jobs["head"]` are the numbers of their microbatches. A `Task`
is this stage's job: `microbatch`, `chunk`, `position` (the chunk's place in the model) and `valid`.
In `lockstep` an idle stage computes too, and `task.valid` masks its results. In `per_stage` an idle
stage runs nothing, so `task.valid` is always the Python constant `True`.

`Jobs` is a subclass of `Programs` (in programs.py), and reads these attributes of `Programs`:

* `programs`: the traced functions, by name.
* `params`: the parameters; `params.blocks` are split over the stages, and `params.ends` are not.
* `axis` and `index`: the axis of the stages, and the number of this stage.
* `x`: an activation of zeros.
* `saved`: the types of the arrays that F writes into slots.
* `deferred`: the types of the arrays that I writes into slots.
* `terms`: zeros with the shapes of the stage's own term of the loss and of its auxiliary values.
* `seed`: the cotangent of the stage's own term of the loss.

Four methods of `Programs` give the arguments of a job. `task` gives the `Task`, and `rows` the part
of the batch that is one microbatch. `known` gives all arguments of a stage except the activation.
`head_inputs` gives all arguments of the head except the parameters and the activation.
"""

import copy
import functools
import operator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from parallax._typing import PyTree
from parallax.collectives import send_next
from parallax.collectives.cpu import sequence_after
from parallax.collectives.types import match_varying
from parallax.pipeline.buffers import (
    Counts,
    added,
    chosen,
    masked,
    put,
    slots_for,
    stacked_zeros,
    taken,
    wide_zeros,
)
from parallax.pipeline.ends import copy_from_last
from parallax.pipeline.programs import Programs, Task, Trained
from parallax.pipeline.rows import Row


class Sums(NamedTuple):
    """The sums over all microbatches of a step, and the auxiliary values of each microbatch.

    Attributes:
        loss: the head's loss.
        terms: the stages' own terms of the loss; None if the stages have no such terms.
        of_head: the head's auxiliary values, [microbatches, ...] each.
        of_stages: the auxiliary values of this device's stage, [microbatches, chunks of the stage,
            ...] each.
        ends: gradients of the parameters outside the blocks; all stages have these parameters.
        blocks: gradients of the blocks: [v, ...] each.
    """

    loss: Float[Array, ""]
    terms: Float[Array, ""] | None
    of_head: PyTree
    of_stages: PyTree
    ends: PyTree
    blocks: PyTree


class Carry(NamedTuple):
    """The values that one tick passes to the next tick, and that one job passes to later jobs.

    Attributes:
        arrived: the `Arrived` of the executor (`lockstep` or `per_stage`): the activations and
            cotangents that the stage received, and, within a tick, also the array to send.
        saved: the slots for the arrays that the forward job saves for the backward job, or for its
            two parts (I and W).
        deferred: the slots for the arrays that the first part of the backward job (I) stores for
            the second part (W).
        sums: the sums of loss and gradients.
    """

    arrived: Any
    saved: list[Array]
    deferred: list[Array]
    sums: Sums

    def with_arrived(self, **fields: PyTree) -> "Carry":
        """Returns the carry with new values for some fields of the carry's `arrived`: the keyword
        arguments are these values, with the names of the fields."""
        return self._replace(arrived=self.arrived._replace(**fields))

    def with_sums(self, **fields: PyTree) -> "Carry":
        """Returns the carry with new values for some of the carry's sums: the keyword arguments are
        these values, with the names of the sums."""
        return self._replace(sums=self.sums._replace(**fields))


class Jobs(Programs):
    """The jobs of one device, with the attributes of `Programs`."""

    def start(self, arrived: Any, saved_count: int, deferred_count: int) -> Carry:
        """Returns the carry before the first tick: all sums are 0. `arrived` has the executor's
        messages. The two counts are the numbers of slots for the arrays that the forward job saves,
        and for those that the first part of the backward job (I) stores for the second part (W)."""
        M, v = self.schedule.microbatches, self.schedule.chunks
        # `out` has the types of the head's results, ((loss, aux), gradients).
        loss, aux = self.programs["head"].out[0]

        # `wide_zeros` gives zeros of at least float32, and `stacked_zeros` zeros with more dims.
        def zeros(tree):
            # The user's `scatter` may return shards of the gradients, so the sums have the shapes
            # of its results. `params.ends` and `params.blocks` have only the trained arrays.
            return jax.tree.map(wide_zeros, jax.eval_shape(self.scatter, tree))

        sums = Sums(
            loss=wide_zeros(loss),
            terms=jax.tree.map(wide_zeros, self.terms.loss),
            of_head=stacked_zeros(aux, M),
            of_stages=stacked_zeros(self.terms.aux, M, v),
            ends=zeros(self.params.ends),
            blocks=zeros(self.params.blocks),
        )
        # Each array that varies over the stages gets slots; others are the same in each microbatch.
        saved = slots_for(self.saved, saved_count, self.axis)
        deferred = slots_for(self.deferred, deferred_count, self.axis)
        return Carry(arrived, saved, deferred, sums)

    def after(self, carry: PyTree) -> "Jobs":
        """Returns these jobs with their parameters tied to `carry`: on a CPU, code that uses the
        parameters waits until `carry` is computed. So no collective of a job runs before the
        previous tick has ended: on a CPU, two collectives that run at once may meet in one
        rendezvous, which aborts the process (see `collectives.cpu`)."""
        jobs = copy.copy(self)
        # Only a collective that depends on nothing but the parameters could run too early;
        # `moves_early` says whether one of the user's functions has such a collective.
        if self.moves_early:
            jobs.params = sequence_after(self.params, carry)
        return jobs

    def task_of(self, row: Row, lane: str) -> Task:
        """Returns this stage's `Task` in the tick of `row`, for the lane "forward", "backward" or
        "weight"."""
        return self.task(row.jobs[lane][self.index])

    def embed(self, microbatch: Int[Array, ""]) -> PyTree:
        """Returns the embedding's output for a microbatch: the first stage's input."""
        x = self.programs["embed"](self.params, self.rows(microbatch), microbatch)
        # A stage may need an `x` that varies along more axes than the embedding's output.
        return match_varying(x, self.x)

    def forward(
        self, carry: Carry, row: Row, entered: PyTree, arrived: PyTree
    ) -> tuple[PyTree, Carry]:
        """Runs the forward job of one chunk of layers. For the first chunk of the model, the input
        is `entered`, the embedding's output; for another chunk, it is `arrived`, the activation
        from the chunk before. Returns the output, and the carry with the arrays that the job
        saved."""
        task = self.task_of(row, "forward")
        # `known` returns the stage's arguments besides x: the parameters that get gradients here
        # (`trained`), and the others, such as the microbatch's rows (`given`).
        trained, given = self.known(task)
        # The place decides, not the stage: with several chunks, stage 0 has later places too.
        x = chosen(task.position == 0, entered, arrived)
        # `moving` has the floating-point leaves of the output, `still` the others.
        ((moving, loss), (still, aux)), saved = self.programs["forward"](trained, x, given)
        entry = task.microbatch, task.chunk

        def with_value(values, value):
            """Returns an array of auxiliary values, [M, v, ...], with this job's value written at
            (microbatch, chunk)."""
            if task.valid is not True:
                # An idle stage has the number of job 0, whose value it must not overwrite.
                value = jnp.where(task.valid, value, values[entry])
            return values.at[entry].set(value)

        # An idle stage writes too, into a slot that is free in this tick.
        slots = put(carry.saved, saved, row.saved["forward"][self.index])
        # The loss is None if the stages have no term of the loss.
        carry = carry._replace(saved=slots).with_sums(
            terms=None if loss is None else added(carry.sums.terms, loss, task.valid),
            of_stages=jax.tree.map(with_value, carry.sums.of_stages, aux),
        )
        return eqx.combine(moving, still), carry

    def backward(self, carry: Carry, row: Row, ct: PyTree) -> tuple[PyTree, Carry]:
        """Runs the backward job, or only its first part I, on `ct`, the cotangent of the chunk's
        output. Returns the cotangent of the chunk's input, and the carry.

        The whole backward job adds its gradients to the sums. Part I stores in a slot the arrays
        that the second part, W, needs in addition to those that the forward job saved.
        """
        task = self.task_of(row, "backward")
        saved = taken(carry.saved, self.saved, row.saved["backward"][self.index])
        # The cotangents of the output, and of the stage's own term of the loss (`seed`). An idle
        # stage runs the job too, but its results are not used: `_with_gradients` masks its
        # gradients, and no job reads its cotangent of x. So `masked` is not needed for the results:
        # it only replaces meaningless numbers by 0. `known` is as in `forward`.
        ct = masked(task.valid, ct), self.seed
        # B returns the gradients. I, which runs if `in_halves`, returns the arrays that W needs. An
        # idle stage writes these into a slot that is free in this tick.
        ct, results = self.programs["backward"](ct, *self.known(task), saved)
        if not self.in_halves:
            return ct, self._with_gradients(carry, task, results)
        slot = row.deferred["backward"][self.index]
        return ct, carry._replace(deferred=put(carry.deferred, results, slot))

    def weight(self, carry: Carry, row: Row) -> Carry:
        """Runs W, the second part of the backward job: returns the carry with the gradients of the
        chunk's weights added. Nothing is sent, since no other stage needs these gradients."""
        task = self.task_of(row, "weight")
        saved = taken(carry.saved, self.saved, row.saved["weight"][self.index])
        deferred = taken(carry.deferred, self.deferred, row.deferred["weight"][self.index])
        # `known` gives all arguments of the stage but x: the parameters, the microbatch and others.
        gradients = self.programs["weight"](*self.known(task), saved, deferred)
        return self._with_gradients(carry, task, gradients)

    def embed_backward(self, carry: Carry, row: Row, ct: PyTree) -> Carry:
        """Runs the backward pass of `embed` on `ct`, the cotangent of its output; `ct` is 0 on all
        stages but the first. Returns the carry with the gradients added: those of the ends, which
        are the parameters outside the blocks."""
        microbatch = row.jobs["embed_backward"]
        rows = self.rows(microbatch)
        gradients = self.programs["embed_backward"](self.params, rows, microbatch, ct)
        # The gradients are added on all stages (`True`). Every stage runs `embed` on real data, so
        # its derivatives are finite, and a cotangent of 0 gives gradients of 0.
        return self._with_ends(carry, gradients, True)

    def head(self, carry: Carry, row: Row, y: PyTree) -> tuple[PyTree, Carry]:
        """Runs the head on `y`. On the last stage `y` is the output of the last layer for a
        microbatch. On other stages `y` is any activation, and the cotangent is not used. Auxiliary
        values of other stages are used only if their types say that all stages have equal values.

        Returns the cotangent of `y`, with which the backward job begins, and the carry with the
        loss, the auxiliary values and the gradients added. If only the loss is needed, the
        cotangent is a tree of None.
        """
        microbatch, params, counts = row.jobs["head"], self.params, self.counts
        # The collective brings a part of the gradient from the last stage to each stage, so the
        # gradients of all stages are added. No stage's part may be NaN, so all stages get the
        # model's output. On a CPU, the head's collectives wait for the messages with it.
        if self.head_gathers and self.differentiates:
            y = jax.tree.map(functools.partial(copy_from_last, axis=self.axis), y)
            microbatch, params = sequence_after((microbatch, params), y)
            counts = True
        # `ends` are the gradients of the parameters outside the blocks.
        (loss, aux), (ends, ct) = self.programs["head"](params, y, *self.head_inputs(microbatch))
        # Row `microbatch` of [M, ...]. No mask: the head runs only in ticks that have a microbatch.
        of_head = put(carry.sums.of_head, aux, microbatch)
        # `True` adds the loss as it is: the program has masked it already.
        carry = carry.with_sums(loss=added(carry.sums.loss, loss, True), of_head=of_head)
        # `counts` says whether the loss of this stage is used. If it is not, the gradients are not
        # added: the head may have computed NaN from a `y` that is not the model's output.
        return ct, self._with_ends(carry, ends, counts)

    def moved(self, tree: PyTree, *, distance: int) -> PyTree:
        """Sends `tree` along the ring of stages, and returns the tree of the stage that is
        `distance` stages before this one; with a negative distance, the tree of a stage after this
        one."""
        # Distance 0 needs no message. The next place of the model is then on the same stage, as in
        # a placement that goes from the first stage to the last and back (a V).
        if not distance:
            return tree
        send = functools.partial(send_next, axis_name=self.axis.names, distance=distance)
        return jax.tree.map(send, tree)

    def _with_ends(self, carry: Carry, gradients: PyTree, counts: Counts) -> Carry:
        """Returns the carry with one microbatch's gradients of the ends (the parameters outside the
        blocks) added, if the condition `counts` is true on this stage."""
        return carry.with_sums(ends=added(carry.sums.ends, self.scatter(gradients), counts))

    def _with_gradients(self, carry: Carry, task: Task, gradients: Trained) -> Carry:
        """Returns the carry with a task's gradients added: `gradients.blocks`, for the task's chunk
        of the blocks, and `gradients.ends`, for those ends (parameters outside the blocks) that the
        stage reads."""
        # `scatter`, the user's function, may sum the gradients over devices and keep a share. It
        # takes and returns blocks with a dim of chunks, here [1, ...]: the index None adds the dim.
        as_blocks = self.scatter(jax.tree.map(operator.itemgetter(None), gradients.blocks))

        def leaf(total, d):  # [v, ...] and [1, ...]
            # The cotangent of an idle stage was 0 already, but its gradient may be NaN: 0 * NaN.
            # The mask can follow `scatter`, since all devices of a stage are idle at once.
            return total.at[task.chunk].add(masked(task.valid, d[0]).astype(total.dtype))

        carry = carry.with_sums(blocks=jax.tree.map(leaf, carry.sums.blocks, as_blocks))
        return self._with_ends(carry, gradients.ends, task.valid)
