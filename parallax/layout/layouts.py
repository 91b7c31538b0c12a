"""How many devices each axis gets, and how a batch is cut: a frozen record, checked against the model, the batch and the machine.

layout = Layout(data=2, tensor=4, zero=1)
Layout.parse("data=2,tensor=4,zero=1") == Layout.from_json(layout.to_json()) == layout
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from parallax.layout import nearest
from parallax.layout.nearest import ALWAYS, AXES, BATCH, JSON, TEXT, USUAL, Order, Precision, Remat, Terms

__all__ = ["AXES", "Layout", "Order", "Precision", "Remat"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sizes of a parallel run.

    What it leaves open, the recipe of `models.decoder` chooses by the devices of the mesh; `Compute` has other choices:

    | | CPU, GPU | TPU |
    |---|---|---|
    | attention | the family's plain function | a kernel that keeps no scores, `models.flash.attention` |
    | layers in a loop's body, ZeRO-3 | 2 | 1, as with two the compiler copies all that is kept |
    | what `remat` keeps | behind `jax.checkpoint`'s barrier | without it, or it is copied out of the loop's stacks |
    | a pipeline's slots | zeros on CPUs | as they are |

    Args:
        data: replicas, among which the batch is split.
        stage: pipeline stages, among which the layers are split.
        tensor: devices that share each layer's heads and hidden units.
        replica: groups of replicas, each of which has all that ZeRO splits over `data`: gradients are reduced inside a group,
            and then their shares between groups, 1/n of the bytes. For groups that a slower network joins (HSDP).
        expert: devices, each of which sees a part of the batch too, among which each layer's experts are split: tokens travel to
            their experts. All else is the same on them, as on `data`; ZeRO's shares are among `data` and `context` alone. See
            `parallax.experts`.
        context: devices among which the tokens of each sequence are split; attention goes round them. See `parallax.context`.
        microbatches: parts of a replica's batch, one after another (or, with stages, one behind another); their gradients
            are accumulated.
        chunks: chunks of layers on each stage: more than 1 is the interleaved pipeline, with a smaller bubble.
        zero: what the replicas split instead of holding copies of: 1 the optimizer's state, 2 the sums of gradients too, 3 the
            parameters too.
        sequence: whether the residual stream is split by tokens over the tensor axis.
        precision: the type that the model computes in: that of its parameters (`full`), or `bfloat16` or `float16` beside them.
        remat: what the backward pass computes again instead of keeping: `none`, `gathers` (what was gathered over devices),
            `attention`, all but the `products` with weights, all but a `block`'s input, or all but a `stage`'s. See
            `parallax.remat`.
        schedule: the order of a pipeline's jobs: `one_f_one_b` (with chunks, interleaved), `gpipe`, `zero_bubble`, or, with fewer
            microbatches in flight and no ring inside a stage, `one_f_one_b_in_turns` or `zero_bubble_in_turns`.
        split_sends: whether each of the t devices of the tensor axis, which all have what goes from stage to stage, sends 1/t of
            it, and gathers what came: for stages on different machines. See `pipeline.split_over`.
        processes: that drive the devices, each as many as the others.

    Raises:
        ValueError: a size below 1, or a choice that is not known; a choice that has nothing to act on; chunks and microbatches
            that are no multiple of the stages; processes that do not divide the devices. The message proposes the nearest layout
            that works.
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
    schedule: str = "one_f_one_b"  # one of `Order`
    split_sends: bool = False
    processes: int = 1
    context: int = 1
    replica: int = 1
    expert: int = 1

    def __post_init__(self):
        for name, value in _plain(vars(self)).items():
            object.__setattr__(self, name, value)
        self._refuse({})

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes, for `mesh.make(**layout.axes)`: data, stage and tensor, and the others where they are more than 1."""
        sizes = {name: getattr(self, name) for name in AXES}
        return {name: size for name, size in sizes.items() if name in ALWAYS or size > 1}

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return math.prod(self.axes.values())

    @property
    def replicas(self) -> int:
        """Copies of the model, of all but what experts it splits, each of which sees a part of the batch."""
        return math.prod(self.axes[name] for name in self.batch_axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch by sequences, for its `PartitionSpec`: `P(layout.batch_axes)`."""
        return tuple(name for name in BATCH if name in self.axes)

    def global_batch(self, sequences: int) -> int:
        """The sequences of a step in which each microbatch has `sequences` on a device."""
        return sequences * self.microbatches * self.replicas

    def sequences(self, batch: int) -> int:
        """The sequences of one microbatch on a device, of a global batch that `check` admits."""
        return batch // (self.microbatches * self.replicas)

    def coordinates(self, device: int) -> dict[str, int]:
        """Where a device stands along each axis. Devices are numbered with the last axis running fastest, as meshes are.

        Raises:
            ValueError: there is no such device.
        """
        found, left = {}, device
        for name in reversed(self.axes):
            left, found[name] = divmod(left, self.axes[name])
        if left or device < 0:
            raise ValueError(f"Layout has devices 0 to {self.devices - 1}; got device={device}. Take device={self.devices - 1}.")
        return {name: found[name] for name in self.axes}

    def group(self, device: int, *axis_names: str) -> list[int]:
        """The devices that `device` works with along these axes, itself among them, in the order of their ring.

        Raises:
            ValueError: there is no such axis, or no such device.
        """
        unknown = [name for name in axis_names if name not in AXES]
        if unknown:
            raise ValueError(f"Layout has the axes {', '.join(AXES)}; got {unknown[0]!r}. Take one of those.")
        own = self.coordinates(device)
        return [
            other
            for other in range(self.devices)
            if all(place == own[name] for name, place in self.coordinates(other).items() if name not in axis_names)
        ]

    @classmethod
    def admits(cls, **fields: Any) -> bool:
        """Whether there is a layout of these fields; the rest are as by default."""
        return nearest.fits(USUAL, {}, _plain(fields))

    def check(
        self,
        *,
        layers: int,
        heads: int,
        hidden: int,
        rows: int,
        batch: int,
        tokens: int,
        experts: int | None = None,
        devices: int | None = None,
        processes: int | None = None,
    ) -> None:
        """Refuse with a `ValueError` a model, a global batch (in sequences of `tokens`) or a machine that these sizes do not fit.

        The message says what was needed, what came, and the nearest sizes that work in every respect. The processes of the
        machine have as many of its devices each.
        """
        sizes = {"layers": layers, "heads": heads, "hidden": hidden, "rows": rows, "batch": batch, "tokens": tokens}
        more = {"experts": experts, "devices": devices, "processes": processes}
        self._refuse(sizes | {name: size for name, size in more.items() if size is not None})

    def _refuse(self, sizes: dict[str, Any]) -> None:
        message = nearest.refusal(vars(self), _plain(sizes))
        if message is not None:
            raise ValueError(message)

    def __str__(self) -> str:
        """What differs from the default, as `parse` reads it: `data=2,tensor=4`."""
        return nearest.spelt({name: value for name, value in vars(self).items() if value != USUAL[name]})

    @classmethod
    def parse(cls, text: str, sizes: Mapping[str, int] | None = None, terms: Terms = TEXT) -> "Layout":
        """The layout that `text` spells, as a command line does: `data=2,tensor=4,sequence=True`.

        Args:
            text: parts set apart by commas.
            sizes: the sizes that it must fit, by the names of `check`'s arguments; any of them.
            terms: of the message; by default it proposes the whole text.

        Raises:
            ValueError: a part that is no `name=value`, a name or value that is not known, a name twice; or as the layout's own.
        """
        wrong, values = [], {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, equals, value = part.partition("=")
            if not equals:
                wrong.append(f"Layout.parse needs parts like data=2, set apart by commas; got {part!r}.")
            name = _known(name, wrong)
            if name in values:
                wrong.append(f"Layout.parse: {name} is given twice, as {values[name]} and {value}.")
            values[name] = _typed(name, value) if equals else _alone(name)
        return cls._of(values, dict(sizes or {}), terms, wrong)

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        """The layout that `to_json` wrote; what it leaves out is as by default. Raises `ValueError`, as `parse` does."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"Layout.from_json: {error}. Take the text of to_json, such as {Layout().to_json()}") from error
        if not isinstance(values, dict):
            raise ValueError(f"Layout.from_json needs an object; got {values!r}. Take one such as {Layout().to_json()}")
        wrong: list[str] = []
        known: dict[str, Any] = {}
        for name, value in values.items():
            known[_known(name, wrong)] = value
        return cls._of(known, {}, JSON, wrong)

    @classmethod
    def _of(cls, written: dict[str, Any], sizes: dict[str, Any], terms: Terms, wrong: list[str]) -> "Layout":
        """The layout of the fields that were read; `wrong` is what was put right in them."""
        message = nearest.refusal(USUAL | written, sizes, terms, written=written, read="".join(wrong[:1]))
        if message is not None:
            raise ValueError(message)
        return cls(**written)

    def to_json(self) -> str:
        """All fields, as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with Python's whole numbers and truth values in the place of NumPy's."""
    return {name: value.item() if isinstance(value, np.integer | np.bool_) else value for name, value in values.items()}


def _typed(name: str, text: str) -> Any:
    """`text` in the type of the field `name`; as it is where it is not of that type."""
    kind = type(USUAL[name])
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if kind is int and text.removeprefix("-").isdecimal() and len(text) < 20 else text


def _alone(name: str) -> Any:
    """The value of a field that is named without one."""
    return True if isinstance(USUAL[name], bool) else USUAL[name]


def _known(name: str, wrong: list[str]) -> str:
    """The field of this `name`; else the one that is spelt most like it, and `wrong` tells."""
    if name in USUAL:
        return name
    wrong.append(f"Layout has the fields {', '.join(USUAL)}; got {name!r}.")
    return nearest.most_like(name, list(USUAL))
