"""Detects a mistake in a pipeline's head, the function that computes the loss from a stage's output
`x`. The mistake is a sum over the stages that includes values computed from the `x` of early
stages.

An *early* stage is any stage before the last. The head runs on every stage, but only the last
stage's `x` is the model's output. So `psum(loss(x))` over the stages is wrong, and
`psum(where(index == last, loss(x), 0))` is right: a factor or a choice that depends on the stage's
index makes the terms of early stages zero. Such a factor depends on no argument of the program, so
the factor is computed here for every early stage.

The head's program is read equation by equation. The `Terms` of a value have five fields. `early`
says whether the value depends on the `x` of an early stage, `is_number` whether it depends on no
argument of the program, and `indexed` whether it depends on the stage's index. If `is_number` is
True, `by_index` is the function from a stage's index to the value on that stage, or None if the
value is unknown. If a value was gathered from all stages, `gathered` is the dim in which the `x` of
all stages stand one after the other.

`_Sums` inherits from `jaxprs.FollowingAlong`: `run` computes the `Terms` of a program's results,
`met` joins the `Terms` of all operands, and `is_sent` says whether an equation communicates over
the axis. `_Sums.stages` are the indices of the early stages.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import core
from jax.extend.core import ClosedJaxpr, JaxprEqn

from parallax import jaxprs
from parallax.collectives import types

# These return their operand; at most its type changes, which says along which mesh axes it varies.
# Such a change of type cannot run outside of a `shard_map`.
CASTS = frozenset({"copy_p", "optimization_barrier", "pbroadcast", "pcast", "pvary"})
SMALL = 4096  # elements: the numbers of a larger array are not computed


class Terms(NamedTuple):
    """How a value in the head's program depends on a stage's `x` and on the stage's index.

    Attributes:
        early: whether the value depends on the `x` of an early stage, any stage but the last.
        is_number: whether the value depends on no argument of the head's program, so that it can be
            computed here.
        indexed: whether the value depends on the stage's index.
        by_index: the function from a stage's index to the value on that stage. None if `is_number`
            is False, or if the value is unknown, for example because an equation's result has more
            than `SMALL` elements.
        gathered: if the value was gathered from all stages, the dim in which the `x` of all stages
            stand one after the other; None for other values.
    """

    early: bool = False
    is_number: bool = False
    indexed: bool = False
    by_index: Callable[[int], Any] | None = None
    gathered: int | None = None

    def __or__(self, second: tuple[Any, ...]) -> "Terms":
        """Returns the `Terms` of a value that is computed from two values, whose `Terms` are `self`
        and `second`. `by_index` of the result is None, since this method does not know the
        operation that computes the value."""
        early, is_number, indexed, *_ = second
        return Terms(self.early or early, self.is_number and is_number, self.indexed or indexed)


def adds_up(program: ClosedJaxpr, axis: str, of_x: Sequence[bool]) -> bool:
    """Returns whether a sum over `axis` in the program includes a term that a device other than the
    last computes from its `x`. `of_x` says of each argument of the program whether the argument is
    part of `x`.

    A term may have a factor, or be under a condition, that depends on the device's index. If the
    values of the factor or of the condition are unknown, the term is not reported. The values are
    unknown if there are more than `SMALL` of them, or if they may change in each iteration of a
    loop.
    """
    sums = _Sums(axis)
    # The first field of `Terms` is `early`: an `x` begins as the `x` of an early stage.
    sums.run(program, list(map(Terms, of_x)))
    return sums.added


class _Sums(jaxprs.FollowingAlong):
    """Looks in a program for sums over the devices of an axis. `added` says whether a sum has a
    term computed from the `x` of an early stage, any stage but the last."""

    unknown = Terms()

    def __init__(self, axis: str):
        super().__init__(axis)
        self.added = False
        # The early stages.
        self.stages = range(types.axis_size(axis) - 1)

    def constant(self, aval: Any, value: Any) -> Terms:
        """Returns the `Terms` of a constant of the program. A constant whose value is known is
        marked `is_number`."""
        # None is an unknown constant. A traced constant has no value either.
        if value is None or isinstance(value, core.Tracer):
            return Terms()
        return _number_of(value)

    def plain(self, eqn: JaxprEqn, operands: list[Terms], aval: Any) -> Terms:
        """Returns the `Terms` of an equation's result, whose type is `aval`, from the `Terms` of
        the operands. `run` calls it for each equation that is no conditional, loop or call. Sets
        `self.added` to True if the equation sums, over the stages, values computed from the `x` of
        early stages."""
        # `differs`: the result may differ between the stages.
        name, differs = eqn.primitive.name, self.axis in types.axes_of_type(aval)
        if name == "axis_index":
            return self._index(eqn.params["axis_name"])
        # By default, the result depends on all that any operand depends on. `is_number` is False
        # here even if it is True for all operands; `_number` below sets it to True.
        joined = self.met(operands)._replace(is_number=False)
        # A sum over the stages is a collective that is no gather, and whose result is the same on
        # all stages. The result of a gather is followed, since the program may sum its gathered dim
        # later. The result of any other collective, such as a `ppermute`, is no longer followed.
        if joined.early and self.is_sent(eqn):
            is_gather = "all_gather" in name
            self.added |= not is_gather and not differs
            return Terms(gathered=eqn.params["all_gather_dimension"] if is_gather else None)
        if any(operand.gathered is not None for operand in operands):
            return self._of_gathered(eqn, operands, aval)
        # The result depends on no argument, and can be computed for one stage alone (`_is_local`).
        if all(operand.is_number for operand in operands) and _is_local(eqn):
            joined = self._number(eqn, operands, aval)
        # A choice by the stage's index.
        elif name == "select_n" and operands[0].is_number and operands[0].indexed:
            joined = self._chosen(*operands)
        # A factor that is zero on all early stages, such as `index == last`, removes the terms of
        # these stages from a later sum.
        elif name in ("mul", "dot_general") and any(map(self._is_zero, operands)):
            joined = Terms()
        # A value that is the same on all stages, by its type, does not depend on one stage's `x`.
        # An example is the condition by which `cpu.sequence_after` makes a value wait for another.
        return joined if differs else joined._replace(early=False)

    def _of_gathered(self, eqn: JaxprEqn, operands: Sequence[Terms], aval: Any) -> Terms:
        """Returns the `Terms` of a result that is computed from a gathered operand; `aval` is the
        type of the result. Sets `self.added` to True if the equation reduces or contracts the
        gathered dim, in which the `x` of all stages stand one after the other.

        The gathered dim is followed through transposes, through reductions of other dims, and
        through operations that keep the shape. It is not followed if an operand of a product
        (`mul`) or of a choice (`select_n`) depends on no argument: this operand may be a mask that
        leaves early stages out. It is not followed through any other operation either, such as a
        slice, which may take only the last stage's `x`. In both cases the check reports no later
        sum over the dim.
        """
        name = eqn.primitive.name
        # The index of the first gathered operand, and its gathered dim. A second gathered operand
        # is not followed: no sum over its dim is reported.
        place, dim = next(
            (i, operand.gathered)
            for i, operand in enumerate(operands)
            if operand.gathered is not None
        )
        if name.startswith(("reduce_", "arg")) and "axes" in eqn.params:
            axes = eqn.params["axes"]
            self.added |= dim in axes
            return Terms(gathered=None if dim in axes else dim - sum(axis < dim for axis in axes))
        if name == "dot_general":
            contracted, _ = eqn.params["dimension_numbers"]
            self.added |= dim in contracted[place]
        # A `dot_general` does not return above. Like other operations, it is followed below if its
        # result has the shape of the gathered operand. The index of the gathered dim is then
        # assumed to be the same; dims of equal size could make this wrong.
        if name == "transpose":
            return Terms(gathered=eqn.params["permutation"].index(dim))
        # An equation with a program inside (`inner`) is not followed: it may move or sum any dim.
        is_kept = aval.shape == jaxprs.types(eqn.invars)[place].shape and not jaxprs.inner(eqn)
        is_chosen = name in ("mul", "select_n") and any(operand.is_number for operand in operands)
        return Terms(gathered=dim if is_kept and not is_chosen else None)

    def met(self, operands: Sequence[Terms]) -> Terms:
        """Returns the `Terms` of a value that depends on all `operands`. If all operands depend on
        no argument (`is_number`), the value depends on no argument either. `by_index`, the function
        from a stage's index to the value, is None: this method does not know which operation
        computes the value."""
        is_number = all(operand.is_number for operand in operands)
        return super().met(operands)._replace(is_number=is_number)

    def branches(self, eqn: JaxprEqn, operands: list[Terms]) -> list[Terms]:
        """Returns the `Terms` of a conditional's results. If the stage's index chooses the branch,
        `_branch` gives the `Terms` of each result."""
        which, *others = operands
        if not (which.is_number and which.indexed):
            return super().branches(eqn, operands)
        every_branch = [self.run(branch, others) for branch in eqn.params["branches"]]
        return [self._branch(which, cases) for cases in zip(*every_branch, strict=True)]

    def _branch(self, which: Terms, cases: Sequence[Terms]) -> Terms:
        """Returns the `Terms` of one result of a conditional: the joined `Terms` of the result in
        the branches that early stages run. If the result depends on no argument (`is_number`) in
        every branch, `by_index` of the returned `Terms` gives the result on each stage. `which` has
        the `Terms` of the branch's index. The caller has checked that the branch's index depends on
        the stage's index and on no argument. `cases` has the `Terms` of the result in each
        branch."""
        if not all(case.is_number for case in cases):
            return self._chosen(which, *cases)
        # `_returned` computes the branch's index on a stage, and then the result of that branch. It
        # needs the values of `which` and of every case, one more than there are cases.
        known = [value.by_index for value in (which, *cases) if value.by_index]
        is_known = len(known) > len(cases)
        by_index = functools.partial(_returned, known) if is_known else None
        return Terms(is_number=True, indexed=True, by_index=by_index)

    def loop(self, body, constants, carry, sliced):
        """Returns the `Terms` of a loop's results. `body` is the program of one iteration, and the
        other arguments are the `Terms` of the loop's operands, by kind: constants, carries and
        arrays that are sliced by iteration. If a carry, a slice or a result depends on no argument
        (`is_number`), it may still change in each iteration, so its value becomes unknown. The
        values of constants stay known."""

        def unnumbered(values):
            return [value._replace(by_index=None) for value in values]

        return unnumbered(super().loop(body, constants, unnumbered(carry), unnumbered(sliced)))

    def _index(self, axis: str) -> Terms:
        """Returns the `Terms` of `axis_index(axis)`. For the axis that is checked, the value is the
        stage's index; for another axis, the value is taken to be the last index of that axis."""
        if axis == self.axis:
            return Terms(is_number=True, indexed=True, by_index=np.int32)
        # If the stages are several mesh axes, this check runs once for each of them. The last stage
        # is the last device along all of them, so the index along the others is the last one. Of
        # an axis that is not of the stages, such as a data axis, only the last index is checked.
        return _number_of(np.int32(types.axis_size(axis) - 1))

    def _number(self, eqn: JaxprEqn, operands: Sequence[Terms], aval: Any) -> Terms:
        """Returns the `Terms` of the result of an equation whose operands depend on no argument.
        The result's values are known if there are at most `SMALL` of them and the values of all
        operands are known. The result's values are computed only when `by_index` is called."""
        known = [operand.by_index for operand in operands if operand.by_index]
        is_small = aval.size <= SMALL and len(known) == len(operands)
        computed = functools.partial(_computed, eqn, known) if is_small else None
        indexed = any(operand.indexed for operand in operands)
        return Terms(is_number=True, indexed=indexed, by_index=computed)

    def _before_the_last(self, value: Terms) -> list[np.ndarray]:
        """Returns a list with one array for each early stage: the value that `value.by_index` gives
        for this stage. Returns an empty list if the values are unknown."""
        if value.by_index is None:
            return []
        try:
            return [np.asarray(value.by_index(index)) for index in self.stages]
        except RuntimeError:
            # JAX has no backend to compute with, as when `plan` runs without devices.
            return []

    def _is_zero(self, factor: Terms) -> bool:
        """Returns whether a factor depends on the stage's index and on no argument (`is_number`),
        and is zero on all early stages. If its values are unknown, they count as zero."""
        is_factor = factor.is_number and factor.indexed
        return is_factor and not any(map(np.any, self._before_the_last(factor)))

    def _chosen(self, which: Terms, *cases: Terms) -> Terms:
        """Returns the `Terms` of `select_n(which, *cases)`: the joined `Terms` of the cases that
        early stages select. `which` has the `Terms` of the indices of the selected cases; the
        callers check that these indices depend on no argument (`is_number`). If the indices are
        unknown, no case is joined, so the check reports no sum of the selected values."""
        # `_before_the_last` gives the indices on each early stage, or nothing if they are unknown.
        taken = {
            int(case) for numbers in self._before_the_last(which) for case in np.unique(numbers)
        }
        # The callers pass at least one case whose `is_number` is False. So the result's `is_number`
        # is False too, even if that case is not taken.
        return self.met([cases[case] for case in taken])._replace(is_number=False)


def _number_of(value: Any) -> Terms:
    """Returns the `Terms` of `value`, which depends on no argument and is the same on all
    stages."""
    return Terms(is_number=True, by_index=lambda index: value)


def _is_local(eqn: JaxprEqn) -> bool:
    """Returns whether an equation has one result, has no program inside, and is not a collective.
    Only such an equation can be computed for one stage alone, as `_computed` does."""
    return (
        len(eqn.outvars) == 1
        and not jaxprs.inner(eqn)
        and eqn.primitive.name not in jaxprs.COLLECTIVES
    )


def _computed(eqn: JaxprEqn, operands: Sequence[Callable[[int], Any]], index: int) -> Any:
    """Returns an equation's result on the stage with the number `index`. Each operand is a function
    that takes a stage's number and returns the operand's value on that stage."""
    values = [operand(index) for operand in operands]
    # These change at most the axes along which the operand is typed as varying, not its value. They
    # cannot run here, outside of the `shard_map` that has these axes.
    if eqn.primitive.name in CASTS:
        return values[0]
    # The result is computed now: without this context, JAX could add the equation to a program that
    # is being traced.
    with core.eval_context():
        return eqn.primitive.bind(*values, **eqn.params)


def _returned(operands: Sequence[Callable[[int], Any]], index: int) -> Any:
    """Returns a conditional's result on the stage with the number `index`. Each operand is a
    function that takes a stage's number. The first operand returns the number of the branch, and
    the others return the results of the branches, in order."""
    branch, *values = operands
    return values[int(branch(index))](index)
