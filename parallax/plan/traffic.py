"""What a decoder's train step sends, collective by collective: the closed forms, which the compiled
program's bytes equal.

Legend: b sequences of a microbatch, T tokens (of a device, where a context axis splits them), D
width, A = b T D numbers (an activation), L layers, P stages, M microbatches, t tensor devices, n
replicas. A ring's all-reduce of S bytes over n devices sends 2 (n - 1)/n S, a reduce-scatter half
of it, and an all-gather to S bytes as much.

Sources: Shoeybi et al. (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv 2205.05198),
section 4.2; Rajbhandari et al. (arXiv 1910.02054), section 7; Yeung et al. (arXiv 2411.05288) for
the vocabulary over the stages.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jax import lax

from parallax.collectives import AxisLike, cost, halving, ring, send_next
from parallax.collectives.cost import Cost
from parallax.collectives.types import axes as axes_of
from parallax.layout import Layout
from parallax.models import recipe
from parallax.plan import state_bytes
from parallax.plan.families import Config, layer_of
from parallax.plan.jobs import jobs
from parallax.plan.recomputed import layers_in_body, recomputed

BLOCK_TOKENS = 512  # of `cross_entropy.mean`
NORMS, LINEARS = ("attention_norm", "mlp_norm"), ("attention.qkv", "attention.out", "mlp.up")
LAX: Mapping[
    Any, tuple[Callable[..., Any], Callable[[int, int], int]]
] = {  # in whose time, and the bytes of the result
    lax.psum: (halving.all_reduce, lambda nbytes, n: nbytes),
    lax.psum_scatter: (halving.reduce_scatter, lambda nbytes, n: nbytes // n),
    lax.all_gather: (halving.all_gather, lambda nbytes, n: nbytes * n),
}
IDLE = {"mlp.down.bias"}  # of a layer, what its backward pass never needs
# And what it needs no more where everything is kept: what was added is, and so are norms' weights,
# in another shape.
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
        """Of one call. What `jax.lax` moves counts as its result, and takes the time of halving;
        `lax.pmax` that of one hop."""
        if self.collective is lax.pmax:
            return Cost(1, self.nbytes, self.nbytes, 1, self.nbytes, chain=1)
        if self.collective not in LAX:
            return cost.of(self.collective, self.nbytes, self.n, itemsize=self.itemsize)
        like, results = LAX[self.collective]
        return cost.of(like, self.nbytes, self.n, itemsize=self.itemsize)._replace(
            sent=results(self.nbytes, self.n), messages=1
        )

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
        weights: calls of a stage for the gradients of its weights: `backward`, or fewer where they
            have a lane of their own.
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
    """Returns how often what runs.

    Where all stages run the same lanes, idle ones run too, on garbage: each lane counts in all
    ticks in which it runs anywhere.
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
    """Returns all collectives of a step of `decoder.train_step`, those of several calls of one kind
    in one term.

    Args:
        config: the model's sizes.
        layout: which devices share what.
        batch: sequences in the global batch.
        axes: the collective algorithm of each axis, as in `Compute`.
        short: bytes of a number that the model computes in `bfloat16` or `float16` (XLA's CPU
            backend sends 4).
        itemsize: bytes of a parameter, and of a number that is computed in full precision.
        size: with these calls; by default `sizes`, those of the step.
    """
    step = _Step(config, layout, size or sizes(config, layout, batch), axes, short, itemsize)
    parts = (
        *(step.inside_layers(), step.around_context(), step.at_the_ends()),
        *(step.between_stages(), step.over_replicas(), step.over_all()),
    )
    return [
        term
        for part in parts
        for term in part
        if term.times and (term.n > 1 or term.collective is lax.pmax)
    ]


def by_axes(terms: Iterable[Term]) -> dict[tuple[str, ...], int]:
    """Returns the bytes that a device sends in a step, by the axes along which they go."""
    found: dict[tuple[str, ...], int] = {}
    for term in terms:
        found[term.axes] = found.get(term.axes, 0) + term.sent
    return found


class _Step:
    """The terms of one step, by what causes them."""

    def __init__(self, config, layout, size, axes, short, itemsize):
        self.config, self.layout, self.size = config, layout, size
        self.axes = recipe.axes_with_algorithms(layout, recipe.Compute(axes=axes or {}))
        self.shards = recipe.along(self.axes, recipe.SHARDED_OVER).names
        self.again = recomputed(layout)
        self.wide, self.itemsize = max(itemsize, 4), itemsize
        self.compute = itemsize if layout.precision == "full" else short
        self.leaves = state_bytes.leaves(config, layout)
        self.parts = layout.token_shards
        self.stream = (
            self.size.tokens * config.width // self.parts * self.compute
        )  # the residual stream, bytes on a device

    def term(self, what, axes, collective, nbytes, times, itemsize=None) -> Term:
        sizes = self.layout.axes
        axes = tuple(name for name in sizes if name in axes and sizes[name] > 1)
        return Term(
            what,
            axes,
            collective,
            nbytes,
            times,
            math.prod(sizes[name] for name in axes),
            itemsize or self.compute,
        )

    def groups(self, axes) -> list[list[str]]:
        """Returns the axes that each call works along: neighbours that one algorithm moves
        together, one call after the other."""
        used = [name for name in axes if self.layout.axes.get(name, 1) > 1]
        return [
            list(group)
            for _, group in itertools.groupby(used, key=lambda name: self.axes[name].algorithm)
        ]

    def algorithm(self, group):
        return self.axes[group[0]].algorithm if group else ring

    def size_of(self, group) -> int:
        return math.prod(self.layout.axes[name] for name in group)

    def all_reduce(self, what, axes, nbytes, times, itemsize=None) -> Iterator[Term]:
        for group in self.groups(axes):
            yield self.term(what, group, self.algorithm(group).all_reduce, nbytes, times, itemsize)

    def reduce_scatter(self, what, over, nbytes, times, itemsize=None) -> Iterator[Term]:
        """Returns the axes from the first to the last, where they have several algorithms."""
        for group in self.groups(over):
            yield self.term(
                what, group, self.algorithm(group).reduce_scatter, nbytes, times, itemsize
            )
            nbytes //= self.size_of(group)

    def all_gather(self, what, over, nbytes, times, itemsize=None) -> Iterator[Term]:
        """Returns the axes from the last to the first, where they have several algorithms."""
        for group in self.groups(over)[::-1]:
            yield self.term(what, group, self.algorithm(group).all_gather, nbytes, times, itemsize)
            nbytes *= self.size_of(group)

    def inside_layers(self) -> Iterator[Term]:
        """Returns the messages of tensor parallelism: each layer has 4 all-reduces, or 8
        reduce-scatters and all-gathers, and those that are computed again."""
        size, again, stage = self.size, self.again, int(self.again.whole_stage)
        both = 2 * size.layers * (size.forward + size.backward)
        # A stage that runs again runs its forward pass as it stands; of a single layer, the last
        # sum is not needed.
        gathers = both + size.backward * (size.layers * again.gathers + stage * 2 * size.layers)
        sums = both + size.backward * (
            size.layers * again.sums + stage * (2 * size.layers - (size.layers == 1))
        )
        if self.layout.sequence:
            yield from self.halves("tokens gathered", gathers, "sums scattered", sums)
        else:
            yield from self.all_reduce("activations in layers", ("tensor",), self.stream, sums)

    def halves(self, gathered: str, gathers: int, scattered: str, scatters: int) -> Iterator[Term]:
        """Returns all-gathers and reduce-scatters of the residual stream over the tensor axis."""
        yield from self.all_gather(gathered, ("tensor",), self.stream, gathers)
        yield from self.reduce_scatter(scattered, ("tensor",), self.stream * self.parts, scatters)

    def around_context(self) -> Iterator[Term]:
        """Returns keys and values, which go round the ring in each pass, and their gradients, which
        follow them in float32 or wider."""
        size, n = self.size, self.layout.context
        keys = (
            size.tokens * layer_of(self.config).keys // self.layout.tensor
        )  # numbers on a device; of values as many, sent beside them
        again = size.backward * size.layers * (self.again.sums > 0 or self.again.whole_stage)
        passes = size.layers * (size.forward + size.backward)
        # A forward pass that runs again has its first message in common with the backward pass;
        # all, where no loop is left.
        hops = (n - 1) * passes + again * (n - 2 if n > 3 else 0)
        yield self.term("keys and values", ("context",), send_next, keys * self.compute, 2 * hops)
        gradients = 2 * (n - 1) * size.layers * size.backward
        yield self.term(
            "their gradients", ("context",), send_next, keys * self.wide, gradients, self.wide
        )

    def at_the_ends(self) -> Iterator[Term]:
        """Returns the embedding and the head, whose vocabulary is split over stage and tensor."""
        size, both = self.size, ("stage", "tensor")
        ends = size.embeds + size.heads
        if self.layout.sequence:
            yield from self.halves(
                "tokens at the ends", size.leaves + size.heads, "sums at the ends", ends
            )
            yield from self.all_reduce("vocabulary over stages", ("stage",), self.stream, ends)
        else:
            yield from self.all_reduce("vocabulary", both, self.stream, ends)
        blocks = -(-size.tokens // BLOCK_TOKENS)
        part = -(-size.tokens // blocks)
        calls = size.heads * blocks
        yield self.term("maxima of logits", both, lax.pmax, part * self.wide, calls, self.wide)
        yield from self.all_reduce("sums of logits", both, 2 * part * self.wide, calls, self.wide)

    def between_stages(self) -> Iterator[Term]:
        """Returns the pipeline's hops, what enters the first stage and leaves the last, and the
        gradients that all stages share."""
        size, part = self.size, self.stream // self.layout.tensor
        sent = part if self.layout.split_sends else self.stream
        yield self.term("hops between stages", ("stage",), send_next, sent, size.hops)
        if self.layout.split_sends:
            yield from self.all_gather(
                "parts of hops gathered", ("tensor",), part, size.forward + size.backward
            )
        yield from self.all_reduce(
            "ends of the pipeline", ("stage",), self.stream, size.leaves + size.heads
        )
        for leaf in self.leaves:
            if "stage" not in leaf.axes:
                yield from self.gradient("shared gradients", leaf, "stage")
            if self.layout.sequence and "tensor" not in leaf.axes:
                yield from self.gradient("gradients of token parts", leaf, "tensor")

    def shares_sums(self, leaf: state_bytes.Leaf) -> bool:
        """Returns whether a leaf's gradients are scattered to shares in each microbatch, or held
        whole."""
        return self.layout.zero == 2 or (self.layout.zero == 3 and leaf.block)

    def gradient(self, what: str, leaf: state_bytes.Leaf, axis: str) -> Iterator[Term]:
        """Returns the sum of a leaf's gradient, of which ZeRO-2 and (for the layers) ZeRO-3 have
        scattered all but a share already."""
        count = leaf.share if self.shares_sums(leaf) else leaf.elements
        return self.all_reduce(what, (axis,), count * self.wide, 1, self.wide)

    def over_replicas(self) -> Iterator[Term]:
        """Returns the messages of data parallelism and ZeRO: gradients reduced, parameters or
        updates gathered."""
        over, chunks, shares_parameters = (
            axes_of(self.shards),
            self.layout.chunks,
            self.layout.zero == 3,
        )
        for leaf in self.leaves:
            whole, share = leaf.elements * self.wide, leaf.share * self.wide
            if not leaf.split:
                yield from self.all_reduce("gradients", over, whole, 1, self.wide)
                continue
            gathered = self.compute if shares_parameters else self.itemsize
            scatters, gathers, part = (
                self._scatters(leaf) if self.shares_sums(leaf) else 1,
                1,
                whole,
            )
            if leaf.block:
                # ZeRO-3 gathers and scatters each layer by itself, in the loop over the layers.
                layers = self.size.layers if shares_parameters else 1
                scatters *= layers
                if self.shares_sums(leaf):
                    part = whole // chunks // layers
                if shares_parameters:
                    gathers = self._gathers(leaf) * layers
                    share = share // chunks // layers
            yield from self.reduce_scatter("gradients scattered", over, part, scatters, self.wide)
            yield from self.all_gather(
                "parameters gathered", over, share // self.wide * gathered, gathers, gathered
            )
        yield from self.all_reduce("loss", over, self.wide, 1, self.wide)
        for nbytes in [*(leaf.share * self.wide for leaf in self.leaves), self.wide]:
            yield from self.all_reduce("shares between groups", ("replica",), nbytes, 1, self.wide)

    def _gathers(self, leaf: state_bytes.Leaf) -> int:
        """Returns how often ZeRO-3 gathers a leaf of the layers: once forward, and again backward
        where the backward pass needs it."""
        size, name = self.size, leaf.path.removeprefix("blocks.")
        unread = IDLE | ADDED if self.again.keeps == "everything" else IDLE
        again = size.backward * (name not in unread)
        if size.layers <= layers_in_body(self.layout) and self.layout.chunks == 1:
            return 1 + again  # no loop is left: XLA gathers once for all forward passes
        return size.forward + again + size.backward * self.again.whole_stage

    def _scatters(self, leaf: state_bytes.Leaf) -> int:
        """Returns how often ZeRO-2 scatters a leaf's gradients: once a microbatch, in a pipeline in
        each tick of a lane that makes them.

        A lane that does not make them scatters zeros: a ring's, which XLA sends once for all that
        look alike; those of `lax.psum_scatter` it drops.
        """
        size = self.size
        if not self.layout.pipelined:
            return size.backward
        by_lax = any(
            self.algorithm(group).reduce_scatter is lax.psum_scatter
            for group in self.groups(axes_of(self.shards))
        )
        zeros = 0 if by_lax else 1
        made = {
            "wte": size.leaves + size.heads,
            "wpe": size.leaves + zeros,
            "norm.weight": size.heads + zeros,
        }
        return size.weights if leaf.block else made.get(leaf.path, size.heads)

    def over_all(self) -> Iterator[Term]:
        """Returns one sum of squares for each set of axes that split some gradients; whether the
        update is finite, over all of them.

        Both go along the axes in the order of the alphabet, in which a type lists them.
        """
        sets = {}
        for leaf in self.leaves:
            axes = set(leaf.axes) | (set(axes_of(self.shards)) if leaf.split else set())
            sets[frozenset(axes)] = None
        for axes in sets:
            yield from self.all_reduce("squared norms", sorted(axes), self.wide, 1, self.wide)
        yield from self.all_reduce(
            "whether all is finite", sorted(set().union(*sets)), self.wide, 1, self.wide
        )
