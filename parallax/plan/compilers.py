"""How often a compiler holds what a train step needs: the constants of XLA's backends, and of one that updates in place.

Those of the CPU were fitted to compiled steps by `benchmarks/plan.py`, those of the accelerators by
`benchmarks/accelerators.py`, to one half of its layouts: benchmarks/README.md has the other half's scores.
"""

from typing import NamedTuple

Number = float | int


class Compiler(NamedTuple):
    """How often a compiler holds what a step needs once.

    Attributes:
        scores: S / t, while a layer's backward pass runs.
        block: (A / t, A) at that time, where all is kept; with remat `products`; and with `block`.
        slots: a stage's residuals beside those that wait: those just made, or about to be used.
        gradients: B in the backward pass.
        gradients_again: B (ZeRO-2: its share) that is added up over microbatches.
        ends: E in the backward pass.
        ends_again: E over microbatches.
        ring: (B, E) that reductions over three or more replicas add where microbatches accumulate.
        shares: with ZeRO-3, gradients of B's share; once more with microbatches.
        gathered: with ZeRO-3, two gathered layers; in a pipeline at most B.
        ends_gathered: with ZeRO-3, E; and over microbatches.
        sums, chunk, ends_of_stage: in a pipeline, B (ZeRO-2: its share), B / v, E.
        scattered: in a pipeline, B with any ZeRO.
        update: in the optimizer, gradients and updates of B's share, those of all of B, and (one replica, several) of E.
        kept: of what `jax.vjp` keeps of a layer where nothing but attention is computed again.
        near: bytes of a layer's backward pass that live in a memory on the chip, not in the device's.
        apart: how often what a layer keeps is taken out of the stack that a loop fills: of one layer in the loop's body (behind
            the barrier of `jax.checkpoint`), and of each of several.
        copied: with remat `stage`, a stage's residuals, where tokens or weights are gathered for them.
        early: a stage's residuals of the last backward tick, whose place is made while the ticks before it run.
    """

    scores: Number
    block: tuple[tuple[float, float], tuple[float, float], tuple[float, float]]
    slots: float
    gradients: Number
    gradients_again: float
    ends: float
    ends_again: float
    ring: tuple[float, float]
    shares: float
    gathered: Number
    ends_gathered: tuple[float, float]
    sums: float
    chunk: float
    ends_of_stage: float
    scattered: float
    update: tuple[float, float, float, float]
    kept: float = 1.0
    near: float = 0.0
    apart: tuple[float, float] = (0.0, 0.0)
    copied: float = 2.0
    early: float = 0.0


# AdamW's moments are copied before they are overwritten (benchmarks/README.md): 2 of the update's B.
XLA_CPU = Compiler(
    scores=2.96,
    block=((15.0, 5.6), (21.3, 0.9), (33.5, 4.3)),
    slots=1.27,
    gradients=1.67,
    gradients_again=0.27,
    ends=2.14,
    ends_again=0.12,
    ring=(0.72, 0.49),
    shares=1.49,
    gathered=0.68,
    ends_gathered=(2.6, 0.57),
    sums=1.8,
    chunk=0.79,
    ends_of_stage=3.5,
    scattered=2.1,
    update=(2.0, 1.0, 2.0, 3.0),
)


IN_PLACE = XLA_CPU._replace(
    gradients=1.0,
    gradients_again=1.0,
    ends=1.0,
    ends_again=1.0,
    ring=(0.0, 0.0),
    shares=1.0,
    gathered=1.0,
    ends_gathered=(2.0, 1.0),
    sums=1.0,
    chunk=1.0,
    ends_of_stage=2.0,
    scattered=0.0,
    update=(0.0, 1.0, 1.0, 1.0),
)

# XLA's compilers for three chips, with JAX 0.10.2. `near` is the part of a TPU's vector memory that holds a layer's numbers.
# `apart`, `copied` and `early` were read from the programs, the rest was fitted.
XLA_V5E = IN_PLACE._replace(
    scores=1.93,
    block=((15.27, 5.7), (21.3, 0.9), (17.94, 2.3)),
    slots=2.16,
    kept=0.95,
    near=77e6,
    apart=(1.0, 2.0),
    copied=1.0,
    early=1.0,
)
XLA_V5P = IN_PLACE._replace(
    scores=1.22,
    block=((14.37, 5.37), (33.55, 1.42), (30.17, 3.87)),
    slots=2.02,
    kept=1.04,
    apart=(1.0, 2.0),
    copied=1.0,
)
XLA_H100 = IN_PLACE._replace(
    scores=1.18,
    block=((15.99, 5.97), (23.96, 1.01), (28.73, 3.69)),
    slots=1.8,
    kept=1.02,
    apart=(1.0, 1.0),
    copied=1.0,
    early=1.0,
)


def of(name: str, platform: str) -> Compiler:
    """The constants for a chip of this name; on CPUs those of the CPU's compiler."""
    chips = {"TPU v5e": XLA_V5E, "TPU v5p": XLA_V5P, "H100": XLA_H100, "H200": XLA_H100}
    return XLA_CPU if platform == "cpu" else chips.get(name, IN_PLACE)
