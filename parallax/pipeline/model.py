"""The user's three functions on one device's parameters and batch: what is given to them, what is differentiated, the types.

Legend: P stages, M microbatches, v chunks a stage.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from parallax import taps
from parallax.collectives import Axis
from parallax.collectives.cpu import ordered
from parallax.collectives.types import like, varying, varying_axes
from parallax.grads import axes_of, split_into_microbatches, varies_along
from parallax.pipeline import checks, traced
from parallax.pipeline.checks import Output
from parallax.schedule import Schedule
from parallax.typed import PyTree


class Functions(NamedTuple):
    """The user's functions: the arguments of `pipeline.value_and_grad`."""

    enter: Callable[..., Any]
    stage: Callable[..., Any]
    head: Callable[..., Any]
    where: Callable[[PyTree], PyTree]
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


class Trained(NamedTuple):
    """What a stage is differentiated in: its chunk of the blocks, and those of the ends that it reads."""

    blocks: PyTree
    ends: PyTree


class Given(NamedTuple):
    """What else a stage is given, at hand in its forward and in its backward tick: no slot needs to hold it."""

    params: Parameters
    part: PyTree
    chunk: Int[Array, ""]
    job: Int[Array, ""] | None = None  # the microbatch, or -1: for taps, while a record is made


class Model:
    """The functions on this device's parameters and batch. Made once a call, it traces each of them, and refuses misuse.

    Attributes:
        params: this device's.
        x: what travels between stages, as zeros with its replication types.
        index: of this stage; `first` and `last` tell whether it is one of those.
        terms: zeros like the stage's own loss and auxiliary values, with the types in which they are added up.
        read: a tree like the ends, with whether the stage reads each.
        counts: whether what the head computes here counts: everywhere where the stages share it, or on the last stage.
        early: whether a collective in one of the functions needs nothing but parameters.
    """

    def __init__(self, functions: Functions, schedule: Schedule, axis: Axis, params: PyTree, batch: PyTree):
        checks.check(schedule, axis, functions.where(params))
        checks.check_batch(batch)
        self.functions, self.schedule, self.axis = functions, schedule, axis
        self.params = split(varying(params, axis.names), functions)
        self.parts = split_into_microbatches(batch, schedule.microbatches)
        self.index = axis.index()
        self.first, self.last = self.index == 0, self.index == schedule.stages - 1
        self.counts: Bool[Array, ""] | bool = self.last
        self._trace(trained_of(params, functions))

    def params_after(self, carry: PyTree) -> Parameters:
        """The parameters, where a collective needs nothing else computed only after `carry`."""
        return ordered(self.params, carry) if self.early else self.params

    def job(self, jobs: Int[Array, " stages"]) -> tuple[Int[Array, ""], Int[Array, ""], Bool[Array, ""]]:
        """This stage's microbatch, its chunk, and whether it has a job in this tick at all."""
        job = jobs[self.index]
        microbatch, chunk = jnp.divmod(jnp.maximum(job, 0), self.schedule.chunks)
        return microbatch, chunk, job >= 0

    def at_hand(
        self, params: Parameters, microbatch: Int[Array, ""], chunk: Int[Array, ""], valid: Bool[Array, ""]
    ) -> tuple[Trained, Given]:
        """What the stage is differentiated in, and what else it is given."""
        params = self._of_chunk(params, chunk)
        trained = Trained(params.blocks, eqx.filter(params.ends, self.read))
        return trained, Given(params, self.part(microbatch), chunk, taps.job(microbatch, valid))

    def position(self, chunk: Int[Array, ""]) -> Int[Array, ""]:
        """The place in the model of one of this stage's chunks."""
        places = self.schedule.placed
        if np.array_equal(places.reshape(-1), np.arange(places.size)):
            return chunk * self.schedule.stages + self.index
        return jnp.asarray(places)[chunk, self.index]

    def part(self, microbatch: Int[Array, ""]) -> PyTree:
        """One microbatch."""
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, microbatch, keepdims=False), self.parts)

    def enter(self, params: Parameters, microbatch: Int[Array, ""]) -> PyTree:
        """What enters the first stage."""
        with taps.at(microbatch=microbatch):
            return like(self._enter(params, self.part(microbatch)), self.x)

    def stage(self, trained: Trained, x: PyTree, given: Given) -> tuple[PyTree, PyTree]:
        """A chunk of layers, as `kept` takes it: `((moving, loss), (still, aux))`, floating-point leaves of x moving."""
        params = given.params._replace(blocks=trained.blocks, ends=eqx.combine(trained.ends, given.params.ends))
        with taps.at(microbatch=given.job):
            made = self._stage(params, x, given.part, given.chunk)
        moving, still = eqx.partition(like(made.x, self.x), eqx.is_inexact_array)
        return (moving, varying(made.loss, self.axis.names)), (still, made.aux)

    def head(self, params: Parameters, x: PyTree, microbatch: Int[Array, ""]) -> tuple[Float[Array, ""], PyTree]:
        """A microbatch's loss, and auxiliary values: None if there are none."""
        with taps.at(microbatch=taps.job(microbatch, self.counts)):
            return self._head(params, x, self.part(microbatch))

    def shared_out(self, value: Array) -> bool:
        """Whether all stages have the head's value together; else it counts on the last."""
        along = [name for name in axes_of(self.axis) if name in varying_axes(value)]
        if along and not varies_along(value, self.axis):
            raise ValueError(
                f"pipeline: what the head returns differs along {along}, and is the same along the rest of {self.axis.names!r}. "
                "A head that the stages share must sum over all of these axes, and one that they do not share over none."
            )
        return not along

    def _enter(self, params: Parameters, part):
        return jax.tree.map(jnp.asarray, self.functions.enter(params.whole(), part))

    def _stage(self, params: Parameters, x, part, chunk) -> Output:
        return checks.output(self.functions.stage(params.whole(), x, part, self.position(chunk)))

    def _head(self, params: Parameters, x, part):
        return checks.loss_and_aux(self.functions.head(params.whole(), x, part))

    def _of_chunk(self, params: Parameters, chunk) -> Parameters:
        one = lambda w: w[0] if self.schedule.chunks == 1 else lax.dynamic_index_in_dim(w, chunk, keepdims=False)
        return params._replace(blocks=jax.tree.map(one, params.blocks), fixed_blocks=jax.tree.map(one, params.fixed_blocks))

    def _of_a_stage(self, value: Any) -> Any:
        """A zero of the type of what a stage adds up: it differs between stages."""
        return varying(jnp.zeros_like(value), self.axis.names)

    def _trace(self, trained: PyTree) -> None:
        """Find the types, and what each function reads. `trained` are the parameters as the user's code has them."""
        zero = self.index * 0
        part, chunk = self.part(zero), self._of_chunk(self.params, zero)
        traces = {}

        def trace(name, f, params, *others):
            arrays, static = eqx.partition(params, eqx.is_array)
            found = traced.trace(lambda arrays, *others: f(eqx.combine(arrays, static), *others), arrays, *others)
            traced.refuse_closures(name, found.outside, (trained, self.params.blocks, self.params.ends, chunk.blocks))
            traces[name] = found
            return found

        entered = trace("enter", lambda *given: varying(self._enter(*given), self.axis.names), self.params, part).out
        checks.activation(entered)
        self.x, made = None, jax.tree.map(jnp.zeros_like, entered)
        while self.x is None or _types(made) != _types(self.x):  # they only grow
            self.x = made
            made = trace("stage", self._stage, chunk, self.x, part, zero).out.x
            checks.same_form(made, self.x)
            made = like(jax.tree.map(jnp.zeros_like, made), self.x)
        made = traces["stage"].out
        self.terms = Output(None, *(jax.tree.map(self._of_a_stage, each) for each in (made.loss, made.aux)))

        def head(*given):
            loss, aux = self._head(*given)
            self.counts = True if self.shared_out(loss) else self.last
            return loss, aux

        of_head = trace("head", head, self.params, self.x, part)
        checks.head(of_head.jaxpr, of_head.used, self.axis)
        for name in ("enter", "head"):
            used = traces[name].used[0]
            traced.refuse_reading(name, eqx.combine(used.blocks, used.fixed_blocks), self.axis.names)
        self.read = traces["stage"].used[0].ends
        self.early = any(
            traced.moves_early(each.jaxpr, [i > 0 for i, of in enumerate(each.used) for _ in jax.tree.leaves(of)])
            for each in traces.values()
        )


def trained_of(params: PyTree, functions: Functions) -> PyTree:
    """What gets a gradient, with None for all else."""
    return eqx.filter(eqx.filter(params, functions.trainable), eqx.is_inexact_array)


def split(params: PyTree, functions: Functions) -> Parameters:
    """`params` by what becomes of them."""
    in_blocks = eqx.tree_at(functions.where, jax.tree.map(lambda _: False, params), replace_fn=_all_true)
    trained = trained_of(params, functions)
    rest = jax.tree.map(lambda x, own: x if own is None else None, params, trained)
    arrays = eqx.filter(rest, eqx.is_array)
    blocks = lambda tree: eqx.filter(tree, in_blocks)
    ends = lambda tree: eqx.filter(tree, in_blocks, inverse=True)
    static = eqx.filter(rest, eqx.is_array, inverse=True)
    return Parameters(blocks(trained), ends(trained), blocks(arrays), eqx.combine(ends(arrays), static))


def _types(tree: PyTree) -> list[Any]:
    return [varying_axes(leaf) for leaf in jax.tree.leaves(tree)]


def _all_true(subtree: Any) -> Any:
    return jax.tree.map(lambda _: True, subtree)
