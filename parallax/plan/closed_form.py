"""What the train step of a GPT-2 or a Llama will need and take under a layout, before it runs, on
any number of devices, none of them at hand.

    print(plan.plan(gpt2.XL, Layout(data=8, tensor=8, zero=1), hardware.A100, batch=512))
    print(plan.compared(plan.compare(planned, compiled)))

The bytes of state and of traffic are exact: the tests hold them against compiled programs. The
memory of activations comes from the trace of the step (`tracing`). The time adds up what products,
passes over memory and messages take, one after another: overlap makes it less.

Legend: N parameters, L layers, D width, T tokens, V rows of the vocabulary, P stages, t tensor
devices, b sequences of a microbatch.

Sources: Narayanan et al. (arXiv 2104.04473), section 3, for the model's operations; Korthikanti et
al. (arXiv 2205.05198).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import optax

from parallax import context
from parallax.collectives import AxisLike
from parallax.hardware import Hardware
from parallax.layout import Layout
from parallax.models import flash, recipe
from parallax.plan import algorithms, decoders, residuals, traffic
from parallax.plan.algorithms import Chosen
from parallax.plan.decoders import ADAMW
from parallax.plan.families import Config, family_of, known, layer_of
from parallax.plan.jobs import in_lockstep, jobs, timed_ticks
from parallax.plan.liveness import Held
from parallax.plan.recomputed import recomputed
from parallax.plan.residuals import FLOAT
from parallax.plan.state_bytes import batch_bytes, leaves, optimizer_bytes, parameter_bytes
from parallax.plan.traffic import Sizes, Term
from parallax.plan.units import Number, quantity

LARGEST = 4  # temporaries that a plan names
# Over what a layer keeps, in its forward or its backward pass, each counted once: written, read,
# and twice in between.
PASSES = 4
# Over a parameter's float32 numbers: AdamW reads 4 and writes 3, and a skipped step chooses
# between 3.
UPDATE_PASSES = 10


class Memory(NamedTuple):
    """Bytes on a device.

    Attributes:
        parameters: of the model, as shares where the replicas split it.
        optimizer: of its state.
        inputs: token windows, the step's number, the loss scale.
        temporaries: of all else at the fullest moment, by the trace.
        held: what the temporaries are, the largest first.
    """

    parameters: int
    optimizer: int
    inputs: int
    temporaries: int
    held: tuple[Held, ...] = ()

    @property
    def arguments(self) -> int:
        """Bytes that the compiled step takes."""
        return self.parameters + self.optimizer + self.inputs

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment of a step."""
        return self.arguments + self.temporaries

    @property
    def at_peak(self) -> dict[str, int]:
        """The bytes by kind at the fullest moment, which add up to `peak`. Of the temporaries the
        four largest are named."""
        named: dict[str, int] = {}
        others = self.temporaries
        for buffer in self.held[:LARGEST]:
            file = "/".join(buffer.line.split("/")[-2:]).partition(":")[0]
            kind = f"{buffer.what}, {file}"
            size = min(buffer.bytes, others)  # some of them may live on the chip
            named[kind] = named.get(kind, 0) + size
            others -= size
        kinds = {
            "parameters": self.parameters,
            "optimizer state": self.optimizer,
            "batch": self.inputs,
            **named,
            "other temporaries": others,
        }
        return {kind: size for kind, size in kinds.items() if size}


class Work(NamedTuple):
    """Returns the floating-point operations.

    Attributes:
        model: of the whole step, as papers count them: 6 for each parameter in a product and 12 L D
            T for attention, a token.
        device: that one device does, with what is computed again, and on garbage where a stage has
            no job.
    """

    model: Number
    device: Number


class Seconds(NamedTuple):
    """Seconds of a step, one thing after another.

    Attributes:
        products: matrix products.
        passes: over memory, between products.
        messages: between devices.
        update: the optimizer's passes over parameters, gradients and its state.
        fresh: memory that the system hands out anew in each step.
    """

    products: float
    passes: float
    messages: float
    update: float
    fresh: float = 0.0

    @property
    def total(self) -> Number:
        """Seconds of all together."""
        return sum(self)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout's needs on each device, and its time. `str` of it is a table.

    Attributes:
        config: the model's sizes.
        layout: which devices share what.
        hardware: one of the devices.
        batch: sequences in the global batch.
        work: floating-point operations of a step.
        traffic: the collectives of a step.
        seconds: of a step.
        along: those of its messages, by axes.
        bubble: the share of ticks in which a stage has no job, from 0 to 1.
        optimizer: one that acts element by element.
        axes: the collective algorithms, as in `Compute`.
        algorithms: the fastest along each axis where `jax.lax` moves the data.
        attention_kernel: whether attention runs in a kernel that keeps no scores.
    """

    config: Config
    layout: Layout
    hardware: Hardware
    batch: int
    work: Work
    traffic: tuple[Term, ...]
    seconds: Seconds
    along: Mapping[tuple[str, ...], Number]
    bubble: float
    optimizer: optax.GradientTransformation
    axes: Mapping[str, AxisLike] | None = None
    algorithms: tuple[Chosen, ...] = ()
    attention_kernel: bool = False

    @functools.cached_property
    def memory(self) -> Memory:
        """Bytes on a device. The step is traced for them, which takes some seconds, once."""
        return memory(
            self.config,
            self.layout,
            self.hardware,
            self.batch,
            self.optimizer,
            axes=self.axes,
            attention_kernel=self.attention_kernel,
        )

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        return self.memory.peak <= self.hardware.memory

    @property
    def share_of_peak(self) -> Number:
        """The model's operations over the time and the devices' rate, from 0 to 1: model FLOPs
        utilisation."""
        return self.work.model / (
            self.seconds.total * self.layout.devices * _rate(self.hardware, self.layout)
        )

    @property
    def overlapped(self) -> Number:
        """Seconds of a step whose messages over the replicas all run beside its work."""
        over_replicas = {"replica", "data"}
        beside = sum(taken for axes, taken in self.along.items() if over_replicas.issuperset(axes))
        return max(self.seconds.total - beside, beside)

    @property
    def sent(self) -> dict[tuple[str, ...], int]:
        """Bytes that a device sends in a step, by axes."""
        return traffic.by_axes(self.traffic)

    def __str__(self) -> str:
        return table(self)


def plan(
    config: Config,
    layout: Layout,
    hardware: Hardware,
    *,
    batch: int,
    optimizer: optax.GradientTransformation = ADAMW,
    axes: Mapping[str, AxisLike] | None = None,
    attention_kernel: bool | None = None,
) -> Plan:
    """Returns the plan of `decoder.train_step`, with float32 parameters.

    Args:
        config: the model's sizes.
        layout: which devices share what.
        hardware: a device, such as `hardware.A100`.
        batch: sequences in the global batch.
        optimizer: one that acts element by element.
        axes: the collective algorithms, as in `Compute`: those that `cost` has a formula for. Along
            the others `jax.lax` moves the data, which takes the time of the fastest algorithm on
            the chip's network.
        attention_kernel: whether `Compute(attention=...)` is a kernel that keeps no scores; None:
            as the recipe's own, which is one on TPUs.

    Raises:
        ValueError: the layout does not fit the model or the batch; the message proposes the nearest
            that does.
    """
    check(config, layout, batch)
    kernel = has_kernel(config, layout, hardware, attention_kernel)
    terms = traffic.terms(config, layout, batch, axes=axes, short=hardware.short)
    takes = waited(config, layout, batch, hardware, kernel)
    awaited = traffic.terms(config, layout, batch, axes=axes, short=hardware.short, size=takes)
    fastest = algorithms.chosen(awaited, layout, hardware)
    along = algorithms.messages(awaited, layout, hardware, fastest)
    work = Work(model_flops(config, batch), device_flops(config, layout, batch))
    made = Plan(
        config=config,
        layout=layout,
        hardware=hardware,
        batch=batch,
        work=work,
        traffic=tuple(terms),
        seconds=Seconds(
            products=_flops(config, layout, takes)
            / (_rate(hardware, layout) * hardware.efficiency),
            passes=_passes(config, layout, batch, hardware, takes, kernel) / hardware.bandwidth,
            messages=sum(along.values()),
            update=UPDATE_PASSES * FLOAT * _updated(config, layout) / hardware.bandwidth,
        ),
        along=along,
        bubble=1
        - 3
        * layout.microbatches
        * layout.chunks
        / (takes.forward + takes.backward + takes.weights),
        optimizer=optimizer,
        axes=axes,
        algorithms=fastest,
        attention_kernel=kernel,
    )
    if not hardware.fresh:
        return made
    fresh = hardware.fresh * made.memory.temporaries
    return dataclasses.replace(made, seconds=made.seconds._replace(fresh=fresh))


def has_kernel(
    config: Config, layout: Layout, hardware: Hardware, asked: bool | None = None
) -> bool:
    """Returns whether attention runs in a kernel that keeps no scores: as asked, or as the recipe
    does on TPUs."""
    if layout.context > 1:
        return False
    if asked is None:
        return hardware.platform == "tpu" and config.context % 128 == 0
    return asked


def waited(config: Config, layout: Layout, batch: int, hardware: Hardware, kernel: bool) -> Sizes:
    """Returns the sizes of a step with the calls whose time it takes.

    Where each stage has its own job in a tick, all wait for the dearest: a fold over the table,
    with the seconds of the products and of the passes over memory of F, I and W.
    """
    size = traffic.sizes(config, layout, batch)
    if in_lockstep(layout):
        return size
    none = size._replace(forward=0, backward=0, weights=0, heads=0)
    rate = _rate(hardware, layout) * hardware.efficiency

    def seconds(**calls: int) -> Number:
        once = none._replace(**calls)
        return (
            _flops(config, layout, once) / rate
            + _passes(config, layout, batch, hardware, once, kernel) / hardware.bandwidth
        )

    costs = seconds(forward=1), seconds(backward=1), seconds(weights=1)
    forward, backward, weights = timed_ticks(layout, costs)
    return size._replace(forward=forward, backward=backward, weights=weights)


def check(config: Config, layout: Layout, batch: int, devices: int | None = None) -> None:
    """Refuses with a `ValueError` a layout that does not fit the model, the batch or the number of
    devices; or `known` does."""
    known(config)
    sizes = config.sizes | {"batch": batch}
    if devices is not None:
        sizes |= {"devices": devices}
    layout.check(sizes)
    if not counts(layout):
        raise ValueError(
            f"plan: {layout} computes or gathers again in the ticks of the input's gradient, which "
            "its schedule is there to shorten, and what then waits for the weights' gradients is "
            "not counted. Use remat=none without ZeRO-3, or another schedule."
        )


def counts(layout: Layout) -> bool:
    """Returns whether plan counts a layout: one whose schedule makes the gradients of weights apart
    must compute nothing again."""
    again = recomputed(layout)
    return not jobs(layout).deferred or not (again.passes or again.gathers)


def memory(
    config: Config,
    layout: Layout,
    hardware: Hardware,
    batch: int,
    optimizer: optax.GradientTransformation = ADAMW,
    *,
    axes: Mapping[str, AxisLike] | None = None,
    attention_kernel: bool | None = None,
) -> Memory:
    """Returns the bytes on each device, of which the trace of the step tells the temporaries;
    arguments are those of `plan`."""
    known(config)
    compute = recipe.Compute(axes=axes or {})
    if has_kernel(config, layout, hardware, attention_kernel):
        attention = flash.attention if hardware.platform == "tpu" else context.blockwise
        compute = dataclasses.replace(compute, attention=attention)
    # The plan is of float32 parameters, whatever types the caller's JAX promotes to.
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(False):
        found = decoders.traced(
            *(family_of(config), config, layout, hardware),
            batch=batch,
            optimizer=optimizer,
            compute=compute,
        )
    return Memory(
        parameters=parameter_bytes(config, layout),
        optimizer=optimizer_bytes(config, layout, optimizer),
        inputs=batch_bytes(config, layout, batch),
        temporaries=found.temporaries,
        held=tuple(found.at_peak),
    )


def model_flops(config: Config, batch: int) -> Number:
    """Returns the floating-point operations of a whole step of `batch` sequences: of a GPT-2
    72 B L T D^2 (1 + T / 6D + V / 12LD).

    They are 6 for each weight that multiplies a token, and 12 L H K T for attention.
    """
    known(config)
    L, D, T, V = config.layers, config.width, config.context, config.rows
    layer = layer_of(config)
    return batch * T * (6 * (L * layer.weights + V * D) + 12 * L * layer.queries * T)


def device_flops(config: Config, layout: Layout, batch: int) -> Number:
    """Returns the floating-point operations of one device in a step, `batch` sequences in all.

    Each lane counts in all ticks in which it runs on the device, on garbage too, and what is
    computed again counts again.
    """
    return _flops(config, layout, traffic.sizes(config, layout, batch))


def _flops(config: Config, layout: Layout, size: Sizes) -> Number:
    D, T, t = config.width, config.context, layout.tensor
    n = layout.context
    of_pairs = (2 * n + 1) / (4 * n) if n > 1 else 1  # zigzag leaves out the keys after the query
    layer = layer_of(config)
    # A layer's forward pass.
    weights = 2 * layer.weights * size.tokens / t
    scores = of_pairs * 4 * layer.queries * T * size.tokens / t
    forward = weights + scores
    recompute = recomputed(layout)
    share_again = recompute.products(size.layers, layer.last / layer.weights)
    again = share_again * weights + recompute.scores * scores
    head = 6 * D * config.rows * size.tokens / (layout.stage * t)
    backward = size.backward * (2 * forward - weights + again) + size.weights * weights
    return size.layers * (size.forward * forward + backward) + size.heads * head


def _rate(hardware: Hardware, layout: Layout) -> Number:
    return hardware.full_rate if layout.precision == "full" else hardware.rate


def _passes(
    config: Config,
    layout: Layout,
    batch: int,
    hardware: Hardware,
    size: Sizes,
    kernel: bool,
) -> Number:
    """Returns the bytes between products and memory: what a layer makes, forward, backward, and
    where it is made again."""
    # What is computed again, attention's scores among it, is made whatever is kept.
    everything_kept = dataclasses.replace(layout, remat="none")
    kept = residuals.everything(config, everything_kept, batch, hardware.short, kernel=kernel)
    again = recomputed(layout)
    passes = PASSES * kept * size.layers * (size.forward + size.backward * (1 + again.passes))
    if again.whole_stage or not layout.pipelined:
        return passes
    slots = (
        2
        * residuals.layer(config, layout, batch, hardware.short, kernel=kernel)
        * size.layers
        * (size.forward + size.backward)
    )
    if jobs(layout).deferred:
        handed = residuals.handed(config, layout, batch, hardware.short)
        slots += 2 * size.layers * (size.backward * handed + size.weights * (handed + kept))
    return passes + slots  # into the slots, and out of them


def _updated(config: Config, layout: Layout) -> int:
    return sum(leaf.share for leaf in leaves(config, layout))


# As text


def _unsplit(plan: Plan) -> list[str]:
    """Returns a line where ZeRO leaves parameters whole, since none of their dims divides."""
    n = plan.layout.optimizer_shards
    of_device = leaves(plan.config, plan.layout)
    whole = sum(leaf.elements for leaf in of_device if not leaf.split)
    share = whole / sum(leaf.elements for leaf in of_device)
    if n == 1 or share < 0.01:
        return []
    return [f"ZeRO leaves {share:.0%} of the parameters whole: none of their dims divides by {n}"]


def _of_memory(memory: Memory) -> list[str]:
    """Returns a line for each sum, and under the temporaries the largest of them."""
    sums = {
        "parameters": memory.parameters,
        "optimizer state": memory.optimizer,
        "batch": memory.inputs,
        "temporaries": memory.temporaries,
    }
    lines = [f"  {name:<20} {quantity(size, 'B'):>9}" for name, size in sums.items()]
    for kind, size in memory.at_peak.items():
        if kind not in (*sums, "other temporaries"):
            lines.append(f"    {quantity(size, 'B'):>9}  {kind}")
    return [*lines, f"  {'peak':<20} {quantity(memory.peak, 'B'):>9}"]


def table(plan: Plan) -> str:
    """Returns the plan, a line for each number."""
    layout = plan.layout
    lines = [
        f"{plan.config.parameters:,} parameters, {layout.devices} x {plan.hardware.name}: "
        f"{str(layout) or 'one device'}",
        f"batch {plan.batch} x {plan.config.context} tokens, {layout.sequences(plan.batch)} "
        "sequences in a device's microbatch",
        *_unsplit(plan),
        "",
        "on each device             bytes",
        *_of_memory(plan.memory),
        f"  of                   {quantity(plan.hardware.memory, 'B'):>9}  "
        f"{'fits' if plan.fits else 'does not fit'}",
        "",
        "sent along                 bytes    seconds",
        *(
            f"  {' x '.join(axes) or 'no axis':<20} {quantity(size, 'B'):>9}  "
            f"{plan.along.get(axes, 0.0):>9.3g}"
            for axes, size in plan.sent.items()
            if axes
        ),
        "",
        f"{quantity(plan.work.model, 'FLOP')} of the model, {quantity(plan.work.device, 'FLOP')} "
        f"on each device; bubble {plan.bubble:.1%}",
        f"{plan.seconds.total:.4g} s a step: products {plan.seconds.products:.3g}, memory "
        f"{plan.seconds.passes:.3g}, messages {plan.seconds.messages:.3g}, update "
        f"{plan.seconds.update + plan.seconds.fresh:.3g}; {plan.share_of_peak:.1%} of peak",
        f"{plan.overlapped:.4g} s if all messages over the replicas run beside the work",
    ]
    return "\n".join(lines)
