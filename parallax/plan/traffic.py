"""What a GPT-2 train step sends, collective by collective: the closed forms, which the compiled program's bytes equal.

Legend: b sequences of a microbatch, T tokens (of a device, where a context axis splits them), D width, A = b T D numbers (an
activation), L layers, P stages, M microbatches, t tensor devices, n replicas. A ring's all-reduce of S bytes over n devices sends
2 (n - 1)/n S, a reduce-scatter half of it, and an all-gather to S bytes as much.

Sources: Shoeybi et al. (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv 2205.05198), section 4.2; Rajbhandari et al.
(arXiv 1910.02054), section 7; Yeung et al. (arXiv 2411.05288) for the vocabulary over the stages.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jax import lax

from parallax.collectives import AxisLike, cost, halving, ring, send_next
from parallax.collectives.cost import Cost
from parallax.collectives.types import axes as axes_of
from parallax.layout import Layout, words
from parallax.layout.rows import Choice
from parallax.models import gpt2
from parallax.plan import arguments

BLOCK_TOKENS = 512  # of `cross_entropy.mean`
NORMS, LINEARS = ("attention_norm", "mlp_norm"), ("attention.qkv", "attention.out", "mlp.up")
LAX: Mapping[Any, tuple[Callable[..., Any], Callable[[int, int], int]]] = {  # in whose time, and the bytes of the result
    lax.psum: (halving.all_reduce, lambda nbytes, n: nbytes),
    lax.psum_scatter: (halving.reduce_scatter, lambda nbytes, n: nbytes // n),
    lax.all_gather: (halving.all_gather, lambda nbytes, n: nbytes * n),
}
IDLE = {"mlp.down.bias"}  # of a layer, what its backward pass never needs
# And what it needs no more where everything is kept: what was added is, and so are norms' weights, in another shape.
ADDED = {f"{part}.bias" for part in (*NORMS, *LINEARS)} | {f"{part}.weight" for part in NORMS}


class Term(NamedTuple):
    """One kind of collective in a step.

    Attributes:
        what: what it moves.
        axes: along which; the axes of one device are left out.
        collective: the function that moves it.
        nbytes: of the array that the function takes on each device.
        times: calls a step.
        n: devices on the axes together.
        itemsize: bytes of a number.
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
        """Of one call. What `jax.lax` moves counts as its result, and takes the time of halving; `lax.pmax` that of one hop."""
        if self.collective is lax.pmax:
            return Cost(1, self.nbytes, self.nbytes, 1, self.nbytes, chain=1)
        if self.collective not in LAX:
            return cost.of(self.collective, self.nbytes, self.n, itemsize=self.itemsize)
        like, results = LAX[self.collective]
        return cost.of(like, self.nbytes, self.n, itemsize=self.itemsize)._replace(sent=results(self.nbytes, self.n), messages=1)

    @property
    def sent(self) -> int:
        """Bytes that a device sends in a step: the results of the program's collectives."""
        return self.times * self.cost.sent


class Sizes(NamedTuple):
    """The sizes of one microbatch on a device, and how often its parts run on it in a step.

    Attributes:
        sequences: of the microbatch.
        tokens: of all of these, on a device of the context axis.
        layers: that one call of a stage runs.
        forward: calls of a stage forward.
        backward: calls of a stage backward.
        heads: calls of the head.
        embeds: calls of the embedding.
        leaves: calls of the embedding's transpose.
        hops: activations sent to the next stage, and cotangents to the one before.
        last: ticks in a row, alike, that end the step.
        weights: calls of a stage for the gradients of its weights: `backward`, or fewer where they have a lane of their own.
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


def sizes(config: gpt2.Config, layout: Layout, batch: int) -> Sizes:
    """How often what runs.

    Where all stages run the same lanes, idle ones run too, on garbage: each lane counts in all ticks in which it runs anywhere.
    """
    b, P, M, v = layout.sequences(batch), layout.stage, layout.microbatches, layout.chunks
    order = words.read(layout).order
    ticks = order.ticks(P, M, v)
    forward, backward, heads, last = ticks
    hops, embeds, leaves = order.ends(ticks, P, M, v)
    layers, tokens = config.layers // (P * v), b * config.context // layout.context
    return Sizes(b, tokens, layers, forward, backward, heads, embeds, leaves, hops, last, order.weights(P, M, v))


def terms(
    config: gpt2.Config,
    layout: Layout,
    batch: int,
    *,
    axes: Mapping[str, AxisLike] | None = None,
    short: int = 2,
    itemsize: int = 4,
    size: Sizes | None = None,
) -> list[Term]:
    """All collectives of a step of `decoder.train_step`, those of several calls of one kind in one term.

    Args:
        config: the model's sizes.
        layout: which devices share what.
        batch: sequences in the global batch.
        axes: who moves data along which axis, as in `decoder.prepare`.
        short: bytes of a number that the model computes in `bfloat16` or `float16` (XLA's CPU backend sends 4).
        itemsize: bytes of a parameter, and of a number that is computed in full precision.
        size: with these calls; by default `sizes`, those of the step.
    """
    step = _Step(config, layout, size or sizes(config, layout, batch), axes, short, itemsize)
    parts = (
        *(step.inside_layers(), step.around_context(), step.at_the_ends()),
        *(step.between_stages(), step.over_replicas(), step.over_all()),
    )
    return [term for part in parts for term in part if term.times and (term.n > 1 or term.collective is lax.pmax)]


def by_axes(terms: Iterable[Term]) -> dict[tuple[str, ...], int]:
    """Bytes that a device sends in a step, by the axes along which they go."""
    found: dict[tuple[str, ...], int] = {}
    for term in terms:
        found[term.axes] = found.get(term.axes, 0) + term.sent
    return found


class _Step:
    """The terms of one step, by what causes them."""

    def __init__(self, config, layout, size, axes, short, itemsize):
        self.config, self.layout, self.size = config, layout, size
        self.does = words.read(layout, axes)
        self.axes = self.does.axes
        self.wide, self.itemsize = max(itemsize, 4), itemsize
        self.compute = self.does.numbers.of(full=itemsize, short=short)
        self.leaves = arguments.leaves(config, layout)
        self.parts = self.does.tokens.of(whole=1, share=layout.tensor)
        self.stream = self.size.tokens * config.width // self.parts * self.compute  # the residual stream, bytes on a device

    def term(self, what, axes, collective, nbytes, times, itemsize=None) -> Term:
        sizes = self.layout.axes
        axes = tuple(name for name in sizes if name in axes and sizes[name] > 1)
        return Term(what, axes, collective, nbytes, times, math.prod(sizes[name] for name in axes), itemsize or self.compute)

    def groups(self, axes) -> list[list[str]]:
        """The axes that one call works along: all of them where one mover moves them, otherwise each, one after the other."""
        sizes = self.layout.axes
        used = [name for name in sizes if name in axes and sizes[name] > 1]
        return [used] if len({self.axes[name].mover for name in used}) < 2 else [[name] for name in used]

    def mover(self, group):
        return self.axes[group[0]].mover if group else ring

    def size_of(self, group) -> int:
        return math.prod(self.layout.axes[name] for name in group)

    def all_reduce(self, what, axes, nbytes, times, itemsize=None) -> Iterator[Term]:
        for group in self.groups(axes):
            yield self.term(what, group, self.mover(group).all_reduce, nbytes, times, itemsize)

    def reduce_scatter(self, what, over, nbytes, times, itemsize=None) -> Iterator[Term]:
        """From the first axis to the last, where they have several movers."""
        for group in self.groups(over):
            yield self.term(what, group, self.mover(group).reduce_scatter, nbytes, times, itemsize)
            nbytes //= self.size_of(group)

    def all_gather(self, what, over, nbytes, times, itemsize=None) -> Iterator[Term]:
        """From the last axis to the first, where they have several movers."""
        for group in self.groups(over)[::-1]:
            yield self.term(what, group, self.mover(group).all_gather, nbytes, times, itemsize)
            nbytes *= self.size_of(group)

    def inside_layers(self) -> Iterator[Term]:
        """Tensor parallelism: 4 all-reduces a layer, or their 8 halves; and those that are computed again."""
        size, kept, stage = self.size, self.does.kept, int(self.does.again.in_stages)
        both = 2 * size.layers * (size.forward + size.backward)
        # A stage that runs again runs its forward pass as it stands; of a single layer, the last sum is not needed.
        gathers = both + size.backward * (size.layers * kept.gathers + stage * 2 * size.layers)
        sums = both + size.backward * (size.layers * kept.sums + stage * (2 * size.layers - (size.layers == 1)))
        yield from self.does.tokens.of(
            whole=self.all_reduce("activations in layers", ("tensor",), self.stream, sums),
            share=self.halves("tokens gathered", gathers, "sums scattered", sums),
        )

    def halves(self, gathered: str, gathers: int, scattered: str, scatters: int) -> Iterator[Term]:
        """All-gathers and reduce-scatters of the residual stream over the tensor axis."""
        yield from self.all_gather(gathered, ("tensor",), self.stream, gathers)
        yield from self.reduce_scatter(scattered, ("tensor",), self.stream * self.parts, scatters)

    def around_context(self) -> Iterator[Term]:
        """Keys and values, which go round the ring in each pass, and their gradients, which follow them in float32 or wider."""
        size, kept, n = self.size, self.does.kept, self.layout.context
        keys = size.tokens * self.config.width // self.layout.tensor  # numbers on a device; of values as many, sent beside them
        again = size.backward * size.layers * (kept.sums > 0 or self.does.again.in_stages)
        passes = size.layers * (size.forward + size.backward)
        # A forward pass that runs again has its first message in common with the backward pass; all, where no loop is left.
        hops = (n - 1) * passes + again * (n - 2 if n > 3 else 0)
        yield self.term("keys and values", ("context",), send_next, keys * self.compute, 2 * hops)
        gradients = 2 * (n - 1) * size.layers * size.backward
        yield self.term("their gradients", ("context",), send_next, keys * self.wide, gradients, self.wide)

    def at_the_ends(self) -> Iterator[Term]:
        """The embedding and the head, whose vocabulary is split over stage and tensor."""
        size, both = self.size, ("stage", "tensor")
        ends = size.embeds + size.heads
        of_tokens = itertools.chain(
            self.halves("tokens at the ends", size.leaves + size.heads, "sums at the ends", ends),
            self.all_reduce("vocabulary over stages", ("stage",), self.stream, ends),
        )
        yield from self.does.tokens.of(whole=self.all_reduce("vocabulary", both, self.stream, ends), share=of_tokens)
        blocks = -(-size.tokens // BLOCK_TOKENS)
        part = -(-size.tokens // blocks)
        calls = size.heads * blocks
        yield self.term("maxima of logits", both, lax.pmax, part * self.wide, calls, self.wide)
        yield from self.all_reduce("sums of logits", both, 2 * part * self.wide, calls, self.wide)

    def between_stages(self) -> Iterator[Term]:
        """The pipeline's hops, what enters the first stage and leaves the last, and the gradients that all stages share."""
        size, part = self.size, self.stream // self.layout.tensor
        sent = self.does.sends.of(whole=self.stream, share=part)
        yield self.term("hops between stages", ("stage",), send_next, sent, size.hops)
        yield from self.does.sends.of(
            whole=(), share=self.all_gather("parts of hops gathered", ("tensor",), part, size.forward + size.backward)
        )
        yield from self.all_reduce("ends of the pipeline", ("stage",), self.stream, size.leaves + size.heads)
        split_too = self.does.tokens.of(whole=(), share=("tensor",))
        for leaf in self.leaves:
            if "stage" not in leaf.axes:
                yield from self.gradient("shared gradients", leaf, "stage")
            for axis in set(split_too) - set(leaf.axes):
                yield from self.gradient("gradients of token parts", leaf, axis)

    def summed(self, leaf: arguments.Leaf) -> Choice:
        """Whether the sums of a leaf's gradients are held whole, or scattered to shares each microbatch."""
        return self.does.replicas.sums if leaf.block else self.does.replicas.sums_of_ends

    def gradient(self, what: str, leaf: arguments.Leaf, axis: str) -> Iterator[Term]:
        """The sum of a leaf's gradient, of which ZeRO-2 and (for the layers) ZeRO-3 have scattered all but a share already."""
        count = self.summed(leaf)(whole=leaf.elements, share=leaf.share)
        return self.all_reduce(what, (axis,), count * self.wide, 1, self.wide)

    def over_replicas(self) -> Iterator[Term]:
        """Data parallelism and ZeRO: gradients reduced, parameters or updates gathered."""
        held, over, chunks = self.does.replicas.parameters, axes_of(self.does.parts.names), self.does.chunks
        for leaf in self.leaves:
            whole, share = leaf.elements * self.wide, leaf.share * self.wide
            if not leaf.split:
                yield from self.all_reduce("gradients", over, whole, 1, self.wide)
                continue
            gathered = held(whole=self.itemsize, share=self.compute)
            scatters, gathers, part = self.summed(leaf)(whole=1, share=self._scatters(leaf)), 1, whole
            if leaf.block:
                # ZeRO-3 gathers and scatters each layer by itself, in the loop over the layers.
                layers = held(whole=1, share=self.size.layers)
                part = self.summed(leaf)(whole=whole, share=whole // chunks // layers)
                scatters *= layers
                gathers = held(whole=1, share=self._gathers(leaf) * layers)
                share = held(whole=share, share=share // chunks // layers)
            yield from self.reduce_scatter("gradients scattered", over, part, scatters, self.wide)
            yield from self.all_gather("parameters gathered", over, share // self.wide * gathered, gathers, gathered)
        yield from self.all_reduce("loss", over, self.wide, 1, self.wide)
        for nbytes in [*(leaf.share * self.wide for leaf in self.leaves), self.wide]:
            yield from self.all_reduce("shares between groups", ("replica",), nbytes, 1, self.wide)

    def _gathers(self, leaf: arguments.Leaf) -> int:
        """How often ZeRO-3 gathers a leaf of the layers: once forward, and again backward where the backward pass needs it."""
        size, does, name = self.size, self.does, leaf.path.removeprefix("blocks.")
        again = size.backward * (name not in does.kept.of(everything=IDLE | ADDED, products=IDLE, inputs=IDLE))
        if size.layers <= does.replicas.unroll and does.chunks == 1:  # no loop is left: XLA gathers once for all forward passes
            return 1 + again
        return size.forward + again + size.backward * does.again.in_stages

    def _scatters(self, leaf: arguments.Leaf) -> int:
        """How often ZeRO-2 scatters a leaf's gradients: once a microbatch, in a pipeline in each tick of a lane that makes them.

        A lane that does not make them scatters zeros, which XLA does once for all that look alike.
        """
        size = self.size
        made = {"wte": size.leaves + size.heads, "wpe": size.leaves + 1, "norm.weight": size.heads + 1}
        in_lanes = size.weights if leaf.block else made.get(leaf.path, size.heads)
        return self.does.stages.of(alone=size.backward, piped=in_lanes)

    def over_all(self) -> Iterator[Term]:
        """One sum of squares for each set of axes that split some gradients; whether the update is finite, over all of them."""
        sets = {}
        for leaf in self.leaves:
            axes = set(leaf.axes) | (set(axes_of(self.does.parts.names)) if leaf.split else set())
            sets[frozenset(axes)] = None
        for axes in sets:
            yield from self.all_reduce("squared norms", axes, self.wide, 1, self.wide)
        yield from self.all_reduce("whether all is finite", set().union(*sets), self.wide, 1, self.wide)
