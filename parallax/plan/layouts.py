"""Finds the fastest layouts of a given number of devices. A layout must fit the model, the batch
and the memory of a device.

    for planned in plan.search(gpt2.XL, 64, hardware.A100, batch=512)[:5]:
        print(planned.seconds.total, planned.layout)

For each layout, `plan` computes the time of a step by formulas (closed forms), with the fastest
collective algorithm along each axis. The layouts are ranked by this time. Then the steps of the
layouts are traced, the fastest layout first, and the traced memory tells whether a layout fits.
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

SEQUENCES = (1, 2, 4, 8, 16)  # sequences in a microbatch
CHUNKS = (1, 2, 3, 4)  # chunks of layers on each stage
GROUPS = (8, 16, 32, 64)  # replicas in a group, if ZeRO splits only within groups (HSDP)


class Choices(NamedTuple):
    """The layouts that `search` chooses from.

    Attributes:
        precision: the `precision` of the layouts.
        sequences: the numbers of sequences that a microbatch on a device may have.
        schedules: the schedules of pipelines, as `Layout` names them.
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
    """Returns the plans of the fastest layouts, at most `count` plans, the fastest first. Each
    layout uses exactly `devices` devices, and fits into their memory.

    A plan uses, along each axis of the layout, the fastest algorithm for the collectives along this
    axis (`Plan.algorithms`). Of layouts that differ only in ZeRO's stage and in remat, only the
    fastest that fits is listed. Between matmuls, a tensor axis also splits the tokens (sequence
    parallelism), if the number of tokens is a multiple of the number of devices along the tensor
    axis. With this split the messages have as many bytes as without it, and a device keeps fewer
    bytes. The sequences of a replica are split into microbatches; each number in
    `choices.sequences` is tried as the size of a microbatch. With a schedule that defers the
    weights' gradients, nothing is recomputed. ZeRO splits over all replicas, or within groups of
    replicas (HSDP).

    Args:
        config: the model's sizes.
        devices: the number of devices.
        hardware: the figures of one device, such as `hardware.A100`.
        batch: sequences in the global batch.
        optimizer: an optimizer that acts element by element.
        choices: the precision, the sizes of microbatches and the schedules to choose from.
        count: the largest number of layouts to return. Each returned layout takes a second or more,
            since its step is traced. So does each faster layout that does not fit.
        attention_kernel: whether attention runs in a kernel that keeps no scores; None stands for
            the default choice of the train step, as in `plan`.

    Raises:
        ValueError: no layout has exactly `devices` devices, or none of these layouts fits (then the
            message names the layout with the smallest estimated memory). The error is also raised
            if `devices`, `batch` or `count` is below 1, if a precision or a schedule is unknown, or
            if the model is neither a GPT-2 nor a Llama without experts.
    """
    known(config)  # refuses a model without closed forms
    # These raise `ValueError` for an unknown word. A schedule needs a pipeline, so stage=2.
    Layout(precision=choices.precision)
    for schedule in choices.schedules:
        Layout(stage=2, schedule=schedule)
    if devices < 1 or batch < 1 or count < 1:
        raise ValueError(
            "search needs at least 1 device, a batch of 1 or more and a count of 1 or more; got "
            f"devices={devices}, batch={batch} and count={count}."
        )
    hardware = hardware.for_devices(devices)
    candidates = list(_layouts(config, devices, batch, choices))
    if not candidates:
        raise ValueError(
            f"search: no layout splits {config.layers} layers, {config.heads} heads and {batch} "
            f"sequences over exactly {devices} devices. Use a batch that "
            f"is a multiple of {devices}, or another number of devices."
        )
    # A lower bound of the memory drops layouts before their steps are traced.
    bytes_of = {
        layout: _at_least(config, layout, hardware, batch, optimizer, attention_kernel)
        for layout in candidates
    }
    possible = [layout for layout in candidates if bytes_of[layout] <= hardware.memory]

    def planned_of(layout: Layout) -> Plan:
        """Returns the plan of one layout. All other arguments of the plan are those of `search`."""
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
        # Equal for layouts that differ only in ZeRO's stage and in remat.
        key = frozenset((vars(planned.layout) | {"zero": None, "remat": None}).items())
        if key not in fitting and planned.fits:  # `fits` traces the step, so it is asked last
            fitting[key] = planned
    if not fitting:
        nearest = min(candidates, key=bytes_of.__getitem__)
        needed = planned_of(nearest).memory.peak
        raise ValueError(
            f"search: no layout of {devices} device{'s' * (devices > 1)} fits: each device has "
            f"{quantity(hardware.memory, 'B')}, and {nearest}, the layout with the smallest "
            f"estimated memory, needs {quantity(needed, 'B')} on each device. Use more devices, "
            "or a smaller batch."
        )
    return list(fitting.values())


def simplest(plans: Sequence[Plan], within: float = 0.05) -> Plan:
    """Returns the recommended plan: among the plans whose time is near the shortest, the plan that
    splits layers and matrices over the fewest devices.

    A predicted time may be wrong by more than 5 %. So among plans with nearly the same time, the
    plan with the fewest devices in a replica is the safest: it has the fewest messages for which
    work must wait.

    Args:
        plans: the plans, the fastest first, as `search` returns them.
        within: a time counts as near if it exceeds the shortest time by at most this share of the
            shortest time.
    """
    longest = (1 + within) * plans[0].seconds.total
    near = [planned for planned in plans if planned.seconds.total <= longest]
    return min(near, key=_devices_of_a_replica)


def _devices_of_a_replica(planned: Plan) -> int:
    """Returns the number of devices among which one copy of the model is split."""
    return planned.layout.stage * planned.layout.tensor


def _seconds(planned: Plan) -> float:
    """Returns the seconds of a step, the key by which plans are ranked."""
    return planned.seconds.total


def table(found: Sequence[Plan], count: int = 10) -> str:
    """Returns the first `count` of these plans as text, one line for each plan."""
    lines = [f"{'seconds':>9} {'of peak':>8} {'memory':>9} {'bubble':>7}  layout"]
    for planned in found[:count]:
        lines.append(
            f"{planned.seconds.total:>9.4g} {planned.share_of_peak:>8.1%} "
            f"{quantity(planned.memory.peak, 'B'):>9} {planned.bubble:>7.1%}  "
            f"{str(planned.layout) or 'one device'}"
        )
    return "\n".join(lines)


def _layouts(config, devices, batch, choices) -> Iterator[Layout]:
    """Yields the layouts that divide the model and the batch evenly, and for which `plan` has
    closed forms."""
    for sizes in _sizes(config, devices, batch, choices.sequences):
        # Messages between stages can be split over the tensor axis (`split_sends`), unless tokens
        # already are (`sequence`).
        by_stages = sizes["stage"] > 1
        splits = (False, True) if by_stages and sizes["tensor"] > 1 else (False,)
        if sizes["sequence"]:
            splits = (False,)
        schedules = choices.schedules if by_stages else ("one_f_one_b_lockstep",)
        # `CHOICES` has all values that a field of a `Layout` may have.
        options = itertools.product(splits, schedules, CHOICES["zero"], CHOICES["remat"])
        for split_sends, schedule, zero, remat in options:
            fields = sizes | {
                "split_sends": split_sends,
                "schedule": schedule,
                "zero": zero,
                "remat": remat,
                "precision": choices.precision,
            }
            # `counts` says whether plan has closed forms for the layout.
            if Layout.admits(**fields) and counts(Layout(**fields)):
                yield Layout(**fields)


def _sizes(config, devices, batch, sequences) -> Iterator[dict[str, Any]]:
    """Yields dicts of fields of `Layout`: the sizes of the axes, and the numbers of microbatches
    and chunks. Each of these numbers divides what it splits: the layers or heads of the model, or
    the `batch` sequences. `sequences` are the sizes of a microbatch to try."""
    for tensor, stage in itertools.product(divisors(config.heads), divisors(config.layers)):
        replicas, remainder = divmod(devices, tensor * stage)
        # The vocabulary (`rows`) is split over the axes tensor and stage, and the feed-forward (of
        # width "hidden") over tensor only.
        if (
            remainder
            or config.rows % (tensor * stage)
            or config.sizes["hidden"] % tensor
            or batch % replicas
        ):
            continue
        chunks_to_try = CHUNKS if stage > 1 else (1,)
        # `data` replicas over which ZeRO splits, and microbatches of b sequences on each replica.
        for data, b, chunks in itertools.product(
            _groups(replicas, stage), sequences, chunks_to_try
        ):
            microbatches, remainder = divmod(batch // replicas, b)
            # A pipeline of one microbatch would leave all stages but one idle.
            if remainder or config.layers % (stage * chunks) or (stage > 1 and microbatches == 1):
                continue
            yield {
                # ZeRO splits over the axis `data`, in each of the `replica` groups.
                "replica": replicas // data,
                "data": data,
                "stage": stage,
                "tensor": tensor,
                "microbatches": microbatches,
                "chunks": chunks,
                "sequence": tensor > 1 and config.context % tensor == 0,
            }


def _groups(replicas: int, stage: int) -> list[int]:
    """Returns the numbers of replicas over which ZeRO may split. The list has the number of all
    replicas and, without a pipeline, each smaller size in `GROUPS` that divides this number."""
    groups = [size for size in GROUPS if replicas % size == 0 and size < replicas]
    return [replicas] if stage > 1 else [replicas, *groups]


def _at_least(config, layout, hardware, batch, optimizer, attention_kernel) -> Number:
    """Returns a lower bound of the bytes that a device needs: the sum of the step's arguments
    and of the arrays that the layers keep for the backward pass."""
    # With an attention kernel the layers keep no scores. `hardware.short` is the bytes of a number
    # of a 16-bit type: 2, or 4 if the hardware's compiler widens such numbers.
    kernel = has_kernel(config, layout, hardware, attention_kernel)
    return (
        state_bytes.parameter_bytes(config, layout)
        + state_bytes.optimizer_bytes(config, layout, optimizer)
        + state_bytes.batch_bytes(config, layout, batch)
        + residuals.at_least(config, layout, batch, hardware.short, kernel=kernel)
    )
