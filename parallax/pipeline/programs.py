"""Traces the user's functions and their gradients for one device, and makes the arguments with
which the traced programs are called.

Legend: P stages, M microbatches, v chunks per stage, F forward, B backward. B may be split into I
(the input's cotangent) and W (the gradients of the weights). Blocks are the parameters that are
split over the stages, and ends are all other parameters. `moving` are the floating-point leaves of
an activation, which have a cotangent, and `still` are the other leaves of the activation. `aux` is
a tree of values to log.

A job runs one chunk of layers for one microbatch. In the schedule's table a job is the number
microbatch * v + chunk; -1 stands for no job. With v = 2, job 7 is chunk 1 of microbatch 3. A `Task`
has the numbers of the microbatch and of the chunk, the chunk's place in the model (`position`), and
whether there is a job (`valid`). `Trained` has the arrays with respect to which a stage is
differentiated: `blocks`, of one chunk, and `ends`. `Given` has the stage's other arguments.
`Parameters` has all parameters in four trees: `blocks` and `ends`, which are trained, and
`fixed_blocks` and `fixed`, which are not; `joined()` is one tree of all parameters, as the user's
functions take it.

`trace(f, *arguments)` is `f` as a program: its `out` has the types of the results, and its `used`
is a tree like the arguments, with True for each array that the results depend on. An array varies
along a mesh axis if its type says that the array may differ between the axis's devices.
`varying(x, names)` is `x` typed as varying along the axes `names`, and `match_varying(x, like)` is
`x` typed as varying also along the axes of `like`. Taps (`parallax.recording`) record values in the
user's functions, each with the microbatch's number. `recording.job(microbatch, valid)` returns this
number, or -1 if `valid` is false; it returns None if nothing is recorded.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from parallax import recording
from parallax._typing import PyTree
from parallax.collectives import Axis
from parallax.collectives.types import match_varying, varying, varying_axes
from parallax.grads import split_into_microbatches
from parallax.grads.axes import axes_of, axes_of_several_devices
from parallax.jaxprs import opened
from parallax.pipeline import checks, traced
from parallax.pipeline.buffers import Counts, masked
from parallax.pipeline.exchange import Exchange
from parallax.pipeline.save import Save
from parallax.pipeline.traced import Traced, trace
from parallax.schedule import Schedule
from parallax.split_backward import split


class Functions(NamedTuple):
    """The user's functions `embed`, `stage` and `head`; `blocks`, which picks from the parameters
    the layers that are split over the stages; and `trainable`, which says which leaves of the
    parameters are trained. All are arguments of `pipeline.value_and_grad`, with these names."""

    embed: Callable[..., Any]
    stage: Callable[..., Any]
    head: Callable[..., Any]
    blocks: Callable[[PyTree], PyTree]
    trainable: PyTree


class Parameters(NamedTuple):
    """The parameters in four trees of one structure. Each leaf is in one of the trees; the other
    three have None in its place.

    Attributes:
        blocks: the trained arrays of the blocks: each array is [chunks, ...], or [...] if the tree
            has only one chunk.
        ends: the other trained arrays.
        fixed_blocks: the untrained arrays of the blocks.
        fixed: all remaining leaves, also those that are not arrays.
    """

    blocks: PyTree
    ends: PyTree
    fixed_blocks: PyTree
    fixed: PyTree

    def joined(self) -> PyTree:
        """Returns one tree of all parameters, as the user's functions take it."""
        return eqx.combine(*self)


class Task(NamedTuple):
    """This stage's job in a tick.

    Attributes:
        microbatch: the number of the microbatch.
        chunk: the number of the chunk of this stage's layers.
        position: the chunk's place in the model.
        valid: whether the schedule has a job for this stage in this tick. In lockstep an idle stage
            computes too, and `valid` masks its results. In a schedule that runs per stage, an idle
            stage runs nothing, so `valid` is always the Python value `True`.
    """

    microbatch: Int[Array, ""]
    chunk: Int[Array, ""]
    position: Int[Array, ""]
    valid: Counts


class Trained(NamedTuple):
    """The arrays that a stage is differentiated with respect to: its chunk of the blocks, and those
    parameters outside the blocks (ends) that it reads."""

    blocks: PyTree
    ends: PyTree


class Given(NamedTuple):
    """The arguments of a stage besides `Trained` and x, the activation. They are known in the
    stage's forward and backward tick, so they need not be stored between the two ticks.

    Attributes:
        params: all parameters outside the blocks, and the one chunk of the blocks that the stage
            runs.
        rows: the microbatch's part of the batch.
        position: the chunk's place in the model.
        number: the microbatch's number, for values that the stage records (taps); -1 on an idle
            stage; None if nothing is recorded.
    """

    params: Parameters
    rows: PyTree
    position: Int[Array, ""]
    number: Int[Array, ""] | None


class Programs:
    """The programs of one device. A `Programs` is made once per call of the gradient function. It
    traces and checks the user's `embed`, `stage` and `head`, each once. `stage` is traced
    again if its output varies along more axes than its input.

    Attributes:
        params: the `Parameters` of this device.
        x: zeros with the shapes and types of an activation; a type also tells the axes along which
            the array varies. `moving` has the floating-point leaves of `x`.
        index: the number of this stage; `first` and `last` say whether it is the first or the last.
        terms: zeros, with the shapes of the stage's own term of the loss (`terms.loss`) and of its
            auxiliary values (`terms.aux`).
        saved: the types of the arrays that the forward pass saves for a microbatch.
        seed: the cotangent of the stage's own term of the loss, which is 1; None without a term.
        deferred: the types of the arrays that the job I (the input's cotangent) stores for the job
            W (the weights' gradients).
        differentiates: whether gradients are needed, and not only the loss.
        in_halves: whether the backward pass is split into I and W.
        counts: whether the loss that the head computes on this stage is used.
        head_gathers: whether only the last stage's loss is used, and the head computes it with
            parameters that a collective brings from the other stages.
        moves_early: whether a collective in one of the user's functions depends on nothing but the
            parameters.
        programs: the traced programs: "embed", "forward", "head", "backward", "weight" and
            "embed_backward".
    """

    _stage: Traced

    def __init__(  # noqa: PLR0913
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
        """Checks the arguments and traces all programs.

        Args:
            functions: the functions of the user.
            schedule: the table of the pipeline's jobs.
            axis: the axis of the stages.
            params: the parameters on this device.
            batch: the batch on this device.
            save: how the forward pass saves arrays for the backward pass; None if only the loss is
                computed, without gradients.
            send: how messages are sent.
            scatter: applied to each microbatch's gradients before they are added up.
            in_halves: whether to trace the two halves of the backward pass, I (the input's
                cotangent) and W (the weights' gradients), instead of the whole.
        """
        checks.check(schedule, axis, functions.blocks(params))
        checks.check_batch(batch)
        self.functions, self.schedule, self.axis = functions, schedule, axis
        self.send, self.scatter = send, scatter
        # All parameters are typed as varying over the stages. Otherwise JAX would sum over the
        # stages the gradients of parameters that all stages have, in each microbatch.
        self.params = _split(varying(params, axis.names), functions)
        # A microbatch is a slice of dim 0, so a tick can take one by its number.
        self.microbatches = split_into_microbatches(batch, schedule.microbatches)
        self.index = axis.index()
        self.first, self.last = self.index == 0, self.index == schedule.stages - 1
        # Set by `_trace_jobs`: the types of the arrays that F saves, and of those that I stores for
        # W.
        self.saved: list[Any] = []
        self.deferred: list[Any] = []
        self.differentiates, self.in_halves = save is not None, in_halves
        self.programs: dict[str, Traced] = {}
        # Each trace needs the types that the one before it finds, such as those of `x`.
        self._trace_embed()
        self._trace_stage()
        self._trace_head()
        # Whether one of the user's functions has a collective that depends on nothing but the
        # parameters, so that it could run before its tick.
        self.moves_early = any(map(traced.moves_early, (self._embed, self._stage, self._head)))
        self._trace_jobs(save)
        self._trace_ends()

    # The arguments of the programs.

    def task(self, job: Int[Array, ""]) -> Task:
        """Returns this stage's task for `job`, a number in the table: microbatch * (chunks per
        stage) + chunk, or -1 for no job."""
        # Without a job, -1, the task has the numbers of job 0, and is not valid.
        microbatch, chunk = jnp.divmod(jnp.maximum(job, 0), self.schedule.chunks)
        position = jnp.asarray(self.schedule.placed)[chunk, self.index]
        # In lockstep an idle stage runs the program too, with -1. If the schedule runs per stage
        # (`per_stage`), an idle stage runs nothing, so every task is valid.
        return Task(microbatch, chunk, position, self.schedule.per_stage or job >= 0)

    def known(self, task: Task) -> tuple[Trained, Given]:
        """Returns the `Trained` and the `Given` of a task: all arguments of the stage besides x.
        Each job of the task, forward or backward, takes both."""
        params = self._of_chunk(task.chunk)
        # `_read_by_stage` is a tree like the ends: whether the stage reads each. An end that it
        # does not read gets no gradient here.
        trained = Trained(params.blocks, eqx.filter(params.ends, self._read_by_stage))
        number = recording.job(task.microbatch, task.valid)
        return trained, Given(params, self.rows(task.microbatch), task.position, number)

    def head_inputs(self, microbatch: Int[Array, ""]) -> tuple[PyTree, Any]:
        """Returns the head's arguments that follow `(params, x)`: the rows of one microbatch, and
        the microbatch's index, which taps (records of values) use."""
        # `counts` says whether this stage's loss is used. If it is not, the number for taps is -1.
        # So the number may differ between the stages, and is typed as varying.
        return self.rows(microbatch), varying(
            recording.job(microbatch, self.counts), self.axis.names
        )

    def rows(self, microbatch: Int[Array, ""]) -> PyTree:
        """Returns one microbatch, a part of the batch."""
        take = functools.partial(lax.dynamic_index_in_dim, index=microbatch, keepdims=False)
        return jax.tree.map(take, self.microbatches)

    def _of_chunk(self, chunk: Int[Array, ""]) -> Parameters:
        """Returns the parameters with only one chunk of the blocks: each array of the blocks goes
        from [chunks, ...] to [...]."""
        params = self.params

        def chunk_of(w):
            """Returns one chunk of an array of the blocks: `[chunks, ...] -> [...]`."""
            # With one chunk the index is known, so the program needs no traced index.
            if self.schedule.chunks == 1:
                return w[0]
            return lax.dynamic_index_in_dim(w, chunk, keepdims=False)

        blocks, fixed_blocks = jax.tree.map(chunk_of, (params.blocks, params.fixed_blocks))
        return params._replace(blocks=blocks, fixed_blocks=fixed_blocks)

    def shared_out(self, value: Array) -> bool:
        """Returns whether the type of a value of the head (the loss or an auxiliary value) says
        that all stages have the same value. If so, the stages computed the value together. If not,
        only the value of the last stage is used. Raises `ValueError` if the value is the same along
        only some of the stages' axes."""
        # The stages' axes along which the value may differ.
        along = [name for name in axes_of(self.axis) if name in varying_axes(value)]
        if along and len(along) < len(axes_of(self.axis)):
            raise ValueError(
                f"pipeline: the head's value differs along {along}, and is the same along the "
                f"other axes of {self.axis.names!r}. If the stages compute the value together, the "
                "head must sum over all axes of the stages; otherwise, over none of them."
            )
        return not along

    # Tracing.

    def _traced(self, name: str, f: Callable[..., Any], *arguments: PyTree) -> Traced:
        """Returns a function of the user as a program; the first argument of the program is a
        `Parameters`. `name` is "embed", "stage" or "head". Raises `Misused` if the function reads a
        trained parameter by closure: the parameter's gradient would miss this use. Also raises
        `Misused` if embed or head computes its results from blocks in its argument `params`."""
        program = trace(f, *arguments)
        # `program` is a `Traced`, and `program.program` its jaxpr. The constants of the jaxpr are
        # the arrays that `f` reads by closure.
        trained = self.params.blocks, self.params.ends
        traced.refuse_closures(name, program.program.consts, trained)
        # Each stage has blocks of its own, so embed and head, which run on all stages, must not
        # read any. `used[0]` says of each array of the parameters whether the results depend on it.
        # `refuse_reading` needs the names of the stages' axes only for its error.
        if name != "stage":
            used = program.used[0]
            blocks = eqx.combine(used.blocks, used.fixed_blocks)
            traced.refuse_reading(name, blocks, self.axis.names)
        return program

    def _trace_embed(self) -> None:
        """Traces `embed`, and sets `x` to zeros like the output of `embed`."""

        def embed(params, rows, microbatch):
            with recording.at(microbatch=microbatch):
                x = self.functions.embed(params.joined(), rows)
            # Later activations differ between stages, and all must have the same type.
            return varying(jax.tree.map(jnp.asarray, x), self.axis.names)

        zero = jnp.zeros((), jnp.int32)  # any microbatch: in a trace only types matter
        self._embed = self._traced("embed", embed, self.params, self.rows(zero), zero)
        checks.activation(self._embed.out)
        self.x = jax.tree.map(jnp.zeros_like, self._embed.out)

    def _trace_stage(self) -> None:
        """Traces `stage`, and sets the attributes that describe the stage's input and output: `x`,
        `moving`, `_read_by_stage` and `terms`. `terms` is an `Output` of zeros, with the types of
        the stage's term of the loss and of its auxiliary values."""

        def stage(params, x, rows, position, number):
            with recording.at(microbatch=number):
                return checks.output(self.functions.stage(params.joined(), x, rows, position))

        # Job 0. Its number is computed from the stage's index, so that it is typed as varying over
        # the stages, as the numbers of the table are.
        task = self.task(self.index * 0)
        chunk_params = self._of_chunk(task.chunk)
        given = (
            self.rows(task.microbatch),
            task.position,
            recording.job(task.microbatch, task.valid),
        )

        def after_stage(x):
            """Returns the types of the stage's output for an input like `x`."""
            self._stage = self._traced("stage", stage, chunk_params, x, *given)
            checks.same_form(self._stage.out.x, x)
            return self._stage.out.x

        # The stage may return an activation that varies over more axes than its input. The output
        # is the next stage's input, so the stage is traced again until both types are equal.
        self.x = traced.settled(self.x, after_stage)
        # In a schedule that runs per stage, `per_stage` refuses every collective over the stages.
        if not self.schedule.per_stage:
            harm = (
                "In a tick each stage has a microbatch of its own or none, so the collective would "
                "mix numbers of several microbatches."
            )
            # All arguments but the parameters, argument 0, belong to the stage's microbatch.
            checks.refuse_sending(self._stage, range(1, len(self._stage.used)), self.axis, harm)
        self.moving = eqx.filter(self.x, eqx.is_inexact_array)
        self._read_by_stage = self._stage.used[0].ends  # of the first argument, the parameters
        terms = checks.Output(None, self._stage.out.loss, self._stage.out.aux)
        zeros = jax.tree.map(jnp.zeros_like, terms)
        # Each stage has its own term of the loss and its own values to log, so these vary.
        self.terms = varying(zeros, self.axis.names)

    def _trace_head(self) -> None:
        """Traces `head`. Sets `counts`, which says whether the head's loss is used on this stage,
        and `head_gathers`, which says whether the last stage's head uses parameters of the others.
        """

        def head(params, y, rows, number):
            with recording.at(microbatch=number):
                return checks.loss_and_aux(self.functions.head(params.joined(), y, rows))

        # `head_inputs` reads `counts`, so `counts` first gets its usual value: whether this is the
        # last stage. If the stages share the head, the value changes below. That does not change
        # the trace, which takes only types from `head_inputs`.
        self.counts: Counts = self.last
        arguments = self.head_inputs(jnp.zeros((), jnp.int32))
        self._head = self._traced("head", head, self.params, self.x, *arguments)
        # If the type of the loss says that it is the same on all stages (`shared_out`), they
        # computed the loss together, and it is used on all. `out[0]` is only this type, and
        # `shared_out` takes an array, so zeros stand for the loss.
        if self.shared_out(jnp.zeros_like(self._head.out[0])):
            self.counts = True
        # Refuses a loss that sums over the stages what each computed from its own x.
        checks.head(self._head, self.axis)
        # Argument 0 is the parameters.
        axes = axes_of_several_devices(axes_of(self.axis))
        self.head_gathers = (
            self.counts is not True and traced.first_sent(self._head, [0], axes) is not None
        )

    def _differentiable_stage(
        self, trained: Trained, x: PyTree, given: Given
    ) -> tuple[PyTree, PyTree]:
        """Runs the stage, and returns `((moving, loss), (still, aux))`, the form that `save` takes
        (see save.py). `moving` are the floating-point leaves of the stage's output, and `still` its
        other leaves. Only the first pair is differentiated, with respect to `trained` and `x`."""
        # `trained.ends` has None for the ends that the stage does not read; they come from `given`.
        # `combine` takes each leaf from its first argument, or if that is None from the second.
        ends = eqx.combine(trained.ends, given.params.ends)
        params = given.params._replace(blocks=trained.blocks, ends=ends)
        output = self._stage(params, x, given.rows, given.position, given.number)
        # The output is the next stage's input, so it gets the type that all activations have.
        moving, still = eqx.partition(match_varying(output.x, self.x), eqx.is_inexact_array)
        # Each stage has its own term of the loss, so the term is typed as varying, even if it is a
        # constant.
        return (moving, varying(output.loss, self.axis.names)), (still, output.aux)

    def _trace_jobs(self, save: Save | None) -> None:
        """Traces the forward job F, and either the backward job B or its two halves I (the input's
        cotangent) and W (the weights' gradients). Adds the traced jobs to `programs`. Sets `saved`
        and `seed`, which B and I need, and `deferred`, which W needs.

        `save` makes two functions of a stage's function (see save.py). The first runs in the
        forward tick, and returns the stage's results and the arrays to save. The second runs in the
        backward tick, and returns the transposed function. The transposed function takes the
        cotangent of the stage's output, and returns the gradients and the cotangent of the stage's
        input. If `save` is None, only the loss is needed, and only F is traced.
        """
        # (trained, given) of job 0: in a trace only types matter, and all jobs have the same. The
        # number is computed from the stage's index, so that it is typed as varying.
        known = self.known(self.task(self.index * 0))
        if save is None:

            def saving_nothing(trained, x, given):
                return self._differentiable_stage(trained, x, given), []

            self.programs["forward"] = trace(saving_nothing, known[0], self.x, known[1])
            return
        forward, backward = save(self._differentiable_stage)

        def transposed(ct, trained, given, saved):
            # The cotangent of x comes first: `split` cuts the results in this order.
            gradients, ct_of_x = backward(trained, given, saved)(ct)
            return ct_of_x, gradients

        self.programs["forward"] = trace(forward, known[0], self.x, known[1])
        (out, _), self.saved = self.programs["forward"].out
        # `out` has the types of (moving, loss): the output's floating-point leaves, and the stage's
        # own term of the loss. That term's cotangent is 1, since the loss is the sum of all terms.
        # The other results, (still, aux), have no cotangent.
        self.seed = None if out[1] is None else jnp.ones_like(out[1])
        both = trace(transposed, out, *known, self.saved)  # a cotangent has the type of its value
        if not self.schedule.per_stage:
            harm = (
                "A stage that has no job in a tick drops its gradients, and with them the parts "
                "that such a collective brings from other stages."
            )
            # Argument 0 is the cotangent.
            checks.refuse_sending(both, [0], self.axis, harm)
        self.programs["backward"] = both
        if not self.in_halves:
            return
        # I and W are halves of the one jaxpr of B, so that no matmul is in both.
        ct, gradients = both.out
        count = len(jax.tree.leaves(ct))
        # `split` cuts B: its first arguments, as many as `cotangents`, go only to I, and its first
        # results, as many as `inputs`, come from I: the cotangents of x. I then returns the arrays
        # that W needs. W takes B's other arguments and these arrays, and returns the gradients.
        # Nobody reads the third field of these `Traced`, `used`, so it stays that of B.
        first, second = split(both.program, cotangents=len(jax.tree.leaves(out)), inputs=count)
        self.deferred = [variable.aval for variable in opened(first).outvars[count:]]
        self.programs["backward"] = Traced(first, (ct, self.deferred), both.used)
        self.programs["weight"] = Traced(second, gradients, both.used)

    def _trace_ends(self) -> None:
        """Adds the programs "embed", "head" (with its gradient) and, if gradients are needed,
        "embed_backward"."""

        def differentiated(params, y, rows, number):
            """Returns `((loss, aux), (gradients, cotangent))`: the gradients of the parameters
            outside the blocks, and the cotangent of `y`, the head's input. If no gradients are
            needed, the second pair has None in place of each array."""
            moving, still = eqx.partition(y, eqx.is_inexact_array)

            def loss_of(ends, moving):
                """Returns `(loss, aux)` of the head, as a function of the arrays with respect to
                which the loss is differentiated."""
                y = eqx.combine(moving, still)
                loss, aux = self._head(params._replace(ends=ends), y, rows, number)
                # `counts` says whether this stage's loss is used. The mask is inside the function
                # that is differentiated, so that the gradient is 0 where the loss is not used.
                return masked(self.counts, loss), aux

            if not self.differentiates:
                return loss_of(params.ends, moving), eqx.filter((params.ends, moving), False)
            return jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(params.ends, moving)

        def embed_backward(params, rows, microbatch, ct):
            """Returns the gradients of the parameters outside the blocks. `ct` is the cotangent of
            the embedding's output. The embedding runs again, so none of its arrays is stored
            between ticks."""

            def moving_of(ends):
                # `ct` has the type that all activations have, and `x` must have the same type.
                x = match_varying(self._embed(params._replace(ends=ends), rows, microbatch), self.x)
                return eqx.filter(x, eqx.is_inexact_array)

            return jax.vjp(moving_of, params.ends)[1](ct)[0]

        # In a trace only types matter: 0 stands for any microbatch. `head_inputs(0)` gives the rows
        # of this microbatch, and its number for taps.
        zero = jnp.zeros((), jnp.int32)
        self.programs["embed"] = self._embed  # already a program: `_trace_embed` traced it
        self.programs["head"] = trace(differentiated, self.params, self.x, *self.head_inputs(zero))
        if self.differentiates:
            arguments = self.params, self.rows(zero), zero, self.moving
            self.programs["embed_backward"] = trace(embed_backward, *arguments)


def _split(params: PyTree, functions: Functions) -> Parameters:
    """Returns the parameters in the four trees of `Parameters`: trained or not, in the blocks or
    not. All leaves that are not arrays are in `fixed`, even if the blocks have them, since each
    leaf of `fixed_blocks` is indexed by chunk."""
    in_blocks = checks.marked(functions.blocks, params)
    trained = eqx.filter(eqx.filter(params, functions.trainable), eqx.is_inexact_array)
    # The leaves that are not trained, with None in place of each trained leaf.
    fixed = jax.tree.map(lambda x, trained: x if trained is None else None, params, trained)
    arrays, static = eqx.partition(fixed, eqx.is_array)
    trained_blocks, trained_ends = eqx.partition(trained, in_blocks)
    fixed_blocks, fixed_ends = eqx.partition(arrays, in_blocks)
    return Parameters(trained_blocks, trained_ends, fixed_blocks, eqx.combine(fixed_ends, static))
