"""A program taken apart in two: what its first results need, and the rest, which goes on from what the first part made.

Of a stage's transpose the first results are the cotangents of its input (I), the rest the gradients of its weights (W). What
only W needs runs in W if it is a product, or follows one, or would make what waits between the two parts larger. All that is
left runs in I, such as the sums over tokens that are a bias' gradient. W computes again what is cheap and needs nothing that
I made; no product is computed twice. A scan becomes two, of which the first stacks up what the second reads, trip by trip.

Source: Qi et al., Zero bubble pipeline parallelism (arXiv 2401.10241), for I and W; that they can be cut out of any traced
program, as dead code is, is ours.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from jax import lax

from parallax.elementwise import ELEMENTWISE, LAID_OUT
from parallax.jaxprs import is_literal
from parallax.pipeline.program import Loop, Program, Step, Values, live, loop, numbers, primitives, run, size, value

# What costs little beside a product: element by element, laid out anew, and sums along a dim.
CHEAP = ELEMENTWISE | LAID_OUT | {"transpose", "slice", "rev", "iota", "concatenate", "pad", "split", "replicated"}
CHEAP |= {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin", "dynamic_slice"}


class Apart(NamedTuple):
    """A program in two parts.

    Attributes:
        of: the program.
        first: the steps of the first part, a scan with how its trips are taken apart.
        second: those of the second.
        passed: values of the first that the second reads; behind them come those of each scan in `first`.
        made: all values of the first part.
        reads: the inputs that each part reads.
    """

    of: Program
    first: list[tuple[Step, "Trips | None"]]
    second: list[tuple[Step, "Trips | None"]]
    passed: list[int]
    made: set[int]
    reads: tuple[set[int], set[int]]

    @property
    def count(self) -> int:
        """How many arrays go from the first part to the second."""
        return len(self.passed) + sum(trips.parts.count for _, trips in self.first if trips is not None)

    def run_first(self, arguments: Values, outputs: Collection[int]) -> tuple[list[Any], list[Any]]:
        """These results, and what the second part needs. `arguments` has the inputs that the first part reads, by number."""
        values, stacks = self.of.constants | arguments, []
        for step, trips in self.first:
            if trips is None:
                run(step, values)
            else:
                stacks += trips.run_first(step, values)
        return _read(self.of, outputs, values), [values[name] for name in self.passed] + stacks

    def run_second(self, arguments: Values, passed: Sequence[Any], outputs: Collection[int]) -> list[Any]:
        """These results, from the inputs that the second part reads and what the first passed on."""
        values = self.of.constants | arguments | dict(zip(self.passed, passed, strict=False))
        stacks: dict[int, Sequence[Any]] = {}
        begin = len(self.passed)
        for step, trips in self.first:
            if trips is not None:
                stacks[step.makes[0]] = passed[begin : begin + trips.parts.count]
                begin += trips.parts.count
        for step, trips in self.second:
            if trips is None:
                run(step, values)
            else:
                trips.run_second(step, values, stacks.get(step.makes[0], ()))
        return _read(self.of, outputs, values)


class Trips(NamedTuple):
    """A scan in two: `parts` of each trip, and which of its results each makes."""

    loop: Loop
    parts: Apart
    first: frozenset[int]
    second: frozenset[int]

    def reads(self, part: int) -> set[int]:
        """The places of the operands that a part needs."""
        inputs, results = self.parts.reads[part], (self.first, self.second)[part]
        trip = {i for i, name in enumerate(self.loop.body.inputs) if name in inputs and i not in self.loop.inits()}
        return trip | {self.loop.consts + i for i in results if i < self.loop.carries}

    def run_first(self, step: Step, values: Values) -> list[Any]:
        """Add the first part's results to `values`; what the second part needs of it, [trips, ...] each."""
        return self._run(step, values, 0, lambda arguments, passed: self.parts.run_first(arguments, sorted(self.first)), ())

    def run_second(self, step: Step, values: Values, passed: Sequence[Any]) -> None:
        """Add the second part's results to `values`."""
        run_one = lambda arguments, passed: (self.parts.run_second(arguments, passed, sorted(self.second)), [])
        self._run(step, values, 1, run_one, passed)

    def _run(self, step: Step, values: Values, part: int, run_one, passed: Sequence[Any]) -> list[Any]:
        results, names = sorted((self.first, self.second)[part]), self.loop.body.inputs
        carried = sum(i < self.loop.carries for i in results)
        operands = {i: value(step.reads[i], values) for i in self.reads(part)}
        consts = {names[i]: x for i, x in operands.items() if i < self.loop.consts}
        sliced = {names[i]: x for i, x in operands.items() if i >= self.loop.consts + self.loop.carries}
        inits = [self.loop.consts + i for i in results[:carried]]

        def trip(carry, each):
            sliced, passed = each
            own = dict(zip((names[i] for i in inits), carry, strict=True))
            found, passed_on = run_one(consts | own | sliced, passed)
            return found[:carried], (found[carried:], passed_on)

        how = {name: step.eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, (stacked, made) = lax.scan(trip, [operands[i] for i in inits], (sliced, list(passed)), **how)
        values.update(zip((step.makes[i] for i in results), [*carry, *stacked], strict=True))
        return made


Planned = tuple[Step, Trips | None, tuple[bool, bool]]  # and in which of the parts it may run


def apart(of: Program, first: Collection[int], rest: Collection[int], made: set[int], late: Collection[int] = ()) -> Apart:
    """The program in two: the first part makes the results `first`, the second `rest`.

    Args:
        of: the program.
        first: places of results.
        rest: likewise.
        made: the inputs that only the first part is given.
        late: the inputs that only the second part is given; no result of `first` needs them.
    """
    ahead, (counts, _) = live(of, first)[0], live(of, {*first, *rest})
    made, late = set(made), set(late)
    plan: list[Planned] = []
    for place, results in counts.items():
        step, trips, where = of.steps[place], None, (True, True)
        reads = set(numbers(step.reads))
        if step.jaxpr is None:
            made |= {name for atom, name in step.pairs() if atom in made}
            late |= {name for atom, name in step.pairs() if atom in late}
        elif step.is_scan:
            trips = _trips(step, ahead.get(place, frozenset()), results, late)
            made |= {step.makes[i] for i in trips.first}
            late |= {step.makes[i] for i in trips.second}
        elif place in ahead:
            where = (True, not reads & made and _is_cheap(step))
        elif reads & late or not _is_cheap(step):
            where = (False, True)
        elif reads & made:
            smaller = size(of.kinds, step.makes) <= size(of.kinds, reads & made)
            where = (smaller, not smaller)
        if where == (True, False):
            made |= set(step.makes)
        elif where == (False, True):
            late |= set(step.makes)
        plan.append((step, trips, where))
    second, needed = _chosen(plan, 1, set(_names(of, rest)), made)
    passed = sorted(needed & made)
    before, wanted = _chosen(plan, 0, {*_names(of, first), *passed}, late)
    return Apart(of, before, second, passed, made, (wanted & set(of.inputs), (needed - made) & set(of.inputs)))


def _trips(step: Step, first: frozenset[int], results: frozenset[int], late: Collection[int]) -> Trips:
    """A scan in two. A result that is stacked is the first part's if that makes it anyway."""
    parts = loop(step)
    body, outside = parts.body, zip(parts.body.inputs, step.reads, strict=True)
    behind = {name for name, atom in outside if not is_literal(atom) and atom in late}
    carried = lambda results: {body.inputs[parts.consts + i] for i in results if i < parts.carries}
    while True:
        inside = apart(body, first, results - first, carried(first), carried(results - first) | behind)
        stacked = [i for i in results - first if i >= parts.carries and not is_literal(body.outputs[i])]
        more = {i for i in stacked if body.outputs[i] in inside.made}
        if not more:
            return Trips(parts, inside, first, results - first)
        first = first | more


def _chosen(
    plan: Sequence[Planned], part: int, needed: set[int], elsewhere: set[int]
) -> tuple[list[tuple[Step, Trips | None]], set[int]]:
    """The steps of a part, and all values that it needs: those from `elsewhere` among them."""
    chosen = []
    for step, trips, where in reversed(plan):
        found = needed & set(step.makes) - elsewhere
        if not where[part] or not (found or _acts(step)):
            continue
        own = step.only(found) if step.jaxpr is None else step
        reads = own.reads if trips is None else [own.reads[i] for i in trips.reads(part)]
        needed = needed | set(numbers(reads))
        chosen.append((own, trips))
    return chosen[::-1], needed


def _acts(step: Step) -> bool:
    return step.jaxpr is not None and bool(step.eqn.effects)


def _is_cheap(step: Step) -> bool:
    return not _acts(step) and all(name in CHEAP for name in primitives(step))


def _names(of: Program, outputs: Collection[int]) -> Iterator[int]:
    return iter(numbers([of.outputs[i] for i in outputs]))


def _read(of: Program, outputs: Collection[int], values: Values) -> list[Any]:
    return [value(of.outputs[i], values) for i in outputs]
