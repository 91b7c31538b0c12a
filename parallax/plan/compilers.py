"""How often a compiler holds what a train step needs: the constants of XLA's CPU backend, and of one that updates in place."""

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
    sums=1.2,
    chunk=0.79,
    ends_of_stage=3.5,
    scattered=1.1,
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
