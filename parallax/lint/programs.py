"""Finds mistakes in a traced program, which is neither compiled nor run."""

from collections.abc import Callable, Collection
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.typing import DTypeLike

from parallax import pipeline
from parallax.jaxprs import opened
from parallax.lint import values
from parallax.lint.finding import Finding, report
from parallax.lint.fixed_heads import narrower_heads
from parallax.lint.reading import Reading
from parallax.lint.stacked_gates import split_by_sharding
from parallax.lint.token_order import tokens_out_of_order


def program(
    f: Callable[..., Any] | ClosedJaxpr, *args: Any, compute: DTypeLike | None = None
) -> list[Finding]:
    """Returns the mistakes that the lint finds in `f(*args)`. JAX raises no error for most of them.

    The program is traced, and neither compiled nor run.

    * `collective-under-a-predicate`: a collective in a `cond`, `switch` or `while` whose predicate
      differs between devices. A `ppermute` waits for all devices of the program, and hangs; so does
      a collective of this library, which is made of `ppermute`s. Any other collective hangs only if
      the predicate differs along an axis of the collective.
    * `lost-varying-mark`: a `cond` whose predicate differs between devices, while operands or
      results are typed as the same on all devices. The gradients are then wrong (jax #40823).
    * `summed-twice`: a sum over devices of a value that is the same on all of them.
    * `sum-in-a-loop`: a sum over devices whose result is only added to a loop's carry. One sum of
      the carry after the loop gives the same result.
    * `same-every-trip`: a collective in a loop, of a value that the loop does not change.
      `zero.gathered` and `sequence.gather_from` are accepted: they gather in each iteration on
      purpose, so that the gathered array need not be kept.
    * `update-mixes-a-shard`: a reduction of one device's shard whose result goes into the update of
      that shard, with no collective over the shard's axes in between. Examples are `optax.lamb` and
      clipping by a norm, on shards. An update is the term `u` of an output `w + u` that has the
      shape and the spec of the argument `w`. The lint looks at the values from which elementwise
      operations compute the update. It finds operations that reduce such a value, or an elementwise
      function of such a value, to a single number. A reduction over only some dims is found only if
      optax's code makes it.
    * `shards-summed`: a sum over an axis that splits an argument `w`, if the update `u` of `w` is
      computed from this sum. The sum adds different shards. It is found only if the summed value
      comes from a product, a reduction or a loop, as a gradient does.
    * `clipped-before-the-sum`: gradients that differ between devices are scaled by the norm or the
      maximum of each device's own gradients, and only then summed over the devices. An example is
      `optax.clip_by_global_norm` inside `grads.averaged`. The lint looks for products and quotients
      that scale gradients, but not inside a function that is differentiated. A device with a single
      row of the batch is accepted: it clips the gradient of each example, as differentially private
      training does on purpose. Clipping of each microbatch's mean gradient is not found.
    * `gathered-out-of-order`: a gather of a floating-point argument along a dim that two axes
      split. The gather goes over the outer axis only, or over both in another order than in the
      argument's spec, so the gathered blocks do not follow each other. Integers, such as tokens,
      are accepted.
    * `layers-not-gathered`: a `scan` over layers that are split over the axis that also splits the
      batch. The carry of the `scan` depends on the batch, and no collective over that axis gathers
      the layers. A split argument counts as layers if an output (its gradient or its update) has
      the same shape and spec. Any other split argument counts as a batch, except random keys.
      Programs that also send along that axis, as pipelines do, are accepted.
    * `reduced-over-a-split-dim`: a norm, a softmax or a mean over a dim that a weight's spec splits
      (hidden units, heads), if its result is combined, without a collective first, with an array
      that still has the split dim. A group norm is found only if its groups have one unit each on a
      device, so that they cannot be whole. For example, the model has 8 units in 2 groups of 4, and
      each of 4 devices cuts its 2 units into 2 groups too. Larger groups on a device are accepted,
      since they may be whole groups of the model.
    * `parts-of-a-split-dim`: a weight's spec splits a dim, and different slices of this dim are
      combined with each other. Examples are the queries, keys and values of one fused matrix that
      is split by its outputs, and the stacked gates of an `eqx.nn.LSTMCell`. If the trace fails
      because shapes do not fit, and the arguments hold a cell whose arrays are split by rows, this
      mistake is the only finding.
    * `one-key-for-split-units`: random numbers that are the same on all devices are combined with
      an array along its split dim, as in dropout with the same mask for the units of every device.
    * `counted-on-a-device`: numbers that each device computes from its own indices 0, 1, 2, ... are
      combined with an array along its split dim. Examples are positions of split tokens, and ALiBi
      slopes of split heads. A comparison of two such arrays, as in a causal mask, is accepted: one
      offset added to both arrays does not change the result.
    * `added-before-the-sum`: a bias or a residual that each device adds to its term of a sum over
      devices, so that the sum counts it several times.
    * `tokens-not-split`: inputs and targets in the order of the text, in a program that expects
      their tokens in another order, such as `context.zigzag`. The mistake is found only if the
      arguments are arrays with values, and each target is the next input token.
    * `fixed-number-of-heads`: the projections of an `eqx.nn.MultiheadAttention` are split by their
      outputs, but each device cuts its outputs into as many heads as the whole model has. It is not
      looked for if a collective gathers a matrix of the weights' shape, as ZeRO-3 does.
    * The trace fails at any of three mistakes in a pipeline. The mistake is then the only finding.
      `parameter-by-closure`: a function uses a parameter by closure, not from its argument.
      `blocks-outside-the-stage`: the function before or after the stages reads the stages' blocks.
      `blocks-on-every-stage`: all stages have the same blocks.
    * `wide-product`: a matrix product or convolution in 32 bits or more, of numbers that came from
      bfloat16 or float16.

    A value counts as different between devices along an axis if it depends on an argument that
    `in_specs` split over the axis, or on `lax.axis_index` of the axis. The result of a sum, a
    maximum or a gather counts as equal on all devices along the axes of this collective, even if
    the type of the result says that it varies. Axes of one device do not count.
    The mistakes with split dims are not found along an axis that also splits the first dim of an
    argument without a gradient or update among the outputs: a frozen weight looks like a batch. So
    check the step that trains all weights.
    `update-mixes-a-shard` and `shards-summed` accept a split dim if each device's shard has size 1
    along this dim: each index of the dim may be a separate model, as in an ensemble.
    `update-mixes-a-shard` also accepts an update whose computation rounds to whole numbers or to 8
    bits, as a quantised optimizer does: each shard may have its own scale. A hand-written pipeline
    whose stages all hold the same layers is not found: the lint cannot distinguish it from a
    recurrent net that sends its state to the next device.

    Args:
        f: a function, usually a whole step made by `mesh.spmd`; or a result of `jax.make_jaxpr`,
            which needs no `args`.
        args: the arguments of `f`; arrays may be `jax.ShapeDtypeStruct`s.
        compute: the floating-point type, of 16 bits or fewer, that all products should have. If it
            is given, each product in 32 bits or more is a finding, whatever types its operands came
            from.

    Raises:
        ValueError: `compute` is not a floating-point type of 16 bits or fewer.
    """
    if compute is not None and not values.is_narrow(jnp.dtype(compute)):
        raise ValueError(
            "lint.program needs a floating-point type of 16 bits or fewer as `compute`; got "
            f"{compute}. Use jnp.bfloat16, or leave `compute` out."
        )
    try:
        jaxpr = f if isinstance(f, ClosedJaxpr) else eqx.filter_make_jaxpr(f)(*args)[0]
    except pipeline.Misused as error:  # a pipeline refused one of its functions
        return [Finding(error.kind, error.where, error.harm, error.cure)]
    except TypeError:
        # JAX's error names two shapes that do not fit, but not the layer that was split. One
        # finding is enough: the optimizer's state repeats the model's cells, with the same specs.
        if found := [*split_by_sharding(args)]:
            return found[:1]
        raise
    # `opened` returns the jaxpr without the values of its constants, and `flat` the list of the
    # jaxpr's operations. Outside of any `shard_map`, arguments are whole, so nothing is known of
    # them (`Value()`).
    reading = Reading(narrow=compute is not None)
    reading.read(reading.flat(opened(jaxpr)), [values.Value()] * len(jaxpr.in_avals))
    of_arguments = (*tokens_out_of_order(jaxpr, args), *narrower_heads(jaxpr, args))
    return [*reading.findings.values(), *of_arguments]


PASS = ("same-every-trip", "sum-in-a-loop", "summed-twice", "wide-product")


def check(f: Callable[..., Any], *args: Any, allowed: Collection[str] = PASS) -> None:
    """Raises an error if `program(f, *args)` finds a mistake that makes results wrong. Mistakes
    that only cost time pass.

        train = jax.jit(mesh.spmd(step.make(grad, optimizer), ...))
        lint.check(train, state, batch)

    Args:
        f: a function, as `program` takes it.
        args: the arguments of `f`.
        allowed: the kinds of findings that pass; by default those that only cost time, and
            `summed-twice`, which a later division may make right.

    Raises:
        ValueError: there is such a finding. The message has the findings, with their source lines
            and cures.
    """
    findings = [finding for finding in program(f, *args) if finding.kind not in allowed]
    if findings:
        raise ValueError(report(findings))
