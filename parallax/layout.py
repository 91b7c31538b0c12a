"""How many devices each axis gets, and how a batch is cut: a frozen record, checked against the model and the batch."""

import dataclasses
import math
from typing import Literal, get_args

Precision = Literal["full", "bfloat16", "float16"]
Remat = Literal["none", "gathers", "attention", "products", "block", "stage"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sizes of a parallel run.

    Args:
        data: replicas, among which the batch is split.
        stage: pipeline stages, among which the layers are split.
        tensor: devices that share each layer's heads and hidden units.
        microbatches: parts of a replica's batch, one after another (or, with stages, one behind another); their gradients
            are accumulated.
        chunks: chunks of layers on each stage: more than 1 is the interleaved pipeline, with a smaller bubble.
        zero: what the replicas split instead of holding copies of: 1 the optimizer's state, 2 the sums of gradients too, 3 the
            parameters too.
        sequence: whether the residual stream is split by tokens over the tensor axis.
        precision: the type that the model computes in: that of its parameters (`full`), or a shorter one beside them.
        remat: what the backward pass computes again instead of keeping: `gathers` (what was gathered over devices), `attention`,
            all but the `products` with weights, all but a `block`'s input, or all but a `stage`'s. See `parallax.remat`.

    Raises:
        ValueError: a size below 1; chunks without stages; chunks and microbatches that are no multiple of the stages; or a
            choice that has nothing to act on.
    """

    data: int = 1
    stage: int = 1
    tensor: int = 1
    microbatches: int = 1
    chunks: int = 1
    zero: int = 0
    sequence: bool = False
    precision: str = "full"  # one of `Precision`
    remat: str = "none"  # one of `Remat`

    def __post_init__(self):
        for name in ("data", "stage", "tensor", "microbatches", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"Layout needs {name} of 1 or more; got {getattr(self, name)}.")
        for name, known in (("zero", (0, 1, 2, 3)), ("precision", get_args(Precision)), ("remat", get_args(Remat))):
            if getattr(self, name) not in known:
                raise ValueError(f"Layout needs {name} to be one of {', '.join(map(str, known))}; got {getattr(self, name)!r}.")
        if self.chunks > 1 and self.stage == 1:
            raise ValueError(f"Layout: chunks={self.chunks} interleave the layers of several stages; got stage=1. Take chunks=1.")
        if self.chunks > 1 and self.microbatches % self.stage:
            raise ValueError(
                f"Layout: with chunks={self.chunks} the microbatches must be a multiple of the stages; got "
                f"microbatches={self.microbatches} and stage={self.stage}. "
                + _nearest_multiple("microbatches", self.microbatches, self.stage)
            )

        for idle, what, cure in (
            (
                self.zero and self.data == 1,
                f"zero={self.zero} splits state over replicas; got data=1",
                "zero=0, or more replicas",
            ),
            (
                self.sequence and self.tensor == 1,
                "sequence=True splits tokens over the tensor axis; got tensor=1",
                "sequence=False",
            ),
            (self.remat == "stage" and self.stage == 1, "remat='stage' is for pipelines; got stage=1", "remat='block'"),
            (
                self.remat == "gathers" and not self.sequence and self.zero < 3,
                "remat='gathers' gathers again what sequence=True or zero=3 gathered, and neither is on",
                "remat='none'",
            ),
        ):
            if idle:
                raise ValueError(f"Layout: {what}. Take {cure}.")

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes, for `mesh.make(**layout.axes)`."""
        return {"data": self.data, "stage": self.stage, "tensor": self.tensor}

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return math.prod(self.axes.values())

    def check(self, *, layers: int, heads: int, hidden: int, rows: int, batch: int, tokens: int) -> None:
        """Refuse with a `ValueError` a model or a global batch (in sequences of `tokens`) that these sizes do not divide.

        The message names the nearest size that does.
        """
        for name, what, size in (("heads", "the model's heads", heads), ("hidden", "the feed-forward's hidden units", hidden)):
            if size % self.tensor:
                both = math.gcd(heads, hidden)
                near = min((d for d in range(1, both + 1) if both % d == 0), key=lambda d: abs(d - self.tensor))
                take = f"tensor={near}" + (" with sequence=False" if self.sequence and near == 1 else "")
                raise ValueError(
                    f"Layout: {what} ({name}={size}) must divide by tensor={self.tensor}. Take {take}, which divides it."
                )
        for name, what, size, by, of in (
            ("layers", "the model's layers", layers, self.stage * self.chunks, "stage x chunks"),
            ("rows", "the vocabulary's padded rows", rows, self.stage * self.tensor, "stage x tensor"),
            ("batch", "the batch's sequences", batch, self.data * self.microbatches, "data x microbatches"),
            ("tokens", "with sequence=True the tokens of a sequence", tokens, self.tensor if self.sequence else 1, "tensor"),
        ):
            if size % by:
                cure = f"Pad the vocabulary to a multiple of {by}." if name == "rows" else _nearest_multiple(name, size, by)
                raise ValueError(f"Layout: {what} ({name}={size}) must divide by {of}={by}. {cure}")


def _nearest_multiple(name: str, size: int, by: int) -> str:
    below, above = size // by * by, -(-size // by) * by
    return f"Take {name}={above}" + (f" or {name}={below}." if below else ".")
