"""A backward pass in two halves: the first half computes the cotangents of the inputs, and the
second half computes the gradients of the weights.

The backward pass of `y = tanh(x @ w)` is an example. The first half takes `ct`, the cotangent of y,
and computes `c = ct * (1 - y**2)` and `c @ w.T`, the cotangent of x. The second half computes
`x.T @ c`, the gradient of w. The second half does not take `ct`, so it takes c from the first half.

A value that only the second half needs is computed there if it is a matmul, or depends on a matmul
that is computed there. Otherwise the first half could hand over the value, or those operands of the
value that only the first half has. If these operands have fewer bytes than the value, the second
half computes the value; otherwise the first half does. So the first half computes the gradient of a
bias, a sum over tokens. If both halves need the result of a cheap operation (`CHEAP`) that uses no
value from the first half, both compute it; no matmul is computed twice. A scan becomes two scans:
the first scan stacks, over its iterations, the values that the second scan reads.

Words of this file: the first half is half 0, or the job `I` of a schedule; the second half is half
1, or `W`. `handed` arrays go from the first half to the second. `made` variables exist only in the
first half; those that the second half reads come to it as `handed` arrays. `late` variables exist
only in the second half. A `Step` is an equation of a half, and a `Cut` has the steps of both
halves, `first` and `second`. A `CutLoop` is a scan in two halves; its `trip` is the `Cut` of a
trip, that is, of one iteration. `Step.places` are indices of operands, while a variable named
`place` is the index of an equation in a jaxpr. `values` maps each variable to its value. The
operands of a scan are its constants, the initial values of its carries (`Loop.inits` returns their
indices), and the arrays that the scan slices. A barrier is an `optimization_barrier`, whose result
i is operand i.

Source: Qi et al., Zero bubble pipeline parallelism (arXiv 2401.10241), for the split. The method
here, dead-code elimination on any traced program, is our own.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from parallax.jaxprs import ELEMENTWISE, LAID_OUT, has_effects, is_literal, opened, types
from parallax.split_backward.flat import (
    Flat,
    Loop,
    Values,
    apply,
    barrier,
    flat,
    is_barrier,
    live,
    primitives,
    read,
    size,
    variables_of,
)

# Operations that cost little beside a matmul: elementwise ones, reshapes, and sums along a dim.
CHEAP = (
    ELEMENTWISE
    | LAID_OUT
    | {"transpose", "slice", "rev", "iota", "concatenate", "pad", "split", "replicated"}
)
CHEAP |= {
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_and",
    "reduce_or",
    "argmax",
    "argmin",
    "dynamic_slice",
}


def split(
    backward: ClosedJaxpr, *, cotangents: int, inputs: int
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Returns the two halves of a backward pass. Other stages of a pipeline wait only for the
    first half, so the second half may run later.

    Args:
        backward: the backward pass, as a jaxpr. It takes the cotangents of the forward pass's
            outputs, and then the arrays that both halves may read. It returns the cotangents of
            the forward pass's inputs, and then the gradients of the weights.
        cotangents: the number of cotangents that `backward` takes.
        inputs: the number of cotangents that `backward` returns.

    Returns:
        A pair of jaxprs. The first half takes the arguments of `backward`, and returns the
        cotangents of the inputs and then the arrays for the second half. The second half takes the
        arguments of `backward` without the cotangents, followed by the arrays from the first half,
        and returns the gradients of the weights.
    """
    program = flat(backward)  # with all calls, such as `jit`, inlined
    arguments = program.jaxpr.invars
    results = range(len(program.jaxpr.outvars))
    # The cotangents are arguments of the first half only.
    halves = _cut(program, results[:inputs], results[inputs:], made=set(arguments[:cotangents]))

    def first(*values):
        """Runs the first half of the backward pass: returns the cotangents of the inputs, and then
        the arrays for the second half.
        """
        cotangents_of_inputs, handed = halves.run_first(
            dict(zip(arguments, values, strict=True)), results[:inputs]
        )
        return [*cotangents_of_inputs, *handed]

    def second(*values):
        """Runs the second half of the backward pass, and returns the gradients of the weights.
        `values` has the arrays that both halves may read, and then the arrays from the first
        half."""
        # The first arguments, `cotangents` in number, belong to the first half only; the second
        # half takes the others, `shared` in number.
        shared = len(arguments) - cotangents
        known = dict(zip(arguments[cotangents:], values[:shared], strict=True))
        return halves.run_second(known, values[shared:], results[inputs:])

    half_of_inputs = jax.make_jaxpr(first)(*types(arguments))
    # The results after the cotangents are the handed arrays. `opened` takes the jaxpr out of the
    # closed jaxpr that `make_jaxpr` returns.
    handed = types(opened(half_of_inputs).outvars[inputs:])
    return half_of_inputs, jax.make_jaxpr(second)(*types(arguments[cotangents:]), *handed)


class Step(NamedTuple):
    """An equation that one half of a backward pass runs.

    Attributes:
        eqn: the equation.
        loop: for a scan, the `CutLoop` of its two halves; for other equations None.
        places: for a barrier, the indices of the operands that it takes in this half, since the
            half may not have all of them. `_chosen` sets this field, which is used only for
            barriers.
    """

    eqn: JaxprEqn
    loop: "CutLoop | None"
    places: tuple[int, ...]

    def reads(self, half: int) -> list[Any]:
        """Returns the variables that the equation reads in one half of the backward pass. `half` is
        0 for the first half and 1 for the second."""
        # The indices of the operands that the equation reads: all operands, except that a scan and
        # a barrier read only those that this half needs.
        operands: Collection[int] = range(len(self.eqn.invars))
        if self.loop is not None:
            operands = self.loop.reads(half)
        elif is_barrier(self.eqn):
            operands = self.places
        return variables_of([self.eqn.invars[i] for i in operands])

    def run(self, jaxpr: Jaxpr, values: Values) -> None:
        """Runs the equation of this step, and adds the equation's results to `values`. The equation
        must be one of `jaxpr`, and must not be a scan."""
        if is_barrier(self.eqn):
            # Only on the operands that this half has; result i of a barrier is operand i.
            results = barrier(read([self.eqn.invars[i] for i in self.places], values))
            values.update(zip((self.eqn.outvars[i] for i in self.places), results, strict=True))
        else:
            values.update(zip(self.eqn.outvars, apply(jaxpr, self.eqn, values), strict=True))


class Cut(NamedTuple):
    """A program in two halves.

    Attributes:
        program: the whole program.
        first: the steps of the first half.
        second: the steps of the second half.
        handed: those variables in `made` that the second half reads. The first half returns the
            values of these variables, followed by the arrays that its scans stack.
        made: the variables whose values only the first half has: its own arguments, and the results
            that only this half computes.
        reads: the arguments that the first half reads, and the arguments that the second half
            reads, as a pair of sets.
    """

    program: Flat
    first: list[Step]
    second: list[Step]
    handed: list[Any]
    made: set[Any]
    reads: tuple[set[Any], set[Any]]

    @property
    def handed_count(self) -> int:
        """The number of arrays that go from the first half to the second. If the first half has
        scans, the number includes the arrays that the scans stack for the second half."""
        # A scan stacks each array that its trips hand over, and hands over the stacks. These are
        # not in `self.handed`. All such scans are in `first`: to a scan that runs only in the
        # second half, nothing is handed.
        return len(self.handed) + sum(
            step.loop.trip.handed_count for step in self.first if step.loop is not None
        )

    def run_first(self, arguments: Values, outputs: Collection[int]) -> tuple[list[Any], list[Any]]:
        """Runs the first half: returns the results at the indices `outputs`, and the arrays for the
        second half. `arguments` has the values of the arguments that the first half reads."""
        values, from_scans = self.program.constants | arguments, []
        # The arrays of scans come last, in the order of the steps, as `run_second` reads them.
        for step in self.first:
            if step.loop is None:
                step.run(self.program.jaxpr, values)
            else:
                from_scans += step.loop.run_first(step.eqn, values)
        return self._results(outputs, values), [*read(self.handed, values), *from_scans]

    def run_second(
        self, arguments: Values, handed: Sequence[Any], outputs: Collection[int]
    ) -> list[Any]:
        """Runs the second half: returns the results at the indices `outputs`, from the arguments
        that this half reads and the arrays that the first half handed over."""
        # `handed` has first the values of `self.handed`, and then the arrays that each scan of the
        # first half stacked, scan after scan. `strict=False`: only the first part belongs here.
        values = self.program.constants | arguments | dict(zip(self.handed, handed, strict=False))
        # The second part of `handed`, cut into the arrays of each scan. The key is the identity of
        # the whole scan's equation: both halves keep this equation. A result would be no key, since
        # a scan that only prints has none.
        of_scans: dict[int, Sequence[Any]] = {}
        begin = len(self.handed)
        for step in self.first:
            if step.loop is not None:
                end = begin + step.loop.trip.handed_count
                of_scans[id(step.eqn)] = handed[begin:end]
                begin = end
        # Each step adds its results to `values`.
        for step in self.second:
            if step.loop is None:
                step.run(self.program.jaxpr, values)
            else:
                # `()` for a scan that runs only in the second half.
                step.loop.run_second(step.eqn, values, of_scans.get(id(step.eqn), ()))
        return self._results(outputs, values)

    def _results(self, outputs: Collection[int], values: Values) -> list[Any]:
        """Returns the values of the program's results at the indices `outputs`."""
        return read([self.program.jaxpr.outvars[i] for i in outputs], values)


class CutLoop(NamedTuple):
    """A scan as two scans, one in each half.

    Attributes:
        loop: the whole scan.
        trip: the two halves of each iteration of the scan.
        results: for each half, the indices of the scan's results that this half computes.
    """

    loop: Loop
    trip: Cut
    results: tuple[frozenset[int], frozenset[int]]

    def reads(self, half: int) -> set[int]:
        """Returns the indices of the scan's operands that a half of the scan needs. `half` is 0 for
        the first half and 1 for the second."""
        # Argument i of a trip belongs to operand i of the scan. `results` and `trip.reads` have one
        # entry for each half: the indices of its results, and the arguments that its trips read.
        loop, results = self.loop, self.results[half]
        in_trip = {
            i
            for i, variable in enumerate(loop.body.jaxpr.invars)
            if variable in self.trip.reads[half]
        }
        # A half needs the initial values of only those carries that it computes itself. If the
        # second half reads a carry of the first half, each trip hands that carry over.
        own_inits = {loop.consts + i for i in results if i < loop.carries}
        return (in_trip - set(loop.inits())) | own_inits

    def run_first(self, eqn: JaxprEqn, values: Values) -> list[Any]:
        """Runs the scan of the first half, and adds its results to `values`. Returns the arrays for
        the second half, each stacked over the iterations: [iterations, ...]. `eqn` is the equation
        of the whole scan."""

        def one_trip(arguments, nothing_handed):
            return self.trip.run_first(arguments, sorted(self.results[0]))

        # `()`: nothing is handed to the first half.
        return self._run(eqn, values, 0, one_trip, ())

    def run_second(self, eqn: JaxprEqn, values: Values, handed: Sequence[Any]) -> None:
        """Runs the scan of the second half, and adds its results to `values`. `eqn` is the equation
        of the whole scan, and `handed` has the arrays that the first half stacked for this half,
        [iterations, ...] each."""

        # `[]`: the second half hands nothing on.
        def one_trip(arguments, handed):
            return self.trip.run_second(arguments, handed, sorted(self.results[1])), []

        self._run(eqn, values, 1, one_trip, handed)

    def _run(
        self,
        eqn: JaxprEqn,
        values: Values,
        half: int,
        one_trip: Callable[..., Any],
        handed: Sequence[Any],
    ) -> list[Any]:
        """Runs the scan of one half, and adds its results to `values`.

        `one_trip(arguments, handed)` runs this half of one iteration of the scan. It returns the
        results, and the arrays that the first half hands to the second (none from the second half).
        `handed` has these arrays for all iterations, [iterations, ...] each (none for the first
        half). `_run` returns the arrays that this half hands on, stacked: [iterations, ...] each.
        """
        # `results` are indices of results of the scan; sorted, the carries come before the stacked
        # results. `inits` and `sliced` are indices of operands of the scan: this half's carries and
        # slices. Inside a trip, operand i is the variable `variables[i]`. The operands are the
        # constants, the carries and the slices, so carry i is operand `loop.consts + i`.
        loop, results = self.loop, sorted(self.results[half])
        variables = loop.body.jaxpr.invars  # one for each operand of the scan
        carry_count = sum(i < loop.carries for i in results)
        inits = [loop.consts + i for i in results[:carry_count]]
        operands = {i: read([eqn.invars[i]], values)[0] for i in self.reads(half)}
        consts = {variables[i]: x for i, x in operands.items() if i < loop.consts}
        sliced = [i for i in operands if i >= loop.consts + loop.carries]

        def trip(carry, slices):
            """Runs this half of one iteration, as the body of `lax.scan`. Returns the carry, and a
            pair to stack: the results that are no carry, and the arrays that this half hands on."""
            sliced_values, handed_to_trip = slices
            arguments = consts | dict(
                zip(
                    (variables[i] for i in [*inits, *sliced]), [*carry, *sliced_values], strict=True
                )
            )
            trip_results, handed_on = one_trip(arguments, handed_to_trip)
            return trip_results[:carry_count], (trip_results[carry_count:], handed_on)

        # The trips keep the order of the original scan, so that sums round in the same way.
        order = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        slices = [operands[i] for i in sliced], list(handed)
        carry, (stacked, handed_on) = lax.scan(trip, [operands[i] for i in inits], slices, **order)
        values.update(zip((eqn.outvars[i] for i in results), [*carry, *stacked], strict=True))
        return handed_on


def _cut(
    program: Flat,
    first: Collection[int],
    second: Collection[int],
    *,
    made: set[Any],
    late: Collection[Any] = (),
) -> Cut:
    """Returns the program in two halves: the first half computes the results `first`, and the
    second half computes the results `second`. Each half has only the equations that it needs.

    Args:
        program: the whole program.
        first: the indices of results that the first half returns.
        second: the indices of results that the second half returns.
        made: the arguments that exist only in the first half.
        late: the arguments that exist only in the second half; no result in `first` needs them.
    """
    jaxpr = program.jaxpr
    # `live` returns the needed equations, as a dict from the place of each to the indices of its
    # needed results: here for the results `first` alone, and for all results of both halves.
    needed_first, (needed_results, _) = live(program, first)[0], live(program, {*first, *second})
    made, late = set(made), set(late)
    # For each equation that a result needs: its step, and whether each of the two halves may run
    # it.
    plan: list[tuple[Step, tuple[bool, bool]]] = []
    for place, results in needed_results.items():
        eqn, loop, runs_in = jaxpr.eqns[place], None, (True, True)
        # A barrier and a scan may run in both halves, in each with a part of the operands. So
        # `runs_in` stays (True, True), and each of their results that only one half computes is
        # added to `made` or `late`. `_chosen` does not let the other half compute such a result.
        if is_barrier(eqn):
            made |= _behind_barrier(eqn, made)
            late |= _behind_barrier(eqn, late)
        elif place in program.loops:
            # The first half cannot read operands in `late`, so `_cut_loop` gets `late`. The second
            # half can read operands in `made`, since they are handed over.
            loop = _cut_loop(
                program.loops[place], eqn, needed_first.get(place, frozenset()), results, late
            )
            made |= {eqn.outvars[i] for i in loop.results[0]}
            late |= {eqn.outvars[i] for i in loop.results[1]}
        else:
            runs_in = _may_run_in(eqn, made, late, is_needed_first=place in needed_first)
        if runs_in == (True, False):
            made |= set(eqn.outvars)
        elif runs_in == (False, True):
            late |= set(eqn.outvars)
        plan.append((Step(eqn, loop, ()), runs_in))  # `_chosen` sets the operands of a barrier
    # The last argument of `_chosen` has the variables that a half must not compute. The steps of
    # the second half (1) are chosen first, since the first half (0) must compute what these read.
    second_steps, needed_by_second = _chosen(plan, 1, _outputs(jaxpr, second), made)
    # Both halves must list the handed arrays in one order, which a set does not have.
    in_order = [*jaxpr.invars, *(variable for eqn in jaxpr.eqns for variable in eqn.outvars)]
    handed = [
        variable for variable in in_order if variable in needed_by_second and variable in made
    ]
    first_steps, needed_by_first = _chosen(plan, 0, _outputs(jaxpr, first) | set(handed), late)
    # The last field has the arguments that each half reads. The second half gets an argument that
    # only the first half has (`made`) as a handed array.
    arguments = set(jaxpr.invars)
    return Cut(
        program,
        first_steps,
        second_steps,
        handed,
        made,
        (needed_by_first & arguments, (needed_by_second - made) & arguments),
    )


def _outputs(jaxpr: Jaxpr, places: Collection[int]) -> set[Any]:
    """Returns the variables of a jaxpr's results at the indices `places`."""
    return set(variables_of([jaxpr.outvars[i] for i in places]))


def _behind_barrier(eqn: JaxprEqn, variables: Collection[Any]) -> set[Any]:
    """Returns the results of a barrier that belong to the operands in `variables`."""
    # Result i of a barrier depends only on operand i.
    pairs = zip(eqn.invars, eqn.outvars, strict=True)
    return {out for atom, out in pairs if not is_literal(atom) and atom in variables}


def _may_run_in(
    eqn: JaxprEqn, made: set[Any], late: set[Any], *, is_needed_first: bool
) -> tuple[bool, bool]:
    """Returns two booleans: whether the first half may run an equation, and whether the second half
    may. If both may, each half that needs the results runs the equation (`_chosen`).

    Args:
        eqn: the equation.
        made: the variables that only the first half has.
        late: the variables that only the second half has.
        is_needed_first: whether a result of the first half needs the equation.
    """
    reads = set(variables_of(eqn.invars))
    if is_needed_first:
        # The second half may repeat the equation if that costs little and it has the operands.
        return True, not reads & made and _is_cheap(eqn)
    # No result of the first half needs it, so it is for the second half. It must run there if it
    # reads a late variable. It also runs there if it is expensive: other stages wait for the first
    # half, so that stays short.
    if reads & late or not _is_cheap(eqn):
        return False, True
    if reads & made:
        # If the first half runs it, its results are handed over. If the second half runs it, its
        # `made` operands are handed over. The half that leads to fewer bytes runs it.
        is_smaller = size(set(eqn.outvars)) <= size(reads & made)
        return is_smaller, not is_smaller
    # It is cheap, and both halves have its operands. The first half runs it too if it must compute
    # a handed array from it: to run it twice costs less than to store its result.
    return True, True


def _cut_loop(
    loop: Loop, eqn: JaxprEqn, first: frozenset[int], results: frozenset[int], late: Collection[Any]
) -> CutLoop:
    """Returns the scan `loop`, whose equation is `eqn`, as two scans: the first half computes the
    results `first`, and the second half the rest of `results`. `first` and `results` are sets of
    indices. `late` are the variables whose values exist only in the second half, so the first
    half cannot read them.

    A stacked result moves to the first half if the first half computes its values anyway.
    """
    variables, outputs = loop.body.jaxpr.invars, loop.body.jaxpr.outvars
    # The arguments of a trip whose operands are late.
    late_inside = {
        inside
        for inside, atom in zip(variables, eqn.invars, strict=True)
        if not is_literal(atom) and atom in late
    }

    def carried(results):
        """Returns, for each carry in `results`, the argument of the body's jaxpr that is this
        carry. `results` are indices of the scan's results. The carries have the lowest indices."""
        return {variables[loop.consts + i] for i in results if i < loop.carries}

    while True:
        second = results - first
        trip = _cut(
            loop.body, first, second, made=carried(first), late=carried(second) | late_inside
        )
        # A carry never moves: if the first half needs it, it is in `first` from the beginning. A
        # literal needs no move.
        stacked = [i for i in second if i >= loop.carries and not is_literal(outputs[i])]
        # If a result moves to the first half, that half may compute more variables, so the trip is
        # cut again.
        made_anyway = {i for i in stacked if outputs[i] in trip.made}
        if not made_anyway:
            return CutLoop(loop, trip, (first, second))
        first = first | made_anyway


def _chosen(
    plan: Sequence[tuple[Step, tuple[bool, bool]]], half: int, needed: set[Any], elsewhere: set[Any]
) -> tuple[list[Step], set[Any]]:
    """Returns a list of steps for one half, and a set of variables. `half` is 0 for the first half
    and 1 for the second. The list has the steps that compute the variables `needed`, and the steps
    with side effects that this half may run. The set has `needed` and all variables that these
    steps read. `plan` has all steps in order, each with two booleans: whether each half may run the
    step. The half computes no variable in `elsewhere`, since only the other half computes these."""
    chosen = []
    # From the last step to the first, so that all readers of a result are known before its step.
    for step, runs_in in reversed(plan):
        # A step with effects is chosen even if nothing is wanted. An equation with effects runs
        # only once: `_may_run_in` allows it in the first half alone. A scan with effects is chosen
        # in both halves, but only the first half's trips have the effects. If the second half
        # wants no result of such a scan, its trips there are empty.
        wanted = needed & set(step.eqn.outvars) - elsewhere
        if not runs_in[half] or not (wanted or has_effects(step.eqn)):
            continue
        # The `places` are for a barrier, whose result i is operand i: it takes only the operands of
        # the wanted results. Any other equation ignores them and runs as a whole.
        places = tuple(i for i, variable in enumerate(step.eqn.outvars) if variable in wanted)
        chosen.append(step._replace(places=places))
        needed = needed | set(chosen[-1].reads(half))
    return chosen[::-1], needed


def _is_cheap(eqn: JaxprEqn) -> bool:
    """Returns whether an equation may be computed twice at little cost: it has no side effect, and
    all operations in it are among `CHEAP`."""
    return not has_effects(eqn) and all(name in CHEAP for name in primitives(eqn))
