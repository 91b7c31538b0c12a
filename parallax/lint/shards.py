"""Mistakes with arguments that are split: read from the specs of a `shard_map` and the operations between them.

A dim of which a device has one row is left alone where shards are joined: it may count models, as in an ensemble. So is an
argument whose elements are rounded to integers or to 8 bits: a quantiser's scale may well be that of a shard.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from parallax import jaxprs, mesh
from parallax.lint import flat, mistakes, spread, updates, values
from parallax.lint.finding import Finding
from parallax.lint.flat import LOOPS, Flat, Node
from parallax.lint.places import Dims, Known, axes_of_blocks, either, forward, joined_axes
from parallax.lint.spread import Dim, Spread
from parallax.lint.values import LINEAR, in_tuple


def findings(
    jaxpr: Jaxpr,
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    sizes: Mapping[str, int],
    ours: Callable[[JaxprEqn], Jaxpr],
) -> list[Finding]:
    """The mistakes in the body of a `shard_map`; `sizes` are those of the mesh axes, and `ours` opens our collectives."""
    sources, results = _dims(in_specs, jaxpr.invars, sizes), _dims(out_specs, jaxpr.outvars, sizes)
    kinds = lambda atoms, dims: [
        (aval.shape, split) for aval, split in zip(jaxprs.types(atoms), dims, strict=True)
    ]
    returned = kinds(jaxpr.outvars, results)
    # An argument that comes back, or whose gradient does, is trained; others that are split are rows of a batch.
    trained = frozenset(
        i for i, kind in enumerate(kinds(jaxpr.invars, sources)) if kind in returned
    )
    fed = [
        frozenset(dims[0] if dims and i not in trained else ()) for i, dims in enumerate(sources)
    ]
    of_batch = frozenset().union(*fed)
    spreads = [_spread(dims, of_batch, is_batch=i not in trained) for i, dims in enumerate(sources)]
    reading = _Reading(sizes, ours, trained, _exchanged(jaxpr, ours))
    known = [Known(dims, i, fed[i], spread=spreads[i]) for i, dims in enumerate(sources)]
    reading.read(jaxpr, known, results)
    return list(reading.found.values())


def _spread(dims: Dims, of_batch: frozenset[str], *, is_batch: bool) -> Spread:
    """What is known of an argument's dims: whether each is split, and that the first of a batch counts its rows."""
    differs = frozenset(axis for axes in dims for axis in axes)
    split = (frozenset(axes) - of_batch for axes in dims)
    return Spread(
        tuple(Dim(axes, rows=is_batch and i == 0) for i, axes in enumerate(split)), differs=differs
    )


def _dims(
    specs: Sequence[PartitionSpec], atoms: Sequence[Any], sizes: Mapping[str, int]
) -> list[Dims]:
    """How arrays are split, by axes of more than one device."""
    large = lambda entry: tuple(axis for axis in mesh.entry_axes(entry) if sizes[axis] > 1)
    entries = [
        [*spec, *[None] * aval.ndim][: aval.ndim]
        for spec, aval in zip(specs, jaxprs.types(atoms), strict=True)
    ]
    return [tuple(map(large, each)) for each in entries]


def _exchanged(jaxpr: Jaxpr, ours: Callable[[JaxprEqn], Jaxpr]) -> frozenset[str]:
    """The axes along which anything travels that is neither summed nor gathered, as in a pipeline."""
    sent = [
        values.sent(eqn, ours(eqn) if eqn.primitive.name == LINEAR else None)
        for eqn in jaxprs.every(jaxpr)
    ]
    return frozenset(
        axis for each in sent if each and each.kind in ("permute", "exchange") for axis in each.axes
    )


class _Reading:
    """One reading of a `shard_map`'s body and of the loops in it; of each kind of mistake one is noted a line."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        ours: Callable[[JaxprEqn], Jaxpr],
        trained: frozenset[int],
        exchanged: frozenset[str],
    ):
        self.sizes, self.ours, self.trained, self.exchanged = sizes, ours, trained, exchanged
        self.found: dict[tuple[str, str], Finding] = {}
        self.flats: dict[int, Flat] = {}
        self.known: dict[int, list[Known]] = {}  # what is known of each value, by program
        self.loops: tuple[
            JaxprEqn, ...
        ] = ()  # the loops round the program that is being read, and the calls round those

    def read(
        self, jaxpr: Jaxpr, arguments: Sequence[Known], results: Sequence[Dims | None]
    ) -> None:
        """Note the mistakes in a jaxpr, given how its arguments and its results are split."""
        program = self._flat(jaxpr)
        self._follow(program, arguments, silent=False)
        self._sums(program)
        for value, dims in zip(program.results, results, strict=True):
            if dims and axes_of_blocks(dims, program.shape(value)):
                same = [
                    a
                    for a, known in zip(program.arguments, arguments, strict=True)
                    if known.dims == dims
                ]
                self._update(
                    program,
                    value,
                    dims,
                    [a for a in same if program.shape(a) == program.shape(value)],
                )

    def _flat(self, jaxpr: Jaxpr) -> Flat:
        if id(jaxpr) not in self.flats:
            self.flats[id(jaxpr)] = Flat(jaxpr, self.ours)
        return self.flats[id(jaxpr)]

    def _note(self, mistake: Callable[..., Finding], node: Node, *facts: Any) -> None:
        lines = (jaxprs.source(eqn) for eqn in node.at)
        where = next((line for line in lines if line != jaxprs.UNKNOWN), jaxprs.UNKNOWN)
        finding = mistake(*facts, where)
        self.found.setdefault((finding.kind, where), finding)

    def _devices(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    # From the arguments on

    def _follow(self, program: Flat, arguments: Sequence[Known], *, silent: bool) -> list[Known]:
        """What is known of a program's results; not `silent`, mistakes on the way are noted."""
        known = [Known()] * len(program.types)
        for value, each in zip(program.arguments, arguments, strict=True):
            known[value] = each
        for node in program.nodes:
            inputs = [known[value] for value in node.inputs]
            follow = self._loop if node.name in LOOPS else self._operation
            for value, each in zip(
                node.outputs, follow(program, node, inputs, silent), strict=True
            ):
                known[value] = each
        self.known[id(program)] = known
        return [known[value] for value in program.results]

    def _operation(
        self, program: Flat, node: Node, inputs: Sequence[Known], silent: bool
    ) -> list[Known]:
        fed = frozenset().union(*(each.fed for each in inputs)) - frozenset(
            node.sent.axes if node.sent else ()
        )
        chosen = frozenset().union(*(each.chosen for each in inputs))
        if node.name == "axis_index":
            chosen |= set(in_tuple(node.eqn.params["axis_name"]))
        pairs = list(zip(node.inputs, inputs, strict=True))
        note = (lambda *_: None) if silent or self._is_within(node, "transpose(") else self._note
        spreads = spread.after(program, node, [each.spread for each in inputs], self.sizes, note)
        results = []
        for j, result in enumerate(node.outputs):
            own = [pairs[j]] if 1 < len(node.outputs) == len(pairs) else pairs
            placed = [
                (each.argument, self._placed(program, node, value, result, each.dims, silent))
                for value, each in own
            ]
            argument, dims = next(
                ((argument, dims) for argument, dims in placed if dims is not None), (-1, None)
            )
            results.append(Known(dims, argument, fed, chosen, spreads[j]))
        return results

    def _placed(
        self, program: Flat, node: Node, value: int, result: int, dims: Dims | None, silent: bool
    ) -> Dims | None:
        """How a result is split, given how one operand is."""
        if dims is None or not node.sent:
            return forward(program, node, value, result, dims) if dims is not None else None
        return (
            self._gathered(program, node, value, result, dims, silent)
            if node.sent.kind == "gather"
            else None
        )

    def _gathered(
        self, program: Flat, node: Node, value: int, result: int, dims: Dims, silent: bool
    ) -> Dims | None:
        """How a gathered array is split. Its blocks lie in order where the innermost axes are gathered, in their order."""
        before, after = program.shape(value), program.shape(result)
        over = tuple(axis for axis in node.sent.axes if self.sizes[axis] > 1) if node.sent else ()
        if not over or len(before) != len(after):
            return dims if before == after else None
        grown = [
            d for d, sizes in enumerate(zip(before, after, strict=True)) if len(set(sizes)) > 1
        ]
        if len(grown) != 1 or not set(over) <= set(dims[grown[0]]):
            return None
        (dim,) = grown
        left, last = dims[dim][: -len(over)], dims[dim][-len(over) :]
        in_order = (
            last == over if node.name in values.GATHERS else set(last) == set(over)
        )  # of ours the order is not known
        if not in_order and not silent and jaxprs.is_float(program.types[value]):
            self._note(
                mistakes.gathered_out_of_order, node, program.types[value], dim, dims[dim], over
            )
        return (*dims[:dim], left, *dims[dim + 1 :]) if in_order else None

    def _loop(
        self, program: Flat, node: Node, inputs: Sequence[Known], silent: bool
    ) -> list[Known]:
        """What is known of a loop's results, once its carries have settled."""
        eqn, is_scan = node.eqn, node.name == "scan"
        repeated, skipped = self._flat(flat.body(eqn)), 0 if is_scan else eqn.params["cond_nconsts"]
        pairs = [(i - skipped, j) for i, j in flat.carried(eqn)]
        inside = list(inputs[skipped:])
        for i in flat.sliced(eqn):
            dims = inside[i].dims
            inside[i] = inside[i]._replace(
                dims=dims[1:] if dims else None, spread=inside[i].spread.sliced()
            )
        while True:
            results = self._follow(repeated, inside, silent=True)
            steady = inside.copy()
            for i, j in pairs:
                steady[i] = either(inside[i], results[j])
            if steady == inside:
                break
            inside = steady
        carries = [inside[i] for i, _ in pairs]
        stacked = [
            each._replace(dims=None, argument=-1, spread=each.spread.stacked())
            for each in results[len(pairs) :]
        ]
        if not silent:
            outside, self.loops = self.loops, (node.eqn, *node.at, *self.loops)
            self.read(
                flat.body(eqn), inside, [*(each.dims for each in carries), *(None for _ in stacked)]
            )
            self.loops = outside
            self._layers(program, node, inputs, repeated)
        return [*carries, *stacked]

    def _is_within(self, node: Node, transform: str) -> bool:
        """Whether JAX made an operation, or a loop or a call round it, by a transform: "jvp(", or backward "transpose("."""
        return any(
            transform in str(eqn.source_info.name_stack)
            for eqn in (node.eqn, *node.at, *self.loops)
        )

    # Mistakes

    def _update(self, program: Flat, result: int, dims: Dims, bases: Sequence[int]) -> None:
        """Note what joins the elements of different shards in the update of one of `bases`."""
        terms = updates.terms(program, result, bases)
        if not terms:
            return
        own, sums = updates.elements(program, result, dims)
        for node, value, axes in sums:
            if updates.is_made(program, value, dims):
                self._note(
                    mistakes.shards_summed, node, program.types[value], axes, self._devices(axes)
                )
        for node, value, axes in updates.reductions(
            program, own, axes_of_blocks(dims, program.shape(result))
        ):
            reached = updates.reached(program, node.outputs, axes)
            left = frozenset().union(*(reached.get(term, frozenset()) for term in terms))
            if left:
                self._note(
                    mistakes.update_mixes_a_shard,
                    node,
                    node.name,
                    program.types[value],
                    left,
                    self._devices(left),
                )

    def _sums(self, program: Flat) -> None:
        """Note gradients of single devices that are scaled by their own norm before they are summed over the devices."""
        known = self.known[id(program)]
        for node in program.nodes:
            if not node.sent or node.sent.kind not in ("sum", "scatter"):
                continue
            for value in node.inputs:
                axes = frozenset(
                    axis
                    for axis in known[value].spread.differs & set(node.sent.axes)
                    if self.sizes[axis] > 1
                )
                arguments = updates.origins(program, value) & set(program.arguments)
                # Devices that train models of their own, as islands do, clip by their own norms too.
                if axes and not any(
                    known[argument].spread.differs & axes for argument in arguments
                ):
                    self._scaled(program, value, axes)

    def _scaled(self, program: Flat, result: int, axes: frozenset[str]) -> None:
        """Note what scales elements of `result`, which are to be summed over `axes`, by a norm of them on one device."""
        known, origins = self.known[id(program)], updates.origins(program, result)
        if (
            self._rows(program, axes) > 1
        ):  # by one row, a norm is that of an example, as in differentially private training
            for reduced, scaling, value in updates.scalings(program, origins, axes):
                along = known[reduced.value].spread.differs & axes
                if along and not self._is_within(reduced.node, "jvp("):
                    self._note(
                        mistakes.clipped_before_the_sum,
                        scaling,
                        program.types[value],
                        along,
                        self._devices(along),
                    )
        for value in origins:
            loop = program.made.get(value)
            if loop and loop.name in LOOPS and not self._is_within(loop, "jvp("):
                repeated = self._flat(flat.body(loop.eqn))
                self._scaled(repeated, repeated.results[loop.outputs.index(value)], axes)

    def _rows(self, program: Flat, axes: frozenset[str]) -> int:
        """The most rows of a batch that is split over one of `axes` among a program's arguments."""
        arguments = [
            (program.shape(value), self.known[id(program)][value].spread)
            for value in program.arguments
        ]
        batch = [(shape, spread.dims or ()) for shape, spread in arguments if spread.differs & axes]
        return max(
            (
                size
                for shape, dims in batch
                for size, dim in zip(shape, dims, strict=False)
                if dim.rows
            ),
            default=0,
        )

    def _layers(self, program: Flat, node: Node, inputs: Sequence[Known], repeated: Flat) -> None:
        """Note a scan over layers that are split as its rows are."""
        for i in flat.sliced(node.eqn):
            dims = inputs[i].dims
            if not dims or inputs[i].argument not in self.trained:
                continue
            uses, sent = _uses(repeated, repeated.arguments[i])
            fed = [
                inputs[c].fed - inputs[c].chosen
                for c, j in flat.carried(node.eqn)
                if repeated.results[j] in uses
            ]
            along = frozenset().union(*fed) & set(dims[0]) - self.exchanged - sent
            if along:
                self._note(
                    mistakes.layers_not_gathered,
                    node,
                    program.types[node.inputs[i]],
                    along,
                    self._devices(along),
                )


def _uses(program: Flat, argument: int) -> tuple[set[int], set[str]]:
    """All values that depend on an argument, and the axes that any of them is sent along."""
    found, axes = {argument}, set()
    for node in program.nodes:
        if found & set(node.inputs):
            found |= set(node.outputs)
            axes |= joined_axes(program, node)
    return found, axes
