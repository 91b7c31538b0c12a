"""Makes the findings in a program: each function returns the `Finding` for one kind of mistake.

`aval` is the type of the array in question. `axes` are mesh axes, and `size` is the number of
devices along them together. `where` is the source line of the operation in the user's program.
`trips` is the number of iterations of a loop, or None if it is not known. `sent` is a collective of
the kind `sent.kind`, and `sent.permutes` says whether the collective is made of `ppermute`s. A
`ppermute` waits for all devices of the program, since XLA's operation for it has no groups of
devices. A `Value` records what the lint knows about one value (array) of the program.
"""

from jax.extend.core import JaxprEqn

from parallax import arithmetic
from parallax.jaxprs import types
from parallax.lint.finding import Finding
from parallax.lint.values import Sent, Value, is_narrow, is_wide, nbytes


def under_a_predicate(
    sent: Sent, axes: frozenset[str], around: str, along: frozenset[str], size: int, where: str
) -> Finding:
    """Returns the finding for a collective over `axes` that some devices do not reach.

    `around` is the operation that contains the collective, "cond" or "while". The predicate of this
    operation differs between the `size` devices along the axes `along`.
    """
    name = f"{sent.kind} made of ppermutes" if sent.permutes else sent.kind
    if sent.kind == "permute":
        name = "ppermute"
    waits = "every device of the program" if sent.permutes else "all devices of its axis"
    return Finding(
        "collective-under-a-predicate",
        where,
        f"a {name} over {named(axes)} stands in a {around} whose predicate differs along "
        f"{named(along)}, between {size} devices: "
        f"it waits for {waits}, so it hangs or gives wrong numbers.",
        "Run it on all devices and mask its result with jnp.where, or use a predicate that is the "
        "same on all.",
    )


def lost_mark(axes: frozenset[str], size: int, inputs: int, outputs: int, where: str) -> Finding:
    """Returns the finding for a `cond` whose predicate differs between devices, although some of
    its operands and results are typed as the same on all devices. `inputs` and `outputs` are the
    numbers of these operands and results."""
    return Finding(
        "lost-varying-mark",
        where,
        f"the predicate of this cond differs along {named(axes)}, and {inputs} of its operands "
        f"and {outputs} of its results are "
        f"typed as the same on all {size} devices: gradients are wrong, and results that differ "
        "count as equal copies (jax #40823).",
        f"Cast the operands first, x = jax.lax.pcast(x, {tuple(sorted(axes))}, to='varying'), or "
        "use jnp.where.",
    )


def summed_twice(value: Value, aval, axes: frozenset[str], size: int, where: str) -> Finding:
    """Returns the finding for a sum over devices of an array that is equal on all of them. `value`
    is what the lint knows about this array, such as whether an earlier sum made it equal."""
    # `value.summed` pairs each axis of an earlier sum with the line of that sum.
    before = [f"was summed over {axis!r} at {at}" for axis, at in value.summed if axis in axes]
    why = before[0] if before else "does not depend on the device there"
    return Finding(
        "summed-twice",
        where,
        f"this sum over {named(axes)} adds {size} equal copies of {shown(aval)}, which {why}: the "
        f"result is {size} times one copy, and {_bytes(nbytes(aval))} are sent without need.",
        f"Leave this sum out; multiply by {size} if that is what is meant. JAX itself "
        "already sums the gradients of weights that are the same on all devices: grads.averaged "
        "makes their mean.",
    )


def same_every_trip(
    sent: Sent, aval, axes: frozenset[str], trips: int | None, where: str
) -> Finding:
    """Returns the finding for a collective in a loop that does not change the collective's
    operand."""
    return Finding(
        "same-every-trip",
        where,
        f"this {sent.kind} over {named(axes)} takes {shown(aval)}, {_bytes(nbytes(aval))}, and "
        f"runs {_times(trips)}, but no trip of the loop changes its operand.",
        "Move it before the loop and use its result in each trip (for parameters: "
        "zero.gathered_once(grads.accumulated(...), ...)).",
    )


def sum_in_a_loop(aval, axes: frozenset[str], size: int, trips: int | None, where: str) -> Finding:
    """Returns the finding for a sum over devices in a loop. The loop uses the sum only to add it to
    a carry, so one sum after the loop is enough."""
    return Finding(
        "sum-in-a-loop",
        where,
        f"this sum of {shown(aval)} over {named(axes)}, {size} devices, runs {_times(trips)} and "
        "is only added to the loop's "
        f"carry: {_bytes(nbytes(aval))} each time instead of once.",
        "Add up the parts of each device in the loop and sum over the devices after it: "
        "grads.averaged(grads.accumulated(...), axis). "
        "If this is a sum of gradients that JAX itself inserted, cast the parameters to varying "
        "before they are differentiated, as grads.averaged does.",
    )


def update_mixes_a_shard(
    operation: str, aval, axes: frozenset[str], size: int, where: str
) -> Finding:
    """Returns the finding for a reduction over one device's shard whose result goes into the update
    of that shard. `operation` is the name of the reduction's primitive, such as "reduce_sum"."""
    return Finding(
        "update-mixes-a-shard",
        where,
        f"this {operation} takes {shown(aval)}, a shard along {named(axes)}, and goes into the "
        "update of that shard with no "
        f"collective between: each of {size} devices uses its own result in place of that of the "
        "whole array.",
        "Wrap the optimizer: optimizers.whole or optimizers.by_matrix; clip with "
        "step.make(max_norm=...) or grads.clipped. By "
        f"hand, sum the squares over {named(axes)} before you take the root.",
    )


def shards_summed(aval, axes: frozenset[str], size: int, where: str) -> Finding:
    """Returns the finding for a sum over devices that adds the gradients of different shards."""
    return Finding(
        "shards-summed",
        where,
        f"this sum adds {shown(aval)} over {named(axes)}, {size} devices, and goes into the "
        "update of an array that is split "
        f"along {named(axes)}: the gradients of different shards are added up, and each shard "
        "gets the sum.",
        f"Leave {named(axes)} out of the sum of this leaf. grads.averaged and grads.summed reduce "
        "each leaf over its own axes.",
    )


def gathered_out_of_order(
    aval, dim: int, split: tuple[str, ...], axes: tuple[str, ...], where: str
) -> Finding:
    """Returns the finding for a gather that puts blocks next to each other that are not neighbours
    in the whole dim. The gather goes over `axes`, along the dim `dim`, which is split over the axes
    `split`."""
    return Finding(
        "gathered-out-of-order",
        where,
        f"dim {dim} of this {shown(aval)} is split over {split} in this order, and "
        f"is gathered over {axes}: the "
        "gathered blocks do not follow each other in the whole array.",
        f"Gather over {split[-len(axes) :]} first, or name the axes of dim {dim} in another order "
        "in its spec.",
    )


def layers_not_gathered(aval, axes: frozenset[str], size: int, where: str) -> Finding:
    """Returns the finding for a loop over layers that are split over the replicas, so that
    different replicas run different layers."""
    return Finding(
        "layers-not-gathered",
        where,
        f"this loop runs over the {aval.shape[0]} layers of a device's {shown(aval)} and gathers "
        f"no layer. The dim of the layers is split over {named(axes)}, as the batch is: each of "
        f"{size} replicas runs its own rows through its own layers only.",
        "Split another dim, rules.fsdp(..., keep={'blocks.**': (0,)}), and gather each layer with "
        "zero.gathered; or split the "
        "layers over an axis of their own, as pipeline.value_and_grad does.",
    )


def reduced_over_a_split_dim(
    operation: str, aval, axes: frozenset[str], size: int, where: str
) -> Finding:
    """Returns the finding for a reduction that goes over one device's part of a dim, but is used
    like a reduction over the whole dim. `operation` is the name of the reduction's primitive."""
    return Finding(
        "reduced-over-a-split-dim",
        where,
        f"this {operation} of {shown(aval)} goes over a dim that is split along {named(axes)}, or "
        "over groups that are cut by that split. No collective completes the result before it is "
        "combined with an array that has the split dim: "
        f"each of {size} devices takes the mean or norm of its own part.",
        f"Complete it first: jax.lax.pmean or psum over {named(axes)}, or pmax for the "
        "maximum of a softmax. Or give each device whole groups or heads, and reshape into the "
        "number of groups or heads that one device has.",
    )


def parts_of_a_split_dim(aval, dim: int, axes: frozenset[str], size: int, where: str) -> Finding:
    """Returns the finding for slices that a device cuts from its own part of a split dim, but that
    are used like slices of the whole dim."""
    return Finding(
        "parts-of-a-split-dim",
        where,
        f"dim {dim} of {shown(aval)}, which is split along {named(axes)}, was cut into parts. "
        "The parts are combined here, as the queries and keys of a fused matrix are. But each of "
        f"{size} devices cut only its own block, so its parts differ from those of the whole dim.",
        "Give the parts a dim of their own, [parts, units, ...], and split the units; or keep a "
        "matrix for each part. Do not split an eqx.nn.LSTMCell or GRUCell: its gates are stacked.",
    )


REPEATED = {  # kind: the numbers, the harm and the cure
    "one-key-for-split-units": (
        "random numbers that are the same along {axes}",
        "the units of all {size} devices get the same ones, as in dropout by the same mask on "
        "every device.",
        "Fold the device into the key: jax.random.fold_in(key, jax.lax.axis_index(axis)) for "
        "{axes}. For the numbers of a "
        "run on one device, draw for all units and take this device's slice.",
    ),
    "counted-on-a-device": (
        "numbers made of 0, 1, 2, ... on each device",
        "the count starts again at 0 on each of {size} devices, so all devices get the first "
        "positions, or the first heads.",
        "Count in the whole dim: context.positions(tokens, axis) for tokens; for heads or units, "
        "add jax.lax.axis_index(axis) * n, where n is the number of them on one device.",
    ),
}


def repeated_on_each_device(
    kind: str, aval, axes: frozenset[str], size: int, where: str
) -> Finding:
    """Returns the finding for random numbers or counts (0, 1, 2, ...) that are the same on each
    device, although each device has different elements of a split dim. For each `kind`, the table
    `REPEATED` has three texts: which numbers these are, the harm and the cure."""
    numbers, harm, cure = (text.format(axes=named(axes), size=size) for text in REPEATED[kind])
    meeting = f"{numbers} meet {shown(aval)}, along a dim that is split along {named(axes)}"
    return Finding(kind, where, f"{meeting}: {harm}", cure)


def tokens_not_split(tokens, dim: int, axes: frozenset[str], size: int) -> Finding:
    """Returns the finding for `tokens`, an array of inputs that are in the order of the text,
    although the program expects another order. Its dim `dim` is split over `axes`."""
    return Finding(
        "tokens-not-split",
        f"dim {dim} of the batch's {shown(tokens)}",
        f"the targets are the inputs, one token later, so the tokens are in the order of the text. "
        f"The program expects another order, in which they are split over {named(axes)}: each of "
        f"{size} devices gives its tokens wrong positions and wrong masks.",
        f"Reorder inputs and targets first: context.split(tokens, {size}). Or pass "
        "order=context.contiguous to every function of context.",
    )


def fixed_number_of_heads(heads: int, axes: frozenset[str], size: int, where: str) -> Finding:
    """Returns the finding for an attention that cuts the outputs of one device into as many heads
    as the whole model has."""
    return Finding(
        "fixed-number-of-heads",
        where,
        f"the projections of an eqx.nn.MultiheadAttention are split over {named(axes)}. Each of "
        f"{size} devices still makes all {heads} heads, so each head is narrower than in the whole "
        "model.",
        "Use projections by tensor.ColumnLinear and tensor.RowLinear, and an attention that reads "
        "the number of its heads from its arrays.",
    )


def added_before_the_sum(aval, axes: frozenset[str], size: int, where: str) -> Finding:
    """Returns the finding for a value that is the same on all devices, and is added to each
    device's term of a sum."""
    return Finding(
        "added-before-the-sum",
        where,
        f"this adds {shown(aval)}, the same along {named(axes)}, to a device's term of a sum over "
        f"{named(axes)}: the sum counts "
        f"it {size} times.",
        "Add it after the sum, as tensor.row and tensor.RowLinear do with the bias.",
    )


def clipped_before_the_sum(aval, axes: frozenset[str], size: int, where: str) -> Finding:
    """Returns the finding for gradients that each device scales by the norm of its own gradients,
    before the sum over devices. A device's own gradients are those of its rows of the batch."""
    return Finding(
        "clipped-before-the-sum",
        where,
        f"this scales {shown(aval)}, which differs along {named(axes)}, by a norm of each "
        "device's own part, before it is summed "
        f"over {named(axes)}: each of {size} devices clips the gradients of its own rows, and not "
        "their mean.",
        "Sum first: grads.clipped(grads.averaged(grad, axis), max_norm), or step.make(..., "
        "max_norm=...). An optax transform "
        "that clips or normalises belongs to the optimizer, not inside the gradient function.",
    )


def wide_product(
    eqn: JaxprEqn, operands: list[Value], where: str, declared: bool
) -> Finding | None:
    """Returns the finding for a product in 32 bits or more, if an operand has a 16-bit type or was
    cast from one, or if the caller `declared` that all products should be in 16 bits. Returns None
    for other products."""
    avals = types(eqn.invars)
    wide = [aval for aval in avals if is_wide(aval.dtype)]
    # The 16-bit types of operands, also of those that were cast to a wider type (`narrow`).
    short = {value.narrow for value in operands if value.narrow}
    short |= {aval.dtype.name for aval in avals if is_narrow(aval.dtype)}
    if not wide or not (short or declared):
        return None
    why = "all products were declared to be in 16 bits"
    if short:
        why = f"an operand came from {' and '.join(sorted(short))}"
    return Finding(
        "wide-product",
        where,
        f"the product of {shown(avals[0])} and {shown(avals[1])} is taken in "
        f"{wide[0].dtype.name}, and {why}: {arithmetic.operations(eqn) // 2:,} "
        "multiply-adds at the slower rate of that type, and operands of "
        f"{_bytes(sum(nbytes(aval) for aval in wide))} in all, which would be less in 16 bits.",
        "Cast both operands to the 16-bit type, and ask for wide sums with "
        "preferred_element_type=jnp.float32 if they matter.",
    )


def named(axes: frozenset[str]) -> str:
    """Returns mesh axes as a part of a sentence, such as "'data' and 'tensor'"."""
    return " and ".join(repr(axis) for axis in sorted(axes))


def shown(aval) -> str:
    """Returns an array's type as text, such as "float32[8,16]"."""
    return f"{aval.dtype.name}[{','.join(map(str, aval.shape))}]"


def _bytes(count: int) -> str:
    """Returns a number of bytes as text, such as "1,024 bytes"."""
    return f"{count:,} bytes"


def _times(trips: int | None) -> str:
    """Returns how often a loop's body runs, as text."""
    return "in every trip" if trips is None else f"{trips} times"
