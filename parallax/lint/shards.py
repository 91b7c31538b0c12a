"""Finds mistakes with arguments that are split, from the specs of a `shard_map` and the operations
in its body.

A *value* is an array in the program; functions take and return its id, an int. A *fact* is one
thing that the lint knows about a value, such as "it differs along 'data'". A `Value` has the facts
about one value. `known[id(program)]` has the facts about all values of a program, by the ids of the
values. Three facts say what a value was computed from. `shard` names the argument from which the
value was made by elementwise operations, reshapes, transposes and all-gathers. `shard.dims` has,
for each dim of the value, the axes that split the dim, the outermost first. `fed` are the axes that
split the rows of a batch on which the value depends; an axis is left out if a collective over this
axis stands between the batch and the value. `chosen` are the axes along which the value depends on
the device's index. `axes_of_blocks` gives the axes that split those dims in which a device's block
has a size above 1.

A reduction of one shard is no mistake in two cases. If each device has only one index along a dim,
each index may be a separate model, as in an ensemble. If the elements are rounded to integers or to
8 bits, a quantiser may have one scale for each shard.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from parallax import jaxprs
from parallax.lint import flat, mistakes, updates, values
from parallax.lint.finding import Finding
from parallax.lint.flat import LOOPS, Flat, Node
from parallax.lint.places import axes_of_blocks, forward, joined_axes
from parallax.lint.values import (
    NO_AXES,
    Dim,
    Dims,
    Shard,
    Value,
    holds_keys,
    in_tuple,
    sent_inside,
)
from parallax.trees import entry_axes

Note = Callable[..., None]  # (mistake, node, *details), as `ShardMap.note`


@dataclass
class ShardMap:
    """A `shard_map` whose body the lint reads, and the mistakes with split arguments that the lint
    has found in the body.

    Attributes:
        mesh: the mesh.
        checked: the value of `check_vma`.
        known: the facts about all values of each program that was read, by `id(program)`.
        body: a function that takes the operation of a loop, and returns the loop's body as a list
            of operations. (This is not the body of the `shard_map`.)
        sizes: the sizes of the mesh axes that have several devices.
        trained: the indices of the arguments that are trained. An argument counts as trained if a
            result has the same shape and spec, and both or neither are floating-point numbers.
        exchanged: the axes of permutes and all-to-alls in the body of the `shard_map`, such as the
            permutes of a pipeline.
        findings: the mistakes, one for each kind and each source line.
    """

    mesh: Any
    checked: bool
    known: Mapping[int, Sequence[Value]]
    body: Callable[[Node], Flat]
    sizes: Mapping[str, int] = field(init=False)
    trained: frozenset[int] = frozenset()
    exchanged: frozenset[str] = NO_AXES
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)

    def __post_init__(self):
        """Sets `sizes`. Axes of one device are left out, since they split nothing."""
        self.sizes = {axis: size for axis, size in self.mesh.shape.items() if size > 1}

    def note(self, mistake: Callable[..., Finding], node: Node, *details: Any) -> None:
        """Notes a mistake at `node`, if it is the first mistake of its kind on this source line.
        `mistake`, a function in the module `mistakes`, makes the finding from `details` and the
        line."""
        finding = mistake(*details, node.where)
        self.findings.setdefault((finding.kind, finding.where), finding)

    def devices(self, axes: Iterable[str]) -> int:
        """Returns the number of devices along these axes together."""
        return math.prod(self.sizes[axis] for axis in axes)

    # The facts about arguments and results

    def enter(
        self,
        jaxpr: Jaxpr,
        params: Mapping[str, Any],
        inputs: Sequence[Value],
        ours: Callable[[JaxprEqn], Jaxpr],
    ) -> tuple[list[Value], list[Dims]]:
        """Returns the facts about the body's arguments, and the axes that split the dims of its
        results. Also sets `trained`, the indices of the trained arguments, and `exchanged`, the
        axes of permutes and all-to-alls. A pipeline splits its layers over an axis and sends
        activations along it, so `note_layers` accepts layers that are split over `exchanged`.

        Args:
            jaxpr: the body of the `shard_map`.
            params: the parameters of the `shard_map`, with its specs.
            inputs: the facts about the operands of the `shard_map`.
            ours: a function from the equation of a collective of this library to its jaxpr.
        """
        argument_dims = self._dims(params["in_specs"], jaxpr.invars)
        results = self._dims(params["out_specs"], jaxpr.outvars)
        returned = [_look(aval, dims) for aval, dims in _typed(jaxpr.outvars, results)]
        # An argument is trained if it or its gradient is returned, which look alike (`_look`).
        # The other arguments that are split are rows of a batch.
        is_trained = [
            _look(aval, dims) in returned for aval, dims in _typed(jaxpr.invars, argument_dims)
        ]
        self.trained = frozenset(i for i, trained in enumerate(is_trained) if trained)
        sent = [sent for sent in sent_inside(jaxpr, ours) if sent.kind in ("permute", "exchange")]
        self.exchanged = NO_AXES.union(*(collective.axes for collective in sent))
        # For each argument of a batch, the axes that split its first dim, the rows. Random keys are
        # no batch: every device may have a key of its own.
        fed = [
            frozenset(() if trained or not dims or holds_keys(aval) else dims[0])
            for trained, (aval, dims) in zip(
                is_trained, _typed(jaxpr.invars, argument_dims), strict=True
            )
        ]
        of_batch = NO_AXES.union(*fed)
        arguments = []
        for i, (value, dims) in enumerate(zip(inputs, argument_dims, strict=True)):
            # A `Dim` has the axes that split a dim, and whether the dim has the rows of a batch. A
            # weight that is split over an axis of the batch is gathered before its use, so its dim
            # does not count as split over this axis. The first dim of a batch has its rows. Every
            # argument that is not trained counts as a batch here, even if it is not split.
            dim_facts = [
                Dim(frozenset(axes) - of_batch, rows=k == 0 and not is_trained[i])
                for k, axes in enumerate(dims)
            ]
            differs, shard = value.differs.union(*dims), Shard(i, dims)
            arguments.append(
                value._replace(differs=differs, dims=tuple(dim_facts), shard=shard, fed=fed[i])
            )
        return arguments, results

    def _dims(self, specs: Sequence[PartitionSpec], atoms: Sequence[Any]) -> list[Dims]:
        """Returns, for each dim of each array, the mesh axes that split the dim. Axes of one device
        are left out."""
        split = []
        for spec, aval in zip(specs, jaxprs.types(atoms), strict=True):
            # A spec may have fewer entries than the array has dims: the other dims are not split.
            entries = [*spec, *[None] * aval.ndim][: aval.ndim]
            split.append(tuple(self._of_several_devices(entry_axes(entry)) for entry in entries))
        return split

    def _of_several_devices(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Returns those of `axes` that have several devices, in the given order."""
        return tuple(axis for axis in axes if axis in self.sizes)

    def origin_facts(
        self, program: Flat, node: Node, inputs: Sequence[Value], note: Note
    ) -> list[dict[str, Any]]:
        """Returns a dict for each result of an operation, with three facts about the result:
        `shard`, the argument whose elements it has; `fed`, the axes along which it depends on a
        split batch; and `chosen`, the axes along which it depends on the device's index.

        Elementwise operations, reshapes, transposes and all-gathers pass on the `shard` of their
        first operand that has one. In an operation with several results and as many operands,
        result j gets the `shard` of operand j. Each result has the `fed` and the `chosen` of all
        operands together. A collective removes its axes from `fed`, but not from `chosen`: a
        pipeline's activations still depend on the device's index after they are sent.
        `note(mistake, node, *details)` is called for an all-gather that puts blocks in a wrong
        order.
        """
        sent = frozenset(node.sent.axes if node.sent else ())
        fed = NO_AXES.union(*(value.fed for value in inputs)) - sent
        chosen = NO_AXES.union(*(value.chosen for value in inputs))
        if node.name == "axis_index":
            chosen |= set(in_tuple(node.eqn.params["axis_name"]))
        pairs = list(zip(node.inputs, inputs, strict=True))
        is_paired = 1 < len(node.outputs) == len(pairs)
        results = []
        for j, result in enumerate(node.outputs):
            shards = [
                self._shard(program, node, operand, result, value.shard, note)
                for operand, value in (pairs[j : j + 1] if is_paired else pairs)
            ]
            shard = next((shard for shard in shards if shard), None)
            results.append({"shard": shard, "fed": fed, "chosen": chosen})
        return results

    def _shard(
        self,
        program: Flat,
        node: Node,
        operand: int,
        result: int,
        shard: Shard | None,
        note: Note,
    ) -> Shard | None:
        """Returns the `Shard` of a result, given the `Shard` of an operand (`shard`). A `Shard` has
        the argument from which a value is made (`argument`), and the axes that split each dim of
        the value (`dims`). The returned `Shard` has the operand's `argument`, and the result's
        `dims`. Returns None for any operation but elementwise ones, reshapes, transposes and
        all-gathers, or if the split of the result's dims is not known. `note` is called for an
        all-gather that puts blocks in a wrong order.
        """
        # Of the collectives, only an all-gather keeps elements of one argument in known places.
        if shard is None or (node.sent and node.sent.kind != "gather"):
            return None
        if node.sent:
            dims = self._gathered(program, node, operand, result, shard.dims, note)
        else:
            dims = forward(program, node, operand, result, shard.dims)
        return None if dims is None else shard._replace(dims=dims)

    def _gathered(
        self, program: Flat, node: Node, operand: int, result: int, dims: Dims, note: Note
    ) -> Dims | None:
        """Returns the `Dims` of a gathered array, given the `Dims` of the operand (`dims`). `node`
        is the gather, over the axes in `node.sent`. Returns None if the gathered blocks are not in
        order, or if the split of the result's dims is not known.

        The blocks are in order if the gather goes over the innermost axes that split the dim, in
        the order in which the spec names them. Floating-point blocks that are out of order are
        noted as a mistake. Integers are taken for data, such as tokens of a batch: for these, the
        order of the blocks does no harm.
        """
        before, after = program.shape(operand), program.shape(result)
        axes = self._of_several_devices(node.sent.axes if node.sent else ())
        if not axes:  # nothing is gathered; only a new dim of size 1 may change the shape
            return dims if before == after else None
        if len(before) != len(after):  # gathered along a new dim: the split is not known
            return None
        grown = [d for d, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
        if len(grown) != 1 or not set(axes) <= set(dims[grown[0]]):
            return None
        (dim,) = grown
        # `dims[dim]` has the axes that split the dim, the outermost first.
        outer, inner = dims[dim][: -len(axes)], dims[dim][-len(axes) :]
        # The order of the axes is only known for gathers of `jax.lax`.
        in_order = inner == axes if node.name in values.GATHERS else set(inner) == set(axes)
        aval = program.types[operand]
        if not in_order and jaxprs.is_float(aval):
            note(mistakes.gathered_out_of_order, node, aval, dim, dims[dim], axes)
        return (*dims[:dim], outer, *dims[dim + 1 :]) if in_order else None

    # Mistakes in a program that was read

    def note_updates(
        self, program: Flat, arguments: Sequence[Value], results: Sequence[Dims | None]
    ) -> None:
        """Notes two kinds of mistakes in the updates of arguments: a sum over devices that adds
        different shards, and a reduction of one device's shard that no collective completes.

        `results` has, for each result, the axes that split its dims, or None if these axes are not
        known.
        """
        # `results` is empty if nothing is known of any result.
        for result, dims in zip(program.results, results, strict=False):
            shape = program.shape(result)
            if dims and axes_of_blocks(dims, shape):
                # The arguments that the result may be an update of: those of its shape and spec.
                bases = [
                    argument
                    for argument, value in zip(program.arguments, arguments, strict=True)
                    if value.shard and value.shard.dims == dims and program.shape(argument) == shape
                ]
                self._note_update(program, result, dims, bases)

    def _note_update(self, program: Flat, result: int, dims: Dims, bases: Sequence[int]) -> None:
        """Notes the mistakes in one result, if it is an update of one of the arguments `bases`.
        `dims` has the axes that split the result's dims.
        """
        # The ids of u in result = w + u, and of the predicates that decide whether u is added.
        terms = updates.terms(program, result, bases)
        if not terms:
            return
        # The values that hold elements of the update, and the sums that add different shards.
        dims_of, sums = updates.elements(program, result, dims)
        for node, value, axes in sums:
            # Only a sum of gradients is a mistake.
            if updates.may_be_gradient(program, value, dims):
                details = program.types[value], axes, self.devices(axes)
                self.note(mistakes.shards_summed, node, *details)
        split = axes_of_blocks(dims, program.shape(result))
        for node, value, axes in updates.reductions(program, dims_of, split):
            # The values that depend on the reduction, each with the axes over which a collective is
            # still missing.
            reached = updates.reached(program, node.outputs, axes)
            missing = NO_AXES.union(*(reached.get(term, NO_AXES) for term in terms))
            if missing:
                details = node.name, program.types[value], missing, self.devices(missing)
                self.note(mistakes.update_mixes_a_shard, node, *details)

    def note_clipped_sums(self, program: Flat) -> None:
        """Notes gradients that are scaled by a norm of one device's gradients before they are
        summed over devices.
        """
        known = self.known[id(program)]
        for node in program.nodes:
            if not node.sent or node.sent.kind not in ("sum", "scatter"):
                continue
            for value in node.inputs:
                axes = known[value].differs & set(node.sent.axes)
                # The arguments that the summed value is computed from by elementwise operations.
                arguments = updates.origins(program, value) & set(program.arguments)
                # If the devices train different models, as islands do, each should clip by its own
                # norm. Their weights differ along the axes, and are among the sum's `arguments`.
                # Otherwise `_note_scaled` looks for a scaling by one device's norm.
                if axes and not any(known[argument].differs & axes for argument in arguments):
                    self._note_scaled(program, value, axes)

    def _note_scaled(self, program: Flat, result: int, axes: frozenset[str]) -> None:
        """Notes operations that scale elements of `result` by the norm of these elements on one
        device. The method searches the program and the bodies of the program's loops. `axes` are
        the axes over which `result` is summed later.
        """
        known, origins = self.known[id(program)], updates.origins(program, result)
        # With one row per device, the norm is that of one example, as in private training.
        if self._rows(program, axes) > 1:
            # `reduced` is the reduction that gives the norm (its `node`, and its operand `value`),
            # `scaling` the product or quotient by the norm, and `value` the array that it scales.
            for reduced, scaling, value in updates.scalings(program, origins, axes):
                along = known[reduced.value].differs & axes  # the devices have different norms
                # Inside a differentiated function, which JAX names "jvp(...)", a norm belongs to
                # the model.
                if along and not reduced.node.is_within("jvp("):
                    details = program.types[value], along, self.devices(along)
                    self.note(mistakes.clipped_before_the_sum, scaling, *details)
        for value in origins:  # if a loop made it, its gradients may be scaled in the loop's body
            loop = program.made.get(value)
            if loop and loop.name in LOOPS and not loop.is_within("jvp("):
                body = self.body(loop)
                self._note_scaled(body, body.results[loop.outputs.index(value)], axes)

    def _rows(self, program: Flat, axes: frozenset[str]) -> int:
        """Returns how many rows (examples) of the batch a device has: the largest number of rows of
        an argument that differs along `axes`, or 0 if no such argument has rows.

        `dim.rows` is true if a dim runs over the rows; the size of the dim is then the number of
        rows.
        """
        known = self.known[id(program)]
        batch = [argument for argument in program.arguments if known[argument].differs & axes]
        # Not strict: `dims` is None for numbers written into the program.
        dims = [zip(program.shape(a), known[a].dims or (), strict=False) for a in batch]
        return max((size for pairs in dims for size, dim in pairs if dim.rows), default=0)

    def note_layers(self, loop: Node, inputs: Sequence[Value]) -> None:
        """Notes a scan over layers if the axis that splits the layers also splits the batch, and no
        collective gathers the layers. Each device would then run its rows through only some layers.
        """
        body = self.body(loop)
        for i in flat.sliced(loop.eqn):  # the places of the operands that the loop slices
            shard = inputs[i].shard
            # Layers are slices of a weight: an argument that is trained.
            if shard is None or not shard.dims or shard.argument not in self.trained:
                continue
            # The values in the body that depend on the layers, and the axes of collectives of them.
            uses, axes_sent_over = _uses(body, body.arguments[i])
            # The carries that the layers change, and the axes along which they depend on the batch.
            # A carry is operand c of the loop, and its new value is result j of the body. An axis
            # does not count if the carry depends on the device's index along this axis: a
            # pipeline's stages choose their inputs by this index.
            carries = [inputs[c] for c, j in flat.carried(loop.eqn) if body.results[j] in uses]
            fed = NO_AXES.union(*(carry.fed - carry.chosen for carry in carries))
            # `dims[0]` has the axes that split the layers. Programs that send the layers, or
            # exchange anything, along an axis are accepted.
            along = fed & set(shard.dims[0]) - self.exchanged - axes_sent_over
            if along:
                details = jaxprs.types(loop.eqn.invars)[i], along, self.devices(along)
                self.note(mistakes.layers_not_gathered, loop, *details)


def _typed(atoms: Sequence[Any], dims: Sequence[Dims]) -> Iterable[tuple[Any, Dims]]:
    """Returns, for each variable, its type and the axes that split its dims."""
    return zip(jaxprs.types(atoms), dims, strict=True)


def _look(aval: Any, dims: Dims) -> tuple[Any, ...]:
    """Returns what an argument has in common with its gradient: the shape, the split of the dims,
    and whether it has floating-point numbers. (A gradient may be in another floating-point type.)
    """
    return aval.shape, dims, jaxprs.is_float(aval)


def _uses(program: Flat, argument: int) -> tuple[set[int], set[str]]:
    """Returns the ids of the values that depend on an argument, and the axes of the collectives
    that take one of these values."""
    dependent, axes = {argument}, set()
    for node in program.nodes:
        if dependent & set(node.inputs):
            dependent |= set(node.outputs)
            axes |= joined_axes(program, node)
    return dependent, axes
