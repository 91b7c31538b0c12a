"""How many devices each axis gets, and how a batch is cut: a frozen record, checked against the model and the batch."""

import dataclasses
import math


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

    Raises:
        ValueError: a size below 1; chunks without stages; or chunks and microbatches that are no multiple of the stages.
    """

    data: int = 1
    stage: int = 1
    tensor: int = 1
    microbatches: int = 1
    chunks: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size < 1:
                raise ValueError(f"Layout needs {field.name} of 1 or more; got {size}.")
        if self.chunks > 1 and self.stage == 1:
            raise ValueError(f"Layout: chunks={self.chunks} interleave the layers of several stages; got stage=1. Take chunks=1.")
        if self.chunks > 1 and self.microbatches % self.stage:
            raise ValueError(
                f"Layout: with chunks={self.chunks} the microbatches must be a multiple of the stages; got "
                f"microbatches={self.microbatches} and stage={self.stage}. "
                + _nearest_multiple("microbatches", self.microbatches, self.stage)
            )

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes, for `mesh.make(**layout.axes)`."""
        return {"data": self.data, "stage": self.stage, "tensor": self.tensor}

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return math.prod(self.axes.values())

    def check(self, *, layers: int, heads: int, hidden: int, rows: int, batch: int) -> None:
        """Refuse with a `ValueError` a model or a global batch (in sequences) that these sizes do not divide.

        The message names the nearest size that does.
        """
        for name, what, size in (("heads", "the model's heads", heads), ("hidden", "the feed-forward's hidden units", hidden)):
            if size % self.tensor:
                both = math.gcd(heads, hidden)
                near = min((d for d in range(1, both + 1) if both % d == 0), key=lambda d: abs(d - self.tensor))
                raise ValueError(
                    f"Layout: {what} ({name}={size}) must divide by tensor={self.tensor}. Take tensor={near}, which divides it."
                )
        for name, what, size, by, of in (
            ("layers", "the model's layers", layers, self.stage * self.chunks, "stage x chunks"),
            ("rows", "the vocabulary's padded rows", rows, self.stage * self.tensor, "stage x tensor"),
            ("batch", "the batch's sequences", batch, self.data * self.microbatches, "data x microbatches"),
        ):
            if size % by:
                cure = f"Pad the vocabulary to a multiple of {by}." if name == "rows" else _nearest_multiple(name, size, by)
                raise ValueError(f"Layout: {what} ({name}={size}) must divide by {of}={by}. {cure}")


def _nearest_multiple(name: str, size: int, by: int) -> str:
    below, above = size // by * by, -(-size // by) * by
    return f"Take {name}={above}" + (f" or {name}={below}." if below else ".")
