"""What a word of a layout stands for: a row of functions, and for `parallax.plan` what they cost. `words` has the tables of them.

A function that wraps takes what it wraps, the axis that it works along and the model's `Placed`; the default, `same`, returns
what it was given. A `Choice` returns one of its keyword arguments, the same one each time, so that a plan can ask a row for a
number without knowing the word: `zero=3` has `parameters=share`, and `share(whole=8, share=1) == 1`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax.typing import DTypeLike

from parallax import pipeline, precision, remat, rules, tensor, zero
from parallax.collectives import Axis, Mover, joined, ring, xla
from parallax.grads import Grad
from parallax.schedule import Schedule
from parallax.typed import PyTree, Specs

Choice = Callable[..., Any]
EVERYWHERE = ("replica", "data", "expert", "context")  # the axes that split a batch
PARTS = ("data", "context")  # the axes that split a batch by sequences and by tokens: over all of them gradients are means


def chooses(name: str) -> Choice:
    """The function that returns its keyword argument `name`."""
    return lambda **choices: choices[name]


whole, share = chooses("whole"), chooses("share")
alone, piped = chooses("alone"), chooses("piped")
full, short = chooses("full"), chooses("short")
everything, products, inputs = chooses("everything"), chooses("products"), chooses("inputs")


def same(wrapped: Any, *_: Any) -> Any:
    """What it was given."""
    return wrapped


class Placed(NamedTuple):
    """Where the parts of a model live.

    Attributes:
        specs: of the model, split over the replicas as far as its layout splits anything over them.
        where: picks the blocks.
        loops: how many first dims of the blocks' arrays are looped over: layers, or chunks and layers.
    """

    specs: Specs
    where: Callable[[Any], Any]
    loops: int

    @property
    def parts(self) -> zero.PartSpecs:
        """The specs of the ends, of a stage and of one layer."""
        return zero.part_specs(self.specs, PARTS, blocks=self.where, loops=self.loops)


class Need(NamedTuple):
    """What a word needs to have something to act on; a layout without it is refused.

    Attributes:
        size: which of the layout's sizes must be more than 1.
        says: what the word does with it.
        instead: the word to take where it is 1.
        why: words that follow the proposal.
        others: sizes of which one does as well.
    """

    size: str
    says: str
    instead: Any
    why: str = ""
    others: tuple[str, ...] = ()


class Stages(NamedTuple):
    """How the blocks are run: on one stage, or on several.

    Attributes:
        grad: `(enter, stage, head, does, placed, trainable)` to the grad arrow over all microbatches.
        value: `(enter, stage, head, does, placed)` to the loss arrow, for evaluation.
        of: chooses `alone` or `piped`.
        cut: `(blocks, chunks) -> blocks`, as the model in the state has them.
        joined: its inverse.
        loops: how many first dims the cut blocks have: layers, or chunks and layers.
        axis: the axis that splits the layers; None: no axis does.
    """

    grad: Callable[..., Grad]
    value: Callable[..., Callable[..., Any]]
    of: Choice
    cut: Callable[..., PyTree] = same
    joined: Callable[..., PyTree] = same
    loops: int = 1
    axis: str | None = None


class Replicas(NamedTuple):
    """What the replicas split among them: a stage of ZeRO.

    Attributes:
        block: wraps a block: gathers its weights.
        unroll: blocks in the loop's body: with two, the second's gather waits for nothing that the first computes.
        each: wraps the grad arrow inside the accumulation, so that it works on each microbatch.
        in_stages: `(axis, placed)` to a pipeline's `scatter`, in `each`'s place.
        ends: wraps the grad arrow outside the accumulation: gathers what is no block, once a step.
        outside: wraps the grad arrow last: joins the replicas.
        optimizer: wraps the optimizer.
        value: wraps the loss arrow of an evaluation.
        parameters: whether they are held `whole` or as a `share`.
        sums: likewise, the sums of the blocks' gradients.
        sums_of_ends: likewise, those of the rest.
        state: likewise, the optimizer's state.
        says: the row in words.
        needs: what it needs to act on.
    """

    says: str
    outside: Callable[[Grad, Axis, Placed], Grad]
    block: Callable[..., Any] = same
    unroll: int = 1
    each: Callable[[Grad, Axis, Placed], Grad] = same
    in_stages: Callable[[Axis, Placed], Callable[[PyTree], PyTree]] = lambda axis, placed: same
    ends: Callable[[Grad, Axis, Placed], Grad] = same
    optimizer: Callable[..., Any] = same
    value: Callable[..., Any] = same
    parameters: Choice = whole
    sums: Choice = whole
    sums_of_ends: Choice = whole
    state: Choice = whole
    needs: tuple[Need, ...] = ()


class Tokens(NamedTuple):
    """Whether the tensor axis splits the residual stream by tokens.

    Attributes:
        joins: how blocks join over the axis: `tensor.joins` or `sequence.joins`.
        grad: wraps the grad arrow: sums what each device found for its own tokens.
        of: chooses `whole` or `share`.
        says: the row in words.
        needs: what it needs to act on.
    """

    joins: Callable[..., tensor.Joins] = tensor.joins
    grad: Callable[[Grad, Axis], Grad] = same
    of: Choice = whole
    says: str = ""
    needs: tuple[Need, ...] = ()


class Contexts(NamedTuple):
    """Whether a context axis splits the tokens of each sequence.

    Attributes:
        joins: `(joins, axis, around)`: from how blocks join over the tensor axis to how they do with their tokens split over the
            context axis; `around(attend, axis)` attends over that.
        checked: `(stage, axis)`: wraps the function that runs blocks: refuses one that sends nothing along the axis.
        of: chooses `whole` or `share`.
        axis: the axis; None: no axis splits them.
    """

    joins: Callable[..., Callable[..., tensor.Joins]] = same
    checked: Callable[..., Callable[..., Any]] = same
    of: Choice = whole
    axis: str | None = None


class Copies(NamedTuple):
    """Whether there are several groups of replicas, each with all that ZeRO splits inside it.

    Attributes:
        grad: `(grad, axis)`: wraps the grad arrow last: the mean over the groups, of shares where a group has scattered.
        of: chooses `whole` (one group) or `share` (several, which share the batch).
    """

    grad: Callable[..., Grad] = same
    of: Choice = whole


class Sends(NamedTuple):
    """How what goes from stage to stage is sent.

    Attributes:
        exchange: of the tensor axis, the pipeline's `exchange`.
        of: chooses `whole` or `share`.
        says: the row in words.
        needs: what it needs to act on.
    """

    exchange: Callable[[Axis], pipeline.Exchange] = lambda tensor: pipeline.WHOLE
    of: Choice = whole
    says: str = ""
    needs: tuple[Need, ...] = ()


class Numbers(NamedTuple):
    """What the model computes in.

    Attributes:
        says: the row in words.
        grad: wraps the grad arrow: casts the parameters, and the gradients back.
        dtype: of products and activations; None: that of the parameters.
        scale: makes the first loss scale, or None where the loss is not scaled.
        of: chooses `full` or `short`.
    """

    says: str
    grad: Callable[[Grad], Grad] = same
    dtype: DTypeLike | None = None
    scale: Callable[[], precision.Scale | None] = lambda: None
    of: Choice = full


class Kept(NamedTuple):
    """What a block keeps for its backward pass, and what it moves again there.

    Attributes:
        block: wraps the block.
        of: chooses `everything`, the results of `products`, or its `inputs`.
        gathered: what was gathered over devices is kept `whole`, or as a `share` alone.
        scores: whether attention's weights are kept: 1 or 0.
        gathers: all-gathers of a layer that its backward pass makes again.
        sums: sums over devices, likewise.
    """

    block: Callable[..., Any] = remat.none
    of: Choice = everything
    gathered: Choice = whole
    scores: int = 1
    gathers: int = 0
    sums: int = 0


class Again(NamedTuple):
    """What the backward pass computes again.

    Attributes:
        says: the row in words.
        kept: by a block.
        gathering: by a block that gathers its weights, which would keep them all where it keeps everything.
        attend: wraps the attention function.
        keep: what a stage of a pipeline keeps for its backward tick, as `pipeline.value_and_grad` takes it.
        in_stages: whether that is its input alone, so that it runs forward again there.
        weights: products with weights that a layer makes again: 1 where it makes all of them.
        scores: likewise, attention's products.
        passes: the share of what a layer makes, between products, that it makes again.
        gathers_alone: whether what was gathered is all that it makes again; something must have been gathered then.
        needs: what it needs to act on.
    """

    says: str
    kept: Kept
    gathering: Kept
    attend: Callable[..., Any] = same
    keep: Callable[..., Any] = pipeline.residuals
    in_stages: bool = False
    weights: int = 0
    scores: int = 0
    passes: float = 0.0
    gathers_alone: bool = False
    needs: tuple[Need, ...] = ()


class Ends(NamedTuple):
    """How often a device runs in a step what stands at the ends of a stage.

    Attributes:
        hops: messages that it sends to other stages.
        embeds: calls of enter.
        leaves: calls of enter's transpose.
    """

    hops: int
    embeds: int
    leaves: int


def in_step(ticks: tuple[int, int, int, int], P: int, M: int, v: int) -> Ends:
    """Where all stages run the same lanes: once in each tick of a lane.

    XLA opens a loop of one tick, and what the last tick would send, nobody reads. It embeds a lone microbatch once.
    """
    forward, backward, _, last = ticks
    return Ends(forward + backward - (last == 1), 1 if M == 1 else forward, backward)


class Order(NamedTuple):
    """The order of a pipeline's jobs. Its functions take P stages, M microbatches and v chunks.

    Attributes:
        table: makes the schedule.
        ticks: those in which anything runs forward, backward and in the head, and how many alike end the schedule; closed forms.
        slots: places for a chunk's residuals on each device, one of them to write to where there is no job; closed form.
        weights: the ticks in which gradients of the stages' weights are made; closed form.
        handed: places for what the input's gradient hands on to that of the weights; closed form.
        arrivals: places for what came from other stages and waits.
        ends: `(ticks, P, M, v)`: how often a device runs what stands at the ends of a stage.
        waited: `(P, M, v, costs)`: how many ticks take the time of F, of I and of W, where the jobs of a chunk have these costs;
            None where a lane takes its time in each tick in which it runs.
        interleaves: whether a stage may have several chunks.
        together: whether all stages run the same lanes in a tick; else each has a job of its own, and the closed forms are of
            what one device runs, and the rest is read from its table.
        needs: what it needs to act on.
    """

    table: Callable[[int, int, int], Schedule]
    ticks: Callable[[int, int, int], tuple[int, int, int, int]]
    slots: Callable[[int, int, int], int]
    weights: Callable[[int, int, int], int]
    handed: Callable[[int, int, int], int] = lambda P, M, v: 0
    arrivals: Callable[[int, int, int], int] = lambda P, M, v: 0
    ends: Callable[[tuple[int, int, int, int], int, int, int], Ends] = in_step
    waited: Callable[[int, int, int, tuple[Any, Any, Any]], tuple[int, ...]] | None = None
    interleaves: bool = True
    together: bool = True
    needs: tuple[Need, ...] = ()

    @property
    def mover(self) -> Mover:
        """Who moves data inside a stage: rings need all devices at once, which a stage with a job of its own has not."""
        return ring if self.together else xla


class Rows(NamedTuple):
    """A row for each word of a layout.

    Attributes:
        stages: how the blocks are run.
        replicas: what the replicas split among them.
        tokens: how the blocks join over the tensor axis.
        contexts: how they do over the context axis.
        copies: how groups of replicas join.
        sends: how what goes from stage to stage is sent.
        numbers: what is computed in which type.
        again: what the backward pass computes again.
        order: of a pipeline's jobs.
    """

    stages: Stages
    replicas: Replicas
    tokens: Tokens
    contexts: Contexts
    copies: Copies
    sends: Sends
    numbers: Numbers
    again: Again
    order: Order


@runtime_checkable
class Sized(Protocol):
    """The sizes of a layout, as `words.read` takes them."""

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes."""
        ...

    @property
    def stage(self) -> int:
        """P stages."""
        ...

    @property
    def microbatches(self) -> int:
        """M microbatches."""
        ...

    @property
    def chunks(self) -> int:
        """v chunks a stage."""
        ...


class Functions(NamedTuple):
    """A layout as functions.

    Attributes:
        axes: each axis, with who moves data along it.
        stages: how the blocks are run.
        replicas: what the replicas split among them.
        tokens: how the blocks join over the tensor axis.
        contexts: how they do over the context axis.
        copies: how groups of replicas join.
        sends: how what goes from stage to stage is sent.
        numbers: what is computed in which type.
        again: what the backward pass computes again.
        kept: what a block keeps for it.
        order: of a pipeline's jobs.
        table: makes the pipeline's schedule.
        microbatches: M.
        chunks: v.
    """

    axes: Mapping[str, Axis]
    stages: Stages
    replicas: Replicas
    tokens: Tokens
    contexts: Contexts
    copies: Copies
    sends: Sends
    numbers: Numbers
    again: Again
    kept: Kept
    order: Order
    table: Callable[[], Schedule]
    microbatches: int
    chunks: int

    @property
    def parts(self) -> Axis:
        """The axes whose devices have parts of a group's batch, by sequences and by tokens: ZeRO splits over all of them."""
        return self._over(PARTS)

    @property
    def everywhere(self) -> Axis:
        """`parts`, and the groups of replicas where there are several: gradients are means over all of them."""
        return self._over(EVERYWHERE)

    @property
    def sequences(self) -> Axis:
        """The axes that split the batch by sequences."""
        return self._over(("replica", "data", "expert"))

    @property
    def reduced(self) -> Axis:
        """`parts` and the axis of experts: a gradient is summed over those of them along which its parameter is the same."""
        return self._over(("data", "expert", "context"))

    def _over(self, names: Sequence[str]) -> Axis:
        """Those of these axes that there are, as one; a single one as it is."""
        found = [self.axes[name] for name in names if name in self.axes]
        return found[0] if len(found) == 1 else joined(*found)

    def joins(self, around: Callable[..., Any]) -> Callable[..., tensor.Joins]:
        """How the blocks join. Where their tokens are split over a context axis, `around(attend, axis)` attends over that."""
        return self.contexts.joins(self.tokens.joins, self.axes.get("context"), around)

    def checked(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        """`stage`, refused where it sends nothing along an axis that splits its tokens."""
        return self.contexts.checked(stage, self.axes.get("context"))

    def block(self, block: Callable[..., Any], placed: Placed) -> Callable[..., Any]:
        """`block`, its weights gathered and what it does not keep computed again."""
        return self.kept.block(self.replicas.block(block, self.parts, placed))

    def grad(
        self,
        enter: Callable[..., Any],
        stage: Callable[..., Any],
        head: Callable[..., Any],
        placed: Placed,
        trainable: PyTree = rules.is_inexact,
    ) -> Grad:
        """The grad arrow of all microbatches, local to the replicas; the functions are those of `pipeline.value_and_grad`."""
        return self.stages.grad(enter, stage, head, self, placed, trainable)

    def outside(self, grad: Grad, placed: Placed) -> Grad:
        """`grad` joined over tensor (where tokens are split), data, context and replica, computed in the layout's type."""
        grad = self.tokens.grad(grad, self.axes["tensor"])
        grad = self.replicas.ends(grad, self.parts, placed)
        grad = self.numbers.grad(grad)
        return self.copies.grad(self.replicas.outside(grad, self.reduced, placed), self.axes.get("replica"))

    def optimizer(self, optimizer: Any, placed: Placed) -> Any:
        """`optimizer`, on shares where the replicas split its state."""
        return self.replicas.optimizer(optimizer, self.parts, placed)

    def value(
        self, enter: Callable[..., Any], stage: Callable[..., Any], head: Callable[..., Any], placed: Placed
    ) -> Callable[..., Any]:
        """The loss arrow, local to the replicas, for evaluation."""
        return self.replicas.value(self.stages.value(enter, stage, head, self, placed), self.parts, placed)
