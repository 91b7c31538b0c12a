"""Predicts the memory, messages and time of the train step of a GPT-2 or a Llama under a layout.
The step does not run, and no device is needed.

    planned = plan.plan(gpt2.XL, Layout(data=8, tensor=8, zero=1), hardware.A100, batch=512)
    print(planned)
    print(plan.compared(plan.compare(planned, compiled)))  # `compiled`: the step, compiled

The bytes of state and of traffic are exact: the tests compare them with compiled programs. The
memory of activations comes from the trace of the step (`tracing`). The time is the sum of the times
of matrix products, passes over memory and messages. Overlap would shorten this time.

Legend: L layers, D width, T tokens, V rows of the vocabulary, t tensor devices. A *product* is a
matmul. A `Sizes` has a microbatch's sizes on a device, and how often a step calls each part of the
model. `forward`, `backward` and `weights` count a stage's calls for its output (F), its input's
gradient (I) and its weights' gradients (W). `heads` counts calls of the head, the function that
computes the loss. A *share* is the part of a leaf (one array of the model) that ZeRO leaves on a
device. `known` refuses a model without closed forms. `recomputed` tells which arrays a layer keeps,
and which operations the backward pass runs again. `kernel` says whether attention runs in a kernel
that keeps no scores. `hardware.short` is the bytes that the hardware uses for a number of a 16-bit
type: 2, or 4 if its compiler widens such numbers.

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
from parallax.models import flash, gpt2, recipe
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
# How often a layer's forward or backward call goes over the arrays between its matmuls: it writes
# them, reads them, and goes over them twice in between.
PASSES = 4
# How often an update goes over a parameter's float32 numbers: AdamW reads 4 and writes 3, and the
# choice between new and old values, which skips a step, has 3 more.
UPDATE_PASSES = 10


class Memory(NamedTuple):
    """Bytes on a device.

    Attributes:
        parameters: bytes of the weights; with ZeRO-3, bytes of the device's shares of the weights.
        optimizer: bytes of the optimizer's state.
        inputs: bytes of the batch's token sequences, the step's number and the loss scale.
        temporaries: bytes of all other arrays at the moment when these arrays have the most bytes.
            A trace of the step gives this number.
        held: the arrays of `temporaries` at this moment, the largest first.
    """

    parameters: int
    optimizer: int
    inputs: int
    temporaries: int
    held: tuple[Held, ...] = ()

    @property
    def arguments(self) -> int:
        """Bytes of the compiled step's arguments."""
        return self.parameters + self.optimizer + self.inputs

    @property
    def peak(self) -> int:
        """The most bytes of memory that a device uses at any moment of a step."""
        return self.arguments + self.temporaries

    @property
    def at_peak(self) -> dict[str, int]:
        """The bytes of each kind of array at the moment of the peak. The sum over all kinds is
        `peak`. The four largest temporaries are named after their operation and source file, and
        temporaries with the same name are one kind. All others are "other temporaries"."""
        named: dict[str, int] = {}
        others = self.temporaries
        for buffer in self.held[:LARGEST]:
            # "folder/file.py" of a line such as "/home/folder/file.py:12"
            file = "/".join(buffer.line.split("/")[-2:]).partition(":")[0]
            kind = f"{buffer.what}, {file}"
            # `held` may include bytes in on-chip memory (VMEM), which `temporaries`, the bytes of
            # the device's main memory, leaves out. So a buffer counts at most the bytes left.
            size = min(buffer.bytes, others)
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
    """Floating-point operations of a step.

    Attributes:
        model: operations of the whole step, as papers count them. A token needs 6 operations for
            each parameter that a matmul uses, and 12 x layers x width x tokens of a sequence for
            attention.
        device: operations of one device. Operations that run again count too, and so do operations
            that an idle stage runs on garbage.
    """

    model: Number
    device: Number


class Seconds(NamedTuple):
    """Seconds of a step, without overlap.

    Attributes:
        products: seconds of the matmuls.
        passes: seconds of the passes over memory between matmuls.
        messages: seconds of the messages between devices.
        update: seconds of the optimizer's passes over parameters, gradients and its state.
        fresh: seconds in which the operating system provides memory for the temporaries. On CPUs
            the operating system does this again in each step.
    """

    products: float
    passes: float
    messages: float
    update: float
    fresh: float = 0.0

    @property
    def total(self) -> Number:
        """Seconds of a whole step."""
        return sum(self)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory, work, messages and time of a train step under a layout. `str(plan)` is a table.

    Attributes:
        config: the model's sizes.
        layout: how the model and the batch are split over devices.
        hardware: the figures of one device, such as `hardware.A100`.
        batch: sequences in the global batch.
        work: floating-point operations of a step.
        traffic: the collectives of a step.
        seconds: seconds of a step.
        along: for each set of axes, seconds of the messages along these axes in a step.
        bubble: the share of ticks in which a stage has no job, from 0 to 1.
        optimizer: an optimizer that acts element by element.
        axes: the collective algorithm of each axis, as in `Compute`.
        algorithms: for each axis along which `jax.lax` moves the data, the algorithm that the plan
            assumes for `jax.lax`: the fastest on the simulated network.
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
        """Bytes on a device. The first use traces the step, which takes some seconds."""
        # Calls the function `memory` of this module, not this property.
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
        """Whether a device has enough memory."""
        return self.memory.peak <= self.hardware.memory

    @property
    def share_of_peak(self) -> Number:
        """Model FLOPs utilisation, from 0 to 1: the model's operations, divided by the operations
        that all devices could do at their peak rate in the time of a step."""
        return self.work.model / (
            self.seconds.total * self.layout.devices * _rate(self.hardware, self.layout)
        )

    @property
    def overlapped(self) -> Number:
        """Seconds of a step if all messages over the axes `replica` and `data` overlap the rest of
        the step."""
        replica_axes = {"replica", "data"}
        hidden = sum(taken for axes, taken in self.along.items() if replica_axes.issuperset(axes))
        # The longer of the two: the rest of the step, or these messages.
        return max(self.seconds.total - hidden, hidden)

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
        layout: how the model and the batch are split over devices.
        hardware: the figures of one device, such as `hardware.A100`.
        batch: sequences in the global batch.
        optimizer: an optimizer that acts element by element.
        axes: the collective algorithm of each axis, as in `Compute`. `parallax.collectives.cost`
            must have a formula for each algorithm. Along all other axes `jax.lax` moves the data;
            the plan assumes the fastest algorithm on the simulated network of `hardware`.
        attention_kernel: whether `Compute(attention=...)` is a kernel that keeps no scores. None
            stands for the choice that `decoder.train_step` makes by itself (see `has_kernel`): such
            a kernel on TPUs and GPUs, for the shapes and the precision that the kernel supports.

    Raises:
        ValueError: the layout does not fit the model or the batch; the message proposes the nearest
            layout that does.
    """
    check(config, layout, batch)
    hardware = hardware.for_devices(layout.devices)
    kernel = has_kernel(config, layout, hardware, attention_kernel)
    # `terms` has all messages of a device, for their bytes. `timed` and `timed_terms` are for the
    # time, and count only the calls for which all stages wait: a tick lasts as long as its most
    # expensive job. In lockstep all calls count in both.
    terms = traffic.terms(config, layout, batch, axes=axes, short=hardware.short)
    timed = waited(config, layout, batch, hardware, kernel)
    timed_terms = traffic.terms(config, layout, batch, axes=axes, short=hardware.short, size=timed)
    fastest = algorithms.chosen(timed_terms, layout, hardware)
    along = algorithms.messages(timed_terms, layout, hardware, fastest)
    work = Work(model_flops(config, batch), device_flops(config, layout, batch))
    planned = Plan(
        config=config,
        layout=layout,
        hardware=hardware,
        batch=batch,
        work=work,
        traffic=tuple(terms),
        seconds=Seconds(
            products=_flops(config, layout, timed)
            / (_rate(hardware, layout) * hardware.efficiency),
            passes=_passes(config, layout, batch, hardware, timed, kernel) / hardware.bandwidth,
            messages=sum(along.values()),
            # `FLOAT` is the bytes of a float32 number.
            update=UPDATE_PASSES * FLOAT * _updated(config, layout) / hardware.bandwidth,
        ),
        along=along,
        # `timed` counts the ticks of F, I and W, also those in which a stage is idle. A device
        # works in three of them for each microbatch and chunk.
        bubble=1
        - 3
        * layout.microbatches
        * layout.chunks
        / (timed.forward + timed.backward + timed.weights),
        optimizer=optimizer,
        axes=axes,
        algorithms=fastest,
        attention_kernel=kernel,
    )
    if not hardware.fresh:  # accelerators: the plan then traces nothing until `memory` is read
        return planned
    # On a CPU the operating system provides the memory of the temporaries anew in each step, in
    # `hardware.fresh` seconds for each byte.
    fresh = hardware.fresh * planned.memory.temporaries
    return dataclasses.replace(planned, seconds=planned.seconds._replace(fresh=fresh))


def has_kernel(
    config: Config, layout: Layout, hardware: Hardware, asked: bool | None = None
) -> bool:
    """Returns whether attention runs in a kernel that keeps no scores.

    The answer is `asked`, the caller's choice. If `asked` is None, the answer is the default choice
    of the train step, which takes such a kernel on TPUs and GPUs, for the shapes and the precision
    that the kernel supports. Ring attention over a context axis uses no such kernel, and neither
    does a GPT-2 with dropout of its attention weights: for both the answer is False, even if
    `asked` is True.
    """
    # Ring attention, or GPT-2's own attention with dropout, runs instead.
    if layout.context > 1 or (isinstance(config, gpt2.Config) and config.attention_dropout):
        return False
    if asked is not None:
        return asked
    if hardware.platform == "tpu":
        # The kernel takes whole blocks of tokens. The last of `BLOCKS` is the smallest.
        return config.context % flash.BLOCKS[-1] == 0
    # cuDNN's kernel, which needs 16 bits.
    is_recent = hardware.platform == "cuda" and hardware.name not in decoders.BEFORE_AMPERE
    head_width = layer_of(config).queries // config.heads
    fits = flash.fits_cudnn(config.context, head_width)
    return is_recent and layout.precision != "full" and fits


def waited(config: Config, layout: Layout, batch: int, hardware: Hardware, kernel: bool) -> Sizes:
    """Returns the `Sizes` of a step, where `forward`, `backward` and `weights` count only the jobs
    that decide the time of the step.

    In lockstep all stages run the same kinds of job in a tick. The time of a tick is then the sum
    over these jobs, so every job counts. Without lockstep each stage has its own job in a tick, and
    all stages wait for the most expensive job of the tick, so only that job counts. A job costs the
    seconds of its matmuls and of its passes over memory. All other fields of the result, such as
    `heads`, are those of `traffic.sizes`.
    """
    size = traffic.sizes(config, layout, batch)
    if in_lockstep(layout):
        return size
    no_calls = size._replace(forward=0, backward=0, weights=0, heads=0)
    rate = _rate(hardware, layout) * hardware.efficiency

    def seconds(**calls: int) -> Number:
        """Returns the seconds of the given calls alone, such as `forward=1`: the seconds of their
        matmuls at `rate`, plus those of their passes over memory."""
        only_these = no_calls._replace(**calls)
        return (
            _flops(config, layout, only_these) / rate
            + _passes(config, layout, batch, hardware, only_these, kernel) / hardware.bandwidth
        )

    costs = seconds(forward=1), seconds(backward=1), seconds(weights=1)
    forward, backward, weights = timed_ticks(layout, costs)
    return size._replace(forward=forward, backward=backward, weights=weights)


def check(config: Config, layout: Layout, batch: int, devices: int | None = None) -> None:
    """Raises `ValueError` if a layout does not fit the model, the batch or the number of devices.
    Also raises `ValueError` if `plan` has no closed forms for the model or the layout."""
    known(config)
    sizes = config.sizes | {"batch": batch}  # the model's sizes by name, such as "heads"
    if devices is not None:
        sizes |= {"devices": devices}
    layout.check(sizes)
    if not counts(layout):  # `plan` has no closed forms for the layout
        raise ValueError(
            f"plan: {layout} computes or gathers arrays again in the ticks that compute the "
            "gradient of a stage's input. These arrays then wait for the weights' gradients, and "
            "plan has no formula for them. Use both remat=none and zero=2 or less, or use another "
            "schedule."
        )


def counts(layout: Layout) -> bool:
    """Returns whether `plan` has closed forms for a layout. There are none if two things hold: the
    schedule defers the weights' gradients, and the backward pass computes activations again or
    gathers arrays a second time."""
    again = recomputed(layout)
    # `deferred` counts the slots of arrays that wait for the weights' gradients.
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
    """Returns the bytes on each device. The temporaries come from a trace of the step, all other
    bytes from closed forms. The arguments mean the same as in `plan`."""
    known(config)
    compute = recipe.Compute(axes=axes or {})
    by_default = has_kernel(config, layout, hardware)
    # The kernel for GPUs needs a GPU, and the family's kernel for TPUs needs a fitting number of
    # tokens. `context.blockwise` stands for other kernels here: it keeps no scores either, so it
    # needs the same memory.
    if has_kernel(config, layout, hardware, attention_kernel):
        is_flash = hardware.platform == "tpu" and by_default
        attention = flash.attention if is_flash else context.blockwise
        compute = dataclasses.replace(compute, attention=attention)
    # The caller wants no kernel, and `traced` would choose one, as the train step does.
    elif by_default:
        compute = dataclasses.replace(compute, attention=family_of(config).attention)
    # The plan has float32 parameters, also if the caller has set other promotion rules or 64 bits
    # in JAX.
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
    """Returns the floating-point operations of a whole step of `batch` sequences.

    A token needs 6 operations for each weight that multiplies it, and 12 L H K T operations for
    attention, with L layers, T tokens in a sequence and H heads of width K. For a GPT-2 with B
    sequences, width D and a vocabulary of V, the sum over all tokens is 72 B L T D^2 (1 + T / 6D +
    V / 12LD).
    """
    known(config)
    L, D, T, V = config.layers, config.width, config.context, config.rows
    layer = layer_of(config)
    return batch * T * (6 * (L * layer.weights + V * D) + 12 * L * layer.queries * T)


def device_flops(config: Config, layout: Layout, batch: int) -> Number:
    """Returns the floating-point operations that one device runs in a step. The global batch has
    `batch` sequences.

    The operations of a pipeline's job, such as a stage's forward pass of one microbatch, are added
    for each tick (step of the schedule) in which the device runs the job. If all stages run the
    same kinds of job in a tick (lockstep), a stage without a microbatch runs these jobs on garbage.
    These operations count too. Operations that the backward pass runs again count again.
    """
    return _flops(config, layout, traffic.sizes(config, layout, batch))


def _flops(config: Config, layout: Layout, size: Sizes) -> Number:
    """Returns the floating-point operations of one device, in all calls of its stage and of the
    head together. `size.forward`, `size.backward`, `size.weights` and `size.heads` count the calls.
    """
    D, T, t = config.width, config.context, layout.tensor
    n = layout.context
    # The share of (query, key) pairs that is computed. In zigzag order a device has the queries of
    # 2 of the 2n chunks of tokens. Each of them meets the keys of 2n chunks: 4n pairs of chunks. A
    # device skips the pairs whose keys come after the queries, and computes 2n + 1 pairs. Without a
    # context axis all pairs count: the family's own attention computes all scores, and masks those
    # of later keys. A kernel, which may skip later keys, is counted like that attention.
    of_pairs = (2 * n + 1) / (4 * n) if n > 1 else 1
    layer = layer_of(config)
    # A layer's forward pass: 2 operations for each token and weight, and attention's two products
    # (with keys and with values), of 2 operations for each pair and number of a query.
    weights = 2 * layer.weights * size.tokens / t
    scores = of_pairs * 4 * layer.queries * T * size.tokens / t
    forward = weights + scores
    recompute = recomputed(layout)
    # The share of the products with weights that runs again: all but the last product of each layer
    # (or of the stage, if the whole stage runs again), whose result no gradient needs. The
    # arguments are the number of layers, and the last product's share of a layer's weights.
    share_again = recompute.products(size.layers, layer.last / layer.weights)
    again = share_again * weights + recompute.scores * scores
    # Forward and both gradients are 3 products of 2 operations for each token and weight. The
    # vocabulary is split over the stages too.
    head = 6 * D * config.rows * size.tokens / (layout.stage * t)
    # The whole backward pass costs 2 forward passes. The gradients of the weights are a part of it,
    # with as many operations as `weights`. They have calls of their own (`size.weights`).
    backward = size.backward * (2 * forward - weights + again) + size.weights * weights
    return size.layers * (size.forward * forward + backward) + size.heads * head


def _rate(hardware: Hardware, layout: Layout) -> Number:
    """Returns a device's peak rate in the layout's precision, in operations per second."""
    return hardware.full_rate if layout.precision == "full" else hardware.rate


def _passes(
    config: Config,
    layout: Layout,
    batch: int,
    hardware: Hardware,
    size: Sizes,
    kernel: bool,
) -> Number:
    """Returns the bytes that a device reads and writes between matmuls, in all calls of its stage
    together. `size.forward`, `size.backward` and `size.weights` count these calls.

    A layer keeps arrays for its backward pass. A pipeline copies these arrays into a slot of a
    buffer, and later out of the slot. The bytes of the copies count too. If the backward pass runs
    the whole stage again, there are no such copies. If `kernel` is true, attention writes no scores
    to memory.
    """
    # A layer computes all its arrays, even if it keeps only some of them.
    everything_kept = dataclasses.replace(layout, remat="none")
    # The arguments of functions of `residuals`, which give the bytes of a layer's arrays.
    sizes = config, everything_kept, batch, hardware.short
    arrays = residuals.between_products(*sizes, kernel=kernel)
    again = recomputed(layout)
    # A forward or backward call goes over these arrays `PASSES` times: it writes them, reads them,
    # and works on them in between. A backward call also runs a share of the forward call again
    # (`again.passes`). A call for the weights' gradients only multiplies.
    passes = PASSES * arrays * size.layers * (size.forward + size.backward * (1 + again.passes))
    # A stage that runs again has only its input in a slot.
    if again.whole_stage or not layout.pipelined:
        return passes
    # A forward call copies the arrays that a layer keeps (`residuals.layer`) into a slot, and a
    # backward call copies them out. Each copy is one read and one write.
    slots = (
        2
        * residuals.layer(config, layout, batch, hardware.short, kernel=kernel)
        * size.layers
        * (size.forward + size.backward)
    )
    # The weights' gradients may have jobs of their own (`deferred`), after the backward calls. Then
    # a backward call also copies arrays for such a job (`handed`) into a slot, and the job copies
    # these and the kept arrays out. `check` refuses such a layout if it computes arrays again, so a
    # layer keeps everything (`residuals.everything`).
    if jobs(layout).deferred:
        handed = residuals.handed(config, layout, batch, hardware.short)
        kept = residuals.everything(*sizes, kernel=kernel)
        slots += 2 * size.layers * (size.backward * handed + size.weights * (handed + kept))
    return passes + slots


def _updated(config: Config, layout: Layout) -> int:
    """Returns the number of parameters that one device updates: with ZeRO, only the parameters in
    its shares of the arrays."""
    return sum(leaf.share for leaf in leaves(config, layout))


# As text


def _unsplit(plan: Plan) -> list[str]:
    """Returns a line with the share of the parameters that ZeRO cannot split over n devices: the
    parameters in arrays without a dim that is a multiple of n. Returns an empty list without ZeRO
    (n = 1), or if the share is below 1 %."""
    n = plan.layout.optimizer_shards
    of_device = leaves(plan.config, plan.layout)
    whole = sum(leaf.elements for leaf in of_device if not leaf.split)
    share = whole / sum(leaf.elements for leaf in of_device)
    if n == 1 or share < 0.01:
        return []
    return [
        f"ZeRO leaves {share:.0%} of the parameters whole: none of their dims is a multiple of {n}"
    ]


def _of_memory(memory: Memory) -> list[str]:
    """Returns a line for each kind of memory, then one for each of the largest temporaries, then
    the peak."""
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
    """Returns the plan as text: the sizes, the bytes of memory by kind, the bytes and seconds of
    messages by axes, the operations, and the seconds of a step."""
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
            f"  {' x '.join(axes):<20} {quantity(size, 'B'):>9}  {plan.along.get(axes, 0.0):>9.3g}"
            for axes, size in plan.sent.items()
            if axes  # `lax.pmax` over one device has no axes, and moves nothing
        ),
        "",
        f"{quantity(plan.work.model, 'FLOP')} of the model, {quantity(plan.work.device, 'FLOP')} "
        f"on each device; bubble {plan.bubble:.1%}",
        # `update` includes `fresh`, the time to get memory, which has no column of its own.
        f"{plan.seconds.total:.4g} s a step: products {plan.seconds.products:.3g}, memory "
        f"{plan.seconds.passes:.3g}, messages {plan.seconds.messages:.3g}, update "
        f"{plan.seconds.update + plan.seconds.fresh:.3g}; {plan.share_of_peak:.1%} of peak",
        # The messages along `replica` and `data`, which sum gradients.
        f"{plan.overlapped:.4g} s if all messages over the replicas run beside the work",
    ]
    return "\n".join(lines)
