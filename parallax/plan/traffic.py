"""Counts the bytes that a decoder's train step sends, collective by collective, by closed forms.
The tests compare the counted bytes with those of compiled programs.

Legend: b sequences of a microbatch, T tokens (on a device, if a context axis splits them), D width,
A = b T D numbers (an activation), L layers, P stages, M microbatches, t tensor devices, n replicas.
A *term* is one kind of collective, with its bytes and its calls in a step. A *leaf* is one array of
the model, and its *share* is the part of it that ZeRO leaves on a device. A *lane* is one kind of a
pipeline's jobs: forward, backward or weights.

In `_Step`, `size` (a `Sizes`) says how often a step calls each part of the model, and `again` (a
`Recomputed`) has the operations that the backward pass runs again. `self.leaves` are the model's
arrays, but `size.leaves` is the number of calls of the embedding's backward pass. `stream` is the
bytes of the residual stream on a device, and `parts` the number of devices among which its tokens
are split. A *group* of axes is a run of neighbouring axes with the same algorithm: one call sends
along all of them. `compute` is the bytes of a number in the dtype in which the model computes, and
`itemsize` the bytes of a parameter. `wide` is the bytes of a number in a sum of gradients, norms or
losses. `shards` are the axes over which ZeRO splits. `shares_sums(leaf)` says whether the leaf's
gradients are scattered after each microbatch. `halving` is the recursive-halving algorithm.

In a ring's all-reduce of S bytes over n devices, each device sends 2 (n - 1)/n S bytes. In a
reduce-scatter from S bytes, or an all-gather to S bytes, each device sends (n - 1)/n S bytes.

Sources: Shoeybi et al. (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv 2205.05198),
section 4.2; Rajbhandari et al. (arXiv 1910.02054), section 7; and for the vocabulary, split over
the stages, Yeung et al. (arXiv 2411.05288).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jax import lax

from parallax.collectives import AxisLike, cost, halving, ring, send_next
from parallax.collectives.cost import Cost
from parallax.collectives.types import axes as axes_of
from parallax.cross_entropy import default_block_tokens
from parallax.layout import Layout
from parallax.models import recipe
from parallax.pipeline.ends import FEW
from parallax.plan import state_bytes
from parallax.plan.families import Config, ends_of, layer_of
from parallax.plan.jobs import jobs
from parallax.plan.recomputed import layers_in_body, recomputed

NORMS, LINEARS = ("attention_norm", "mlp_norm"), ("attention.qkv", "attention.out", "mlp.up")
# For each collective of `jax.lax`: the collective of this library whose time is counted for it, and
# a function that returns the bytes of the result, from the bytes of the operand and the number of
# devices.
LAX: Mapping[Any, tuple[Callable[..., Any], Callable[[int, int], int]]] = {
    lax.psum: (halving.all_reduce, lambda nbytes, n: nbytes),
    lax.psum_scatter: (halving.reduce_scatter, lambda nbytes, n: nbytes // n),
    lax.all_gather: (halving.all_gather, lambda nbytes, n: nbytes * n),
}
IDLE = {"mlp.down.bias"}  # leaves of a layer that its backward pass never reads
# Biases that a backward pass does not read if the layer keeps everything: the layer then keeps the
# sums to which they were added.
ADDED = {f"{part}.bias" for part in (*NORMS, *LINEARS)}


class Term(NamedTuple):
    """One kind of collective in a step.

    Attributes:
        what: a name for the data that the collective moves.
        axes: the mesh axes along which the collective moves the data, without axes of size 1.
        collective: the function that moves the data.
        nbytes: bytes of the array that the function takes on each device.
        times: calls per step.
        n: the number of devices of these axes: the product of their sizes.
        itemsize: bytes of a number. Algorithms cut an array between numbers, never inside one.
    """

    what: str
    axes: tuple[str, ...]
    collective: Callable[..., Any]
    nbytes: int
    times: int
    n: int
    itemsize: int

    @property
    def cost(self) -> Cost:
        """The cost of one call. The bytes of a collective of `jax.lax` are counted as one message
        of the size of its result. XLA's algorithm is not known, so the time of the collective is
        that of `collectives.halving`. A `lax.pmax`, whose array is small in this step, is counted
        as one message in one hop: this is an approximation."""
        if self.collective is lax.pmax:
            # hops, bytes over the busiest link, bytes sent, messages, bytes reduced, and the
            # longest chain of messages that wait for each other
            return Cost(1, self.nbytes, self.nbytes, 1, self.nbytes, chain=1)
        if self.collective not in LAX:
            return cost.of(self.collective, self.nbytes, self.n, itemsize=self.itemsize)
        # The algorithm whose time is taken, and a function that returns the bytes of the result.
        like, results = LAX[self.collective]
        return cost.of(like, self.nbytes, self.n, itemsize=self.itemsize)._replace(
            sent=results(self.nbytes, self.n), messages=1
        )

    @property
    def sent(self) -> int:
        """Bytes that a device sends in a step. XLA's algorithm for a collective of `jax.lax` is not
        known, so the bytes of its result count as sent. `compiled.certificate` counts alike."""
        return self.times * self.cost.sent


class Sizes(NamedTuple):
    """The sizes of one microbatch on a device, and how often a step calls each part of the model.

    Attributes:
        sequences: sequences of the microbatch.
        tokens: how many tokens of these sequences one device has; the context axis splits them.
        layers: layers that one call of a stage runs.
        forward: calls of a stage forward.
        backward: calls of a stage backward.
        heads: calls of the head.
        embeds: calls of the embedding.
        leaves: calls of the embedding's backward pass.
        hops: messages between stages (activations to the next stage, cotangents to the stage
            before).
        last: how many ticks at the step's end run the same kinds of job as the very last tick.
        weights: calls of a stage for the gradients of its weights; as many as `backward`, except in
            the schedule `zero_bubble_lockstep`. In this schedule an idle stage makes the calls that
            `backward` counts, on garbage, but never a call that `weights` counts.
    """

    sequences: int
    tokens: int
    layers: int
    forward: int
    backward: int
    heads: int
    embeds: int
    leaves: int
    hops: int
    last: int
    weights: int


def sizes(config: Config, layout: Layout, batch: int) -> Sizes:
    """Returns the sizes of a microbatch on a device, and how often a step of `batch` sequences
    calls each part of the model. The class `Sizes` explains the fields.

    `jobs` counts the calls. If all stages run the same kinds of job in a tick (lockstep), idle
    stages run these jobs too, on garbage. Each kind of job is then counted once for each tick in
    which at least one stage has a job of this kind.
    """
    b, counts = layout.sequences(batch), jobs(layout)
    return Sizes(
        sequences=b,
        tokens=b * config.context // layout.context,
        layers=config.layers // (layout.stage * layout.chunks),
        forward=counts.forward,
        backward=counts.backward,
        heads=counts.heads,
        embeds=counts.embeds,
        leaves=counts.leaves,
        hops=counts.hops,
        last=counts.last,
        weights=counts.weights,
    )


def terms(
    config: Config,
    layout: Layout,
    batch: int,
    *,
    axes: Mapping[str, AxisLike] | None = None,
    short: int = 2,
    itemsize: int = 4,
    size: Sizes | None = None,
) -> list[Term]:
    """Returns all collectives of a step of `decoder.train_step`. Equal calls are counted in one
    `Term`.

    Args:
        config: the model's sizes.
        layout: the number of devices on each axis, and what each axis splits.
        batch: sequences in the global batch.
        axes: the collective algorithm of each axis, as in `Compute`.
        short: bytes of a number if the model computes in `bfloat16` or `float16`; 4 for CPUs, where
            XLA widens such numbers to 4 bytes.
        itemsize: bytes of a parameter, and of a number if the model computes in full precision.
        size: the sizes of a microbatch, and the numbers of calls to count. The default,
            `sizes(config, layout, batch)`, counts all calls of a step.
    """
    step = _Step(config, layout, size or sizes(config, layout, batch), axes, short, itemsize)
    parts = (
        *(step.inside_layers(), step.around_context(), step.at_the_ends()),
        *(step.between_stages(), step.over_replicas(), step.over_all()),
    )
    # `lax.pmax` is in the program even for one device.
    return [
        term
        for part in parts
        for term in part
        if term.times and (term.n > 1 or term.collective is lax.pmax)
    ]


def by_axes(terms: Iterable[Term]) -> dict[tuple[str, ...], int]:
    """Returns the bytes that a device sends in a step, by the axes along which they go."""
    sent: dict[tuple[str, ...], int] = {}
    for term in terms:
        sent[term.axes] = sent.get(term.axes, 0) + term.sent
    return sent


class _Step:
    """The collectives of one step, as `Term`s. Each method yields those of one part of the step."""

    def __init__(self, config, layout, size, axes, short, itemsize):
        """Takes the arguments of `terms`. `short` is the bytes that a number in `bfloat16` or
        `float16` takes: 2, but 4 on CPUs, where XLA widens the numbers. Sets the attributes that
        the module's docstring defines, such as `stream`. Also sets `self.axes`, a dict from an
        axis's name to the axis with its algorithm. Gradients, norms and losses are summed and sent
        in float32, or in the parameters' dtype if this dtype is wider. So `wide` is the larger of 4
        bytes and `itemsize`."""
        self.config, self.layout, self.size = config, layout, size
        self.axes = recipe.axes_with_algorithms(layout, recipe.Compute(axes=axes or {}))
        self.shards = recipe.along(self.axes, recipe.SHARDED_OVER).names
        self.again = recomputed(layout)
        self.wide, self.itemsize = max(itemsize, 4), itemsize
        self.compute = itemsize if layout.precision == "full" else short
        self.leaves = state_bytes.leaves(config, layout)
        self.parts = layout.token_shards
        self.stream = self.size.tokens * config.width // self.parts * self.compute

    def term(self, what, axes, collective, nbytes, times, itemsize=None) -> Term:
        """Returns a `Term`. Its axes are those of `axes` with several devices, in the mesh's order.

        `what` names the moved data, `nbytes` is the bytes of the array that `collective` takes on
        each device, and `times` the calls in a step. `itemsize` is the bytes of a number (None:
        `self.compute`).
        """
        sizes = self.layout.axes
        axes = tuple(name for name in sizes if name in axes and sizes[name] > 1)
        return Term(
            what,
            axes,
            collective,
            nbytes,
            times,
            math.prod(sizes[name] for name in axes),  # devices on all of these axes together
            itemsize or self.compute,
        )

    def groups(self, axes) -> list[list[str]]:
        """Returns the axes in groups. A group is a run of neighbouring axes with the same
        algorithm; one call of a collective moves an array along all of these axes. Axes of one
        device are left out."""
        used = [name for name in axes if self.layout.axes.get(name, 1) > 1]
        return [
            list(group)
            for _, group in itertools.groupby(used, key=lambda name: self.axes[name].algorithm)
        ]

    def algorithm(self, group):
        """Returns the collective algorithm of a group of axes. For an empty group this is a ring,
        which then sends nothing."""
        return self.axes[group[0]].algorithm if group else ring

    def size_of(self, group) -> int:
        """Returns the number of devices of a group of axes: the product of the axes' sizes."""
        return math.prod(self.layout.axes[name] for name in group)

    def all_reduce(self, what, axes, nbytes, times, itemsize=None) -> Iterator[Term]:
        """Yields the `Term`s of an all-reduce that takes `nbytes` bytes on each device and runs
        `times` times in a step. `axes` are divided into groups of neighbouring axes with the same
        algorithm, and each group has one `Term`. `what` names the moved data. `itemsize` is the
        bytes of a number (None: `self.compute`)."""
        for group in self.groups(axes):
            yield self.term(what, group, self.algorithm(group).all_reduce, nbytes, times, itemsize)

    def reduce_scatter(self, what, over, nbytes, times, itemsize=None) -> Iterator[Term]:
        """Yields the `Term`s of a reduce-scatter that takes `nbytes` bytes on each device and runs
        `times` times in a step. The axes `over` are divided into groups of neighbouring axes with
        the same algorithm. There is one `Term` for each group, in the order of the axes.

        The reduce-scatter over a group's axes leaves 1/n of the bytes on each device, where n is
        the number of devices of these axes. The next group's reduce-scatter takes these bytes.
        `what` names the moved data. `itemsize` is the bytes of a number (None: `self.compute`).
        """
        for group in self.groups(over):
            yield self.term(
                what, group, self.algorithm(group).reduce_scatter, nbytes, times, itemsize
            )
            nbytes //= self.size_of(group)

    def all_gather(self, what, over, nbytes, times, itemsize=None) -> Iterator[Term]:
        """Yields the `Term`s of an all-gather that takes `nbytes` bytes on each device and runs
        `times` times in a step. The axes `over` are divided into groups of neighbouring axes with
        the same algorithm. There is one `Term` for each group, and the `Term`s come in the reverse
        order of the axes.

        The all-gather over a group's axes gives each device n times as many bytes, where n is the
        number of devices of these axes. The next group's all-gather takes these bytes. `what`
        names the moved data. `itemsize` is the bytes of a number (None: `self.compute`).
        """
        for group in self.groups(over)[::-1]:
            yield self.term(what, group, self.algorithm(group).all_gather, nbytes, times, itemsize)
            nbytes *= self.size_of(group)

    def inside_layers(self) -> Iterator[Term]:
        """Yields the messages of tensor parallelism. Each pass of a layer, forward or backward, has
        2 all-reduces. With `sequence` there are 2 all-gathers and 2 reduce-scatters instead. If the
        backward pass runs collectives of the forward pass again, these calls count too."""
        size, again, whole_stage = self.size, self.again, int(self.again.whole_stage)
        in_both_passes = 2 * size.layers * (size.forward + size.backward)
        # What one backward pass of a stage runs again: `again.gathers` and `again.sums` per layer,
        # and with `whole_stage` the whole forward pass, 2 of each kind per layer.
        gathers_again = size.layers * (again.gathers + 2 * whole_stage)
        sums_again = size.layers * (again.sums + 2 * whole_stage)
        # No gradient needs the last sum of `whole_stage`. The compiled program leaves the sum out
        # only if the stage has one layer, and so no loop over layers.
        if whole_stage and size.layers == 1:
            sums_again -= 1
        gathers = in_both_passes + size.backward * gathers_again
        sums = in_both_passes + size.backward * sums_again
        if self.layout.sequence:
            yield from self.halves("tokens gathered", gathers, "sums scattered", sums)
        else:
            yield from self.all_reduce("activations in layers", ("tensor",), self.stream, sums)

    def halves(self, gathered: str, gathers: int, scattered: str, scatters: int) -> Iterator[Term]:
        """Yields all-gathers and reduce-scatters of the residual stream over the tensor axis. These
        are the two halves into which sequence parallelism splits an all-reduce. A step calls the
        all-gather `gathers` times and the reduce-scatter `scatters` times. `gathered` names the
        data of the all-gathers, and `scattered` the data of the reduce-scatters (`Term.what`)."""
        yield from self.all_gather(gathered, ("tensor",), self.stream, gathers)
        # A gather takes one part of the tokens, and a scatter all of them.
        yield from self.reduce_scatter(scattered, ("tensor",), self.stream * self.parts, scatters)

    def around_context(self) -> Iterator[Term]:
        """Yields the messages of ring attention. Keys and values go round the ring in each pass. In
        the backward pass the gradients of keys and values go round too, in float32 or wider."""
        size, n = self.size, self.layout.context
        # The numbers of the keys on a device. The values have as many, and go in messages of their
        # own, so each hop counts as two messages.
        keys = size.tokens * layer_of(self.config).keys // self.layout.tensor
        # `again.sums` counts the sum of attention's result, so attention's forward pass runs again
        # if `again.sums` is above 0, or if the whole stage runs again.
        passes_again = size.backward * size.layers * (self.again.sums > 0 or self.again.whole_stage)
        passes = size.layers * (size.forward + size.backward)
        # Of the n - 1 messages of a pass that runs again, the first equals the first of the
        # backward pass, and XLA sends it once. The others are in a loop. For n = 3 the loop has one
        # trip: XLA unrolls the loop, and sends that message once too.
        hops = (n - 1) * passes + passes_again * (n - 2 if n > 3 else 0)
        yield self.term("keys and values", ("context",), send_next, keys * self.compute, 2 * hops)
        # The sum of a device's gradients starts at the next device, so n - 1 hops bring it home.
        gradients = 2 * (n - 1) * size.layers * size.backward
        nbytes = keys * self.wide
        yield self.term(
            "their gradients", ("context",), send_next, nbytes, gradients, itemsize=self.wide
        )

    def at_the_ends(self) -> Iterator[Term]:
        """Yields the messages of the embedding and the head, whose vocabulary is split over the
        axes stage and tensor. `between_stages` yields the messages with the stages' activations."""
        size, both = self.size, ("stage", "tensor")
        # Each call of the embedding sums the rows that it looks up over tensor, and each call of
        # the head sums the cotangent of its input. The sums over stage are in `between_stages`.
        sums = size.embeds + size.heads
        if self.layout.sequence:
            # The sums become reduce-scatters. Each call of the head gathers its input, and each
            # call of the embedding's backward pass (`leaves`) gathers the cotangent.
            gathers = size.heads + size.leaves
            yield from self.halves("tokens at the ends", gathers, "sums at the ends", sums)
        else:
            yield from self.all_reduce("vocabulary", ("tensor",), self.stream, sums)
        # The loss is computed for blocks of at most `most` of the device's `size.tokens`. The
        # devices of both axes split the logits of a block, so with more devices a block has more
        # tokens. For each token the loss needs the largest logit and two sums (hence `2 * maxima`):
        # the sum of exponentials, and the target's logit, which only one device has.
        most = default_block_tokens(self.layout.stage * self.layout.tensor)
        blocks = -(-size.tokens // most)  # rounded up
        block_tokens = -(-size.tokens // blocks)
        calls = size.heads * blocks
        maxima = block_tokens * self.wide
        # An axis's algorithm can only sum, so the maxima take `lax.pmax`, over both axes at once.
        yield self.term("maxima of logits", both, lax.pmax, maxima, calls, self.wide)
        yield from self.all_reduce("sums of logits", both, 2 * maxima, calls, self.wide)

    def between_stages(self) -> Iterator[Term]:
        """Yields the messages between stages: the pipeline's hops, the embedding's output and the
        head's input with their cotangents, and the gradients of parameters that all stages share.

        With `sequence`, each device along `tensor` has only its own tokens. So for parameters
        that are not split over `tensor`, a device has only its own part of the gradient, and the
        parts are summed over `tensor`. The messages of these sums are yielded too.

        The vocabulary is split over the stages. So all stages need the last stage's output, for
        the head, and the cotangent of the first stage's input, for the embedding. The first stage
        needs the sum of all stages' embeddings, and the last stage needs the sum of all stages'
        cotangents from the head.
        """
        # `size.hops` counts activations and cotangents. With `split_sends` each tensor device sends
        # one part of them, and the parts are gathered after the hop.
        size, part = self.size, self.stream // self.layout.tensor
        sent = part if self.layout.split_sends else self.stream
        yield self.term("hops between stages", ("stage",), send_next, sent, size.hops)
        if self.layout.split_sends:  # each call of a stage reads one message
            yield from self.all_gather(
                "parts of hops gathered", ("tensor",), part, size.forward + size.backward
            )
        # The embeddings are summed to the first stage (`embeds`), and the cotangent of that stage's
        # input is copied to all stages (`leaves`). The head has one copy, of its input, and one
        # sum, of the cotangents. Between few stages each copy or sum takes log2(P) rounds of hops,
        # and between many an all-reduce (`pipeline.ends`).
        what, stages = "ends of the pipeline", self.layout.stage
        calls = size.embeds + size.leaves + 2 * size.heads
        if stages <= FEW:
            rounds = (stages - 1).bit_length()
            yield self.term(what, ("stage",), send_next, self.stream, rounds * calls)
        else:
            yield from self.all_reduce(what, ("stage",), self.stream, calls)
        for leaf in self.leaves:
            # `leaf.axes` are the axes that split the leaf; along others the devices have copies.
            if "stage" not in leaf.axes:
                yield from self.gradient("shared gradients", leaf, "stage")
            if self.layout.sequence and "tensor" not in leaf.axes:
                yield from self.gradient("gradients of token parts", leaf, "tensor")

    def shares_sums(self, leaf: state_bytes.Leaf) -> bool:
        """Returns whether a leaf's gradients are scattered after each microbatch. If so, a device
        adds up only its shares of the microbatches' gradients; if not, it adds up whole gradients.
        `leaf.block` says whether the leaf belongs to the layers."""
        return self.layout.zero == 2 or (self.layout.zero == 3 and leaf.block)

    def gradient(self, what: str, leaf: state_bytes.Leaf, axis: str) -> Iterator[Term]:
        """Yields the all-reduce of a leaf's gradient along `axis`. If ZeRO has already scattered
        the gradient (`shares_sums`), only the device's part of the gradient is reduced."""
        count = leaf.share if self.shares_sums(leaf) else leaf.elements
        return self.all_reduce(what, (axis,), count * self.wide, 1, self.wide)

    def over_replicas(self) -> Iterator[Term]:
        """Yields the messages of data parallelism and ZeRO: gradients are reduced or scattered, and
        parameters gathered."""
        over, chunks = axes_of(self.shards), self.layout.chunks
        shares_parameters = self.layout.zero == 3
        for leaf in self.leaves:
            whole, share = leaf.elements * self.wide, leaf.share * self.wide
            if not leaf.split:  # whole on each replica, also with ZeRO
                yield from self.all_reduce("gradients", over, whole, 1, self.wide)
                continue
            # ZeRO-1: a step scatters a leaf's gradients once, and gathers its updated shares once.
            # ZeRO-2: the same, but the gradients of each microbatch are scattered (`shares_sums`).
            # ZeRO-3 (`shares_parameters`): the layers' leaves are scattered as often as in ZeRO-2,
            # and gathered in each pass. The other leaves are gathered and scattered once in a step
            # (`zero.gathered_once`). All are gathered in the type of the computation.
            gathered = self.compute if shares_parameters else self.itemsize
            scatters = self._scatters(leaf) if self.shares_sums(leaf) else 1
            gathers, part = 1, whole
            if leaf.block:
                # A leaf of the layers stacks those of all chunks of the stage, `size.layers` for
                # each chunk. In ZeRO-2 a call scatters the layers of one chunk. In ZeRO-3 a call
                # gathers or scatters one layer, in the loop over the layers.
                layers = self.size.layers if shares_parameters else 1
                scatters *= layers
                if self.shares_sums(leaf):
                    part = whole // chunks // layers
                if shares_parameters:
                    gathers = self._gathers(leaf) * layers
                    share = share // chunks // layers
            yield from self.reduce_scatter("gradients scattered", over, part, scatters, self.wide)
            # A reduce-scatter takes the whole array, and an all-gather a device's share. `share`
            # counts `self.wide` bytes for each number, but a gathered number has `gathered` bytes.
            yield from self.all_gather(
                "parameters gathered", over, share // self.wide * gathered, gathers, gathered
            )
        yield from self.all_reduce("loss", over, self.wide, 1, self.wide)
        # Groups of replicas (HSDP) then add up their shares of the gradients, and the loss, which
        # is one number. ZeRO splits only within a group.
        for nbytes in [*(leaf.share * self.wide for leaf in self.leaves), self.wide]:
            yield from self.all_reduce("shares between groups", ("replica",), nbytes, 1, self.wide)

    def _gathers(self, leaf: state_bytes.Leaf) -> int:
        """Returns how often a step gathers a layer's leaf under ZeRO-3. Each forward pass of a
        stage gathers the leaf, and a forward pass that runs again gathers it again. Each backward
        pass that reads the leaf gathers the leaf too. A backward pass never reads the bias of a
        layer's last matmul (`IDLE`). It reads the layer's other biases (`ADDED`) only if it
        computes some of the layer's arrays again."""
        size, name = self.size, leaf.path.removeprefix("blocks.")
        # The leaves that a backward pass does not read: more if a layer keeps everything.
        unread = IDLE | ADDED if self.again.keeps == "everything" else IDLE
        in_backward = size.backward * (name not in unread)
        if size.layers <= layers_in_body(self.layout) and self.layout.chunks == 1:
            # There is no loop over layers, and with one chunk all calls read the same layers. So
            # all gathers of forward passes are equal, also those of a stage that runs again, and
            # XLA gathers once for all. On CPUs and GPUs, the barrier of `jax.checkpoint` keeps XLA
            # from using this result in the backward passes. TPUs are counted alike.
            return 1 + in_backward
        return size.forward + in_backward + size.backward * self.again.whole_stage

    def _scatters(self, leaf: state_bytes.Leaf) -> int:
        """Returns how often a step scatters a leaf's gradients under ZeRO-2 or ZeRO-3. Without a
        pipeline, this is once per microbatch. A pipeline scatters them each time that a stage runs
        a job of the kind (the lane) that computes these gradients.

        A job that computes no gradient of the leaf scatters zeros. With a ring, all scatters of
        zeros of the same shape are equal, so a compiled step runs only one scatter of zeros for
        each shape. With `lax.psum_scatter`, XLA removes all scatters of zeros.
        """
        size = self.size
        if not self.layout.pipelined:
            return size.backward
        if leaf.block:
            return size.weights  # calls of a stage for its weights' gradients
        ends = ends_of(self.config)
        scatters = size.leaves * (leaf.path in ends.embedding) + size.heads * (
            leaf.path in ends.head
        )
        # If several groups have different algorithms, one by lax is taken to drop all zeros.
        by_lax = any(
            self.algorithm(group).reduce_scatter is lax.psum_scatter
            for group in self.groups(axes_of(self.shards))
        )
        if by_lax or leaf.path in ends.embedding & ends.head:
            return scatters
        # A leaf that only one end reads (`^`) gets zeros from the jobs of the other end. There is
        # one scatter of zeros for each shape. The first leaf of the shape (`alike[0]`) counts this
        # scatter. In the two ends, leaves with as many elements have the same shape.
        alike = [
            other.path
            for other in self.leaves
            if other.path in ends.embedding ^ ends.head and other.elements == leaf.elements
        ]
        return scatters + (leaf.path == alike[0])

    def over_all(self) -> Iterator[Term]:
        """Yields one all-reduce for each set of axes over which some gradient is split. The
        all-reduce sums the squared norms of the gradients that are split over exactly these axes.
        Then yields an all-reduce over the axes of all sets, which tells all devices whether the
        update is finite.

        The all-reduces take their axes in alphabetical order, the order in which an array's type
        lists them.
        """
        axis_sets = {}  # a dict as an ordered set
        for leaf in self.leaves:
            axes = set(leaf.axes) | (set(axes_of(self.shards)) if leaf.split else set())
            axis_sets[frozenset(axes)] = None
        # Each all-reduce has one number, of `self.wide` bytes, and runs once in a step.
        for axes in axis_sets:
            yield from self.all_reduce("squared norms", sorted(axes), self.wide, 1, self.wide)
        yield from self.all_reduce(
            "whether all is finite", sorted(set().union(*axis_sets)), self.wide, 1, self.wide
        )
