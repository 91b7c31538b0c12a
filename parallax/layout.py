"""How many devices each axis gets, and how a batch is cut: a frozen record, checked against the model and the batch."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sizes of a parallel run.

    Args:
        data: replicas, among which the batch is split.
        tensor: devices that share each layer's heads and hidden units.
        microbatches: parts of a replica's batch, one after another; their gradients are accumulated.

    Raises:
        ValueError: a size below 1.
    """

    data: int = 1
    tensor: int = 1
    microbatches: int = 1

    def __post_init__(self):
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size < 1:
                raise ValueError(f"Layout needs {field.name} of 1 or more; got {size}.")

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes, for `mesh.make(**layout.axes)`."""
        return {"data": self.data, "tensor": self.tensor}

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.data * self.tensor

    def check(self, *, heads: int, rows: int, hidden: int, batch: int) -> None:
        """Refuse with a `ValueError` a model or a global batch (in sequences) that these sizes do not divide."""
        for name, what, size, by, of in (
            ("heads", "the model's heads", heads, self.tensor, "tensor"),
            ("rows", "the vocabulary's padded rows", rows, self.tensor, "tensor"),
            ("hidden", "the feed-forward's hidden units", hidden, self.tensor, "tensor"),
            ("batch", "the batch's sequences", batch, self.data * self.microbatches, "data x microbatches"),
        ):
            if size % by:
                raise ValueError(f"Layout: {what} ({name}={size}) must divide by {of}={by}. {_nearest(name, size, by, of)}")


def _nearest(name: str, size: int, by: int, of: str) -> str:
    if name in ("batch", "rows"):
        below, above = size // by * by, -(-size // by) * by
        return f"Take {name}={above}" + (f" or {below}." if below else ".")
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return f"Take {of}={min(divisors, key=lambda d: abs(d - by))}, which divides it."
