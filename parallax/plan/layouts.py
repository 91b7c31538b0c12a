"""The layouts of a number of devices that fit the model, the batch and the memory, the fastest
first.

    for planned in plan.search(gpt2.XL, 64, hardware.A100, batch=512)[:5]:
        print(planned.seconds.total, planned.layout)

The closed forms rank all layouts, each with the fastest algorithm along each of its axes. The step
of the first few is traced, and its memory decides whether they fit.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import optax

from parallax.hardware import Hardware
from parallax.layout import Layout
from parallax.plan import residuals, state_bytes
from parallax.plan.closed_form import ADAMW, Plan, counts, has_kernel, plan
from parallax.plan.families import Config, known
from parallax.plan.units import Number, quantity
from parallax.validate import CHOICES, divisors

SEQUENCES = (1, 2, 4, 8, 16)  # in a microbatch
CHUNKS = (1, 2, 3, 4)
GROUPS = (8, 16, 32, 64)  # replicas among which ZeRO splits, where there are more


class Choices(NamedTuple):
    """The layouts that `search` chooses from.

    Attributes:
        precision: that of `Layout`.
        sequences: of a microbatch on a device.
        schedules: of pipelines: words of `Layout`.
    """

    precision: str = "bfloat16"
    sequences: Sequence[int] = SEQUENCES
    schedules: Sequence[str] = ("one_f_one_b_lockstep",)


def search(
    config: Config,
    devices: int,
    hardware: Hardware,
    *,
    batch: int,
    optimizer: optax.GradientTransformation = ADAMW,
    choices: Choices = Choices(),  # noqa: B008
    count: int = 5,
    attention_kernel: bool | None = None,
) -> list[Plan]:
    """Returns the fastest layouts of exactly `devices` that fit, at most `count`, the fastest
    first.

    Each has the fastest algorithm along each of its axes (`Plan.algorithms`). Of layouts that
    differ in ZeRO's stage and remat alone, the fastest that fits is listed. Where tensor
    parallelism can split tokens too, it does: as much moves, and less is kept. Pipelines have as
    many microbatches as the batch has, of `choices.sequences`. Schedules with gradients of weights
    apart compute nothing again. ZeRO splits among all replicas, or in groups of them (HSDP).

    Args:
        config: the model's sizes.
        devices: the number of devices.
        hardware: one of them.
        batch: sequences in the global batch.
        optimizer: one that acts element by element.
        choices: the precision, the sizes of microbatches and the schedules to choose from.
        count: the most layouts to return. Each, and each that does not fit, takes a second or more:
            its step is traced.
        attention_kernel: as `plan` takes it.

    Raises:
        ValueError: no layout takes so many devices, or none of those fits, and the message says
            which comes nearest; or a number below 1, or a precision or a schedule that is not
            known.
    """
    known(config)
    Layout(precision=choices.precision)  # refuses one that is not known
    for schedule in choices.schedules:
        Layout(stage=2, schedule=schedule)
    if devices < 1 or batch < 1:
        raise ValueError(
            f"search needs 1 device and a batch of 1 or more; got devices={devices} and "
            f"batch={batch}."
        )
    candidates = list(_layouts(config, devices, batch, choices))
    if not candidates:
        raise ValueError(
            f"search needs a way to split {config.layers} layers, {config.heads} heads and {batch} "
            f"sequences over exactly {devices} devices, and there is none. Use a batch that "
            f"{devices} divides, or another number of devices."
        )
    bytes_of = {
        layout: _at_least(config, layout, hardware, batch, optimizer, attention_kernel)
        for layout in candidates
    }
    possible = [layout for layout in candidates if bytes_of[layout] <= hardware.memory]

    def planned_of(layout: Layout) -> Plan:
        return plan(
            config,
            layout,
            hardware,
            batch=batch,
            optimizer=optimizer,
            attention_kernel=attention_kernel,
        )

    ranked = sorted((planned_of(layout) for layout in possible), key=_seconds)
    fitting: dict[Any, Plan] = {}
    for planned in ranked:
        if len(fitting) == count:
            break
        alike = frozenset((vars(planned.layout) | {"zero": None, "remat": None}).items())
        if alike not in fitting and planned.fits:
            fitting[alike] = planned
    if not fitting:
        nearest = min(candidates, key=bytes_of.__getitem__)
        needed = planned_of(nearest).memory.peak
        raise ValueError(
            f"search: no layout of {devices} devices fits: they have "
            f"{quantity(hardware.memory, 'B')} each, and {nearest}, which keeps least, needs "
            f"{quantity(needed, 'B')}. Use more devices, or a smaller batch."
        )
    return list(fitting.values())


def simplest(plans: Sequence[Plan], within: float = 0.05) -> Plan:
    """Returns the plan to take: of those whose time is near the shortest, the one that splits
    layers and matrices over fewest devices.

    A plan's time is not known to a twentieth, and what splits less has fewer messages that work
    must wait for.

    Args:
        plans: the fastest first, as `search` returns them.
        within: the share of the shortest time that counts as near.
    """
    near = [one for one in plans if one.seconds.total <= (1 + within) * plans[0].seconds.total]
    return min(near, key=_devices_of_a_replica)


def _devices_of_a_replica(planned: Plan) -> int:
    return planned.layout.stage * planned.layout.tensor


def _seconds(planned: Plan) -> float:
    return planned.seconds.total


def table(found: Sequence[Plan], count: int = 10) -> str:
    """Returns the first of these plans, a line each."""
    lines = [f"{'seconds':>9} {'of peak':>8} {'memory':>9} {'bubble':>7}  layout"]
    for planned in found[:count]:
        lines.append(
            f"{planned.seconds.total:>9.4g} {planned.share_of_peak:>8.1%} "
            f"{quantity(planned.memory.peak, 'B'):>9} {planned.bubble:>7.1%}  "
            f"{str(planned.layout) or 'one device'}"
        )
    return "\n".join(lines)


def _layouts(config, devices, batch, choices) -> Iterator[Layout]:
    """Returns the layouts that divide the model and the batch and that the plan counts."""
    for sizes in _sizes(config, devices, batch, choices.sequences):
        # Where tokens are not split, what goes between stages can be.
        by_stages = sizes["stage"] > 1
        splits = (False, True) if by_stages and sizes["tensor"] > 1 else (False,)
        if sizes["sequence"]:
            splits = (False,)
        orders = choices.schedules if by_stages else ("one_f_one_b_lockstep",)
        words = itertools.product(splits, orders, CHOICES["zero"], CHOICES["remat"])
        for split_sends, schedule, zero, remat in words:
            fields = sizes | {
                "split_sends": split_sends,
                "schedule": schedule,
                "zero": zero,
                "remat": remat,
                "precision": choices.precision,
            }
            if Layout.admits(**fields) and counts(Layout(**fields)):
                yield Layout(**fields)


def _sizes(config, devices, batch, sequences) -> Iterator[dict[str, Any]]:
    """Returns the sizes of the axes, with microbatches and chunks, that divide the model and the
    batch."""
    for tensor, stage in itertools.product(divisors(config.heads), divisors(config.layers)):
        replicas, left = divmod(devices, tensor * stage)
        if (
            left
            or config.rows % (tensor * stage)
            or config.sizes["hidden"] % tensor
            or batch % replicas
        ):
            continue
        chunks_to_try = CHUNKS if stage > 1 else (1,)
        for data, b, chunks in itertools.product(
            _groups(replicas, stage), sequences, chunks_to_try
        ):
            microbatches, left = divmod(batch // replicas, b)
            if left or config.layers % (stage * chunks) or (stage > 1 and microbatches == 1):
                continue
            yield {
                "replica": replicas // data,
                "data": data,
                "stage": stage,
                "tensor": tensor,
                "microbatches": microbatches,
                "chunks": chunks,
                "sequence": tensor > 1 and config.context % tensor == 0,
            }


def _groups(replicas: int, stage: int) -> list[int]:
    """Returns the replicas among which ZeRO may split: all, or with no pipeline those of a
    group."""
    groups = [size for size in GROUPS if replicas % size == 0 and size < replicas]
    return [replicas] if stage > 1 else [replicas, *groups]


def _at_least(config, layout, hardware, batch, optimizer, attention_kernel) -> Number:
    """Returns the bytes that a device needs at least: its arguments and what layers keep."""
    kernel = has_kernel(config, layout, hardware, attention_kernel)
    return (
        state_bytes.parameter_bytes(config, layout)
        + state_bytes.optimizer_bytes(config, layout, optimizer)
        + state_bytes.batch_bytes(config, layout, batch)
        + residuals.at_least(config, layout, batch, hardware.short, kernel=kernel)
    )
