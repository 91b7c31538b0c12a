"""Mistakes that a traced program shows: nothing is compiled, nothing is run."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.typing import DTypeLike

from parallax import pipeline
from parallax.jaxprs import opened
from parallax.lint import values
from parallax.lint.finding import Finding
from parallax.lint.walk import Walk


def program(
    f: Callable[..., Any] | ClosedJaxpr, *args: Any, compute: DTypeLike | None = None
) -> list[Finding]:
    """The mistakes in `f(*args)` that run in silence, in the order of the program. It is traced only.

    * `collective-under-a-predicate`: a `ppermute`, ours too, in a `cond`, `switch` or `while` whose predicate differs between
      devices. It waits for all devices of the program, and hangs. So does another collective whose own axis it differs along.
    * `lost-varying-mark`: a `cond` with such a predicate, and operands or results that are typed as the same everywhere: wrong
      gradients (jax #40823).
    * `summed-twice`: a sum over devices of what is the same on all of them.
    * `sum-in-a-loop`: a sum whose result is only added to a loop's carry; one sum of that carry after the loop is the same.
    * `same-every-trip`: a collective in a loop, of something that the loop does not change. `zero.gathered` and
      `sequence.gather_from` are left alone: parameters that are gathered again for each microbatch need not be held.
    * `update-mixes-a-shard`: a reduction of a shard that goes into the update of that shard, with no collective over its axes
      between: `optax.lamb`, or clipping by a norm, on shards. Sought are reductions of all elements to one number, and in
      optax's own lines those of single dims, of whatever elementwise operations join to an output `w + u` whose spec is that
      of the argument `w`.
    * `shards-summed`: a sum over an axis along which such a `w` is split, of what goes into its update and was made by a
      product, a reduction or a loop, as gradients are: it adds different shards.
    * `clipped-before-the-sum`: gradients that differ between devices are scaled by a norm, or a maximum, of each device's own,
      and only then summed over the devices: `optax.clip_by_global_norm` inside `grads.averaged`. Sought are products and
      quotients outside of what is differentiated, where a device has several rows: of one row it is the clipping of each
      example, as in differentially private training. What clips the mean of each microbatch is not found.
    * `gathered-out-of-order`: a gather of a floating-point argument over the outer of two axes that split a dim, or over both in
      another order than its spec has, so that the blocks do not lie one after another. A batch is none the worse for it.
    * `layers-not-gathered`: a `scan` over layers, in their own order, that are split over the axis of the batch and meet no
      collective over it, while its carry comes from that batch. Layers are told by an output of the same shape and spec
      (their gradient, or their update), and the batch by none; programs that also send along that axis, as pipelines do, are
      left alone.
    * `reduced-over-a-split-dim`: a norm, a softmax or a mean over a dim that a weight's spec splits (hidden units, heads), which
      meets that dim again with no collective between; or over groups of which a device has one element each.
    * `parts-of-a-split-dim`: slices of such a dim that are joined with each other: those of a fused matrix that is split by its
      outputs, or of the stacked gates of an `eqx.nn.LSTMCell`.
    * `one-key-for-split-units`: random numbers that are the same on all devices meet a split dim: dropout with one mask a block.
    * `counted-on-a-device`: what was made of 0, 1, 2, ... on each device meets a split dim: positions of split tokens, or
      slopes of split heads. Masks, which compare two counts, are left alone.
    * `added-before-the-sum`: a bias, or a residual, added on each device to what is then summed over them.
    * `parameter-by-closure`, `blocks-outside-the-stage`, `blocks-on-every-stage`: a function of a pipeline reads what it has no
      gradient of, or all stages have the same layers. The trace ends there with an error, and this is the one finding.
    * `wide-product`: a matrix product or convolution in 32 bits or more, of numbers that came from bfloat16 or float16.

    Devices differ along the axes of `in_specs` and of `lax.axis_index`; what a sum, a maximum or a gather gives is the same
    again, even where it is typed as varying. Axes of one device do not count. `update-mixes-a-shard` and `shards-summed`
    leave alone a dim of which a device has one row, since it may count models; and the first an argument whose elements are
    rounded to whole numbers or to 8 bits, since its scale may be that of a shard. A pipeline by hand whose stages all hold the
    same layers is not sought: a recurrent net that hands its state to the next device is the same program.

    Args:
        f: a function, usually a whole step made by `mesh.spmd`, or what `jax.make_jaxpr` gave, then without `args`.
        args: as `f` takes them; `jax.ShapeDtypeStruct`s will do for arrays.
        compute: the 16-bit type that all products should be in; then each wider one is a finding, whatever it multiplies.

    Raises:
        ValueError: `compute` is a wider type.
    """
    if compute is not None and not values.is_narrow(jnp.dtype(compute)):
        raise ValueError(
            f"lint.program: compute is the 16-bit type of a region; got {compute}. Take jnp.bfloat16, or leave it out."
        )
    try:
        jaxpr = f if isinstance(f, ClosedJaxpr) else eqx.filter_make_jaxpr(f)(*args)[0]
    except pipeline.Misused as error:
        return [Finding(error.kind, error.where, error.harm, error.cure)]
    walk = Walk(narrow=compute is not None)
    walk(opened(jaxpr), [values.Value()] * len(jaxpr.in_avals))
    return list(walk.findings.values())
