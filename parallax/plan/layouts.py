"""Which split? Every layout of a number of devices that fits the model, the batch and the memory, ranked by its predicted time.

for planned in plan.search(gpt2.XL, 64, hardware.A100, batch=512)[:5]:
    print(planned.seconds.total, planned.layout)
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import optax

from parallax.hardware import Hardware
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.plan import arguments, compilers, temporaries
from parallax.plan.compilers import Number
from parallax.plan.planned import ADAMW, Plan, counts, known, plan
from parallax.plan.quantities import quantity
from parallax.validate import CHOICES, divisors

SEQUENCES = (1, 2, 4, 8, 16)  # in a microbatch
CHUNKS = (1, 2, 3, 4)


def search(
    config: gpt2.Config,
    devices: int,
    hardware: Hardware,
    *,
    batch: int,
    precision: str = "bfloat16",
    optimizer: optax.GradientTransformation = ADAMW,
    sequences: Sequence[int] = SEQUENCES,
    schedules: Sequence[str] = ("one_f_one_b_lockstep",),
) -> list[Plan]:
    """The plans of all layouts of exactly `devices` that fit, the fastest first.

    Of layouts that differ in ZeRO's stage and remat alone, one is left out if another that fits splits no more and computes no
    more again. Where tensor parallelism can split tokens too, it does: as much moves, and less is kept. Pipelines have as many
    microbatches as the batch has, of `sequences`. Schedules with gradients of weights apart compute nothing again.

    Args:
        config: the model's sizes.
        devices: how many there are.
        hardware: one of them.
        batch: sequences in the global batch.
        precision: that of `Layout`.
        optimizer: one that acts element by element.
        sequences: of a microbatch on a device, to choose from.
        schedules: of pipelines, to choose from: words of `Layout`.

    Raises:
        ValueError: no layout takes so many devices, or none of those fits, and the message says which comes nearest; or a
            number below 1, or a precision or a schedule that is not known.
    """
    known(config)
    Layout(precision=precision)  # refuses one that is not known
    for schedule in schedules:
        Layout(stage=2, schedule=schedule)
    if devices < 1 or batch < 1:
        raise ValueError(
            f"search needs 1 device and a batch of 1 or more; got devices={devices} and batch={batch}."
        )
    nearest: Layout | None = None
    found = []
    for family in _families(config, devices, batch, precision, sequences, schedules):
        least = math.inf  # what is computed again by the fitting layouts that split less
        for layouts in family:
            for again, layout in layouts:
                if again >= least:
                    break
                if _peak(config, layout, hardware, batch, optimizer) <= hardware.memory:
                    least = again
                    found.append(layout)
                    break
                nearest = layout
    if not found:
        raise ValueError(_nothing(config, devices, hardware, batch, optimizer, nearest))
    made = [plan(config, layout, hardware, batch=batch, optimizer=optimizer) for layout in found]
    return sorted(made, key=lambda made: made.seconds.total)


def largest_batch(
    config: gpt2.Config,
    layout: Layout,
    hardware: Hardware,
    *,
    optimizer: optax.GradientTransformation = ADAMW,
) -> int:
    """The largest global batch of `layout`, in sequences, with which a step fits; 0 if none does."""
    part = layout.global_batch(1)
    fits = lambda count: _peak(config, layout, hardware, count * part, optimizer) <= hardware.memory
    if not fits(1):
        return 0
    least, most = 1, 2
    while fits(most):
        least, most = most, 2 * most
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least * part


def table(found: Sequence[Plan], count: int = 10) -> str:
    """The first of these plans, a line each."""
    lines = [f"{'seconds':>9} {'of peak':>8} {'memory':>9} {'bubble':>7}  layout"]
    for planned in found[:count]:
        lines.append(
            f"{planned.seconds.total:>9.4g} {planned.share_of_peak:>8.1%} {quantity(planned.memory.peak, 'B'):>9} "
            f"{planned.bubble:>7.1%}  {str(planned.layout) or 'one device'}"
        )
    return "\n".join(lines)


def _families(
    config, devices, batch, precision, sequences, schedules
) -> Iterator[list[list[tuple[int, Layout]]]]:
    """Layouts that divide the model and the batch; those of a family differ in ZeRO's stage, a list each, and in remat alone.

    They come from less to more that is split and computed again; with each, the place of its remat in this order.
    """
    for tensor, stage in itertools.product(divisors(config.heads), divisors(config.layers)):
        if (
            devices % (tensor * stage)
            or config.rows % (tensor * stage)
            or (4 * config.width) % tensor
        ):
            continue
        data = devices // (tensor * stage)
        if batch % data:
            continue
        by_tokens = tensor > 1 and config.context % tensor == 0
        for b, chunks in itertools.product(sequences, CHUNKS if stage > 1 else (1,)):
            if (batch // data) % b or config.layers % (stage * chunks):
                continue
            microbatches = batch // data // b
            if (chunks > 1 and microbatches % stage) or (stage > 1 and microbatches == 1):
                continue
            sizes = {
                "data": data,
                "stage": stage,
                "tensor": tensor,
                "microbatches": microbatches,
                "chunks": chunks,
            }
            # Where tokens are not split, what goes between stages can be.
            splits = (False, True) if stage > 1 and tensor > 1 and not by_tokens else (False,)
            orders = schedules if stage > 1 else ("one_f_one_b_lockstep",)
            for split_sends, schedule in itertools.product(splits, orders):
                fields = sizes | {
                    "sequence": by_tokens,
                    "split_sends": split_sends,
                    "precision": precision,
                    "schedule": schedule,
                }
                yield [_remats(**fields, zero=zero) for zero in CHOICES["zero"]]


def _remats(**fields: Any) -> list[tuple[int, Layout]]:
    """The layouts of these fields by remat, each with its place among all of them."""
    every = (fields | {"remat": remat} for remat in CHOICES["remat"])
    admitted = [
        (place, Layout(**each)) for place, each in enumerate(every) if Layout.admits(**each)
    ]
    return [(place, layout) for place, layout in admitted if counts(layout)]


def _peak(config, layout, hardware, batch, optimizer) -> Number:
    state = arguments.parameter_bytes(config, layout) + arguments.optimizer_bytes(
        config, layout, optimizer
    )
    if state > hardware.memory:
        return state
    temporary = temporaries.temporary(
        config,
        layout,
        batch,
        compiler=compilers.of(hardware.name, hardware.platform),
        short=hardware.short,
    )
    return state + arguments.batch_bytes(config, layout, batch) + temporary.peak


def _nothing(config, devices, hardware, batch, optimizer, nearest: Layout | None) -> str:
    if nearest is None:
        return (
            f"search needs a way to split {config.layers} layers, {config.heads} heads and {batch} sequences over exactly "
            f"{devices} devices, and there is none. Take a batch that {devices} divides, or another number of devices."
        )
    peak = quantity(_peak(config, nearest, hardware, batch, optimizer), "B")
    return (
        f"search: no layout of {devices} devices fits: they have {quantity(hardware.memory, 'B')} each, and the last of "
        f"those tried, {nearest}, needs {peak}. Take more devices, or a smaller batch."
    )
