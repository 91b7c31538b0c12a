"""How many devices each axis gets, and how a batch is cut: a frozen record of numbers and words.

    layout = Layout(data=2, tensor=4, zero=1)
    Layout.parse("data=2,tensor=4,zero=1") == Layout.from_json(layout.to_json()) == layout

It imports nothing of the core. `models.recipe` reads it from top to bottom, `validate` refuses
sizes that do not fit.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from parallax import validate
from parallax.validate import (
    ALWAYS,
    AXES,
    BATCH_AXES,
    DEFAULTS,
    Precision,
    Remat,
    ScheduleName,
    Wording,
)

__all__ = ["AXES", "Layout", "Precision", "Remat", "ScheduleName"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sizes of a parallel run.

    The recipe of `models.decoder` chooses the rest by the devices of the mesh; `Compute` overrides
    it:

    | | CPU, GPU | TPU |
    |---|---|---|
    | attention | the family's plain function | `models.flash.attention`, which keeps no scores |
    | layers in a loop's body, ZeRO-3 | 2 | 1: with two the compiler copies all that is kept |
    | `jax.checkpoint`'s barrier for `remat` | yes | no: what is kept would be copied |
    | a pipeline's first slots | zeros on CPUs | as they are |

    Args:
        data: replicas, among which the batch is split.
        stage: pipeline stages, among which the layers are split.
        tensor: devices that share each layer's heads and hidden units.
        replica: groups of replicas, each of which has all that ZeRO splits over `data`: gradients
            are reduced inside a group, and then their shares between groups, 1/n of the bytes. For
            groups that a slower network joins (HSDP).
        expert: devices, each of which sees a part of the batch too, among which each layer's
            experts are split: tokens travel to their experts. All else is the same on them, as on
            `data`; ZeRO's shares are among `data` and `context` alone. See `parallax.experts`.
        context: devices among which the tokens of each sequence are split; attention goes round
            them. See `parallax.context`.
        microbatches: parts of a replica's batch, one after another (or, with stages, one behind
            another); their gradients are accumulated.
        chunks: chunks of layers on each stage: more than 1 is the interleaved pipeline, with a
            smaller bubble.
        zero: what the replicas split instead of holding copies of: 1 the optimizer's state, 2 the
            sums of gradients too, 3 the parameters too.
        sequence: whether the residual stream is split by tokens over the tensor axis.
        precision: the type that the model computes in: that of its parameters (`full`), or
            `bfloat16` or `float16` beside them.
        remat: what the backward pass computes again instead of keeping: `none`, `gathers` (what was
            gathered over devices), `attention`, all but the `products` with weights, all but a
            `block`'s input, or all but a `stage`'s. See `parallax.remat`.
        schedule: the order of a pipeline's jobs: `one_f_one_b_lockstep` (with chunks, interleaved),
            `gpipe`, `zero_bubble_lockstep`, or, with fewer microbatches in flight and no ring
            inside a stage, `one_f_one_b` or `zero_bubble`. The default allows any collectives in a
            stage, chunks, and recomputation, which makes the others slower; docs/pipeline.md has
            the measured times of all.
        split_sends: whether each of the t devices of the tensor axis, which all have what goes from
            stage to stage, sends 1/t of it, and gathers what came: for stages on different
            machines. See `pipeline.split_over`.
        processes: that drive the devices, each as many as the others.

    Raises:
        ValueError: a size below 1, or a choice that is not known; a choice that has nothing to act
            on; chunks and microbatches that are no multiple of the stages; processes that do not
            divide the devices. The message proposes the nearest layout that works.
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
    schedule: str = "one_f_one_b_lockstep"  # one of `ScheduleName`
    split_sends: bool = False
    processes: int = 1
    context: int = 1
    replica: int = 1
    expert: int = 1

    def __post_init__(self):
        # The class is frozen. NumPy's numbers would not become JSON, and two equal layouts would
        # have two hashes.
        for name, value in _as_python(vars(self)).items():
            object.__setattr__(self, name, value)
        self._refuse({})

    # Devices

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes, for `mesh.make(**layout.axes)`: data, stage and tensor, and each other
        axis above 1."""
        sizes = {name: getattr(self, name) for name in AXES}
        return {name: size for name, size in sizes.items() if name in ALWAYS or size > 1}

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.axes.values())

    @property
    def replicas(self) -> int:
        """Copies of the model (but for the experts that it splits), each of which sees a part of
        the batch."""
        return math.prod(self.axes[name] for name in self.batch_axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch by sequences, for its `PartitionSpec`:
        `P(layout.batch_axes)`."""
        return tuple(name for name in BATCH_AXES if name in self.axes)

    def coordinates(self, device: int) -> dict[str, int]:
        """Returns the place of a device along each axis. Devices are numbered with the last axis
        fastest, as in a mesh.

        Raises:
            ValueError: there is no such device.
        """
        places, number = {}, device
        for name in reversed(self.axes):
            number, places[name] = divmod(number, self.axes[name])
        if number or device < 0:
            last = self.devices - 1
            raise ValueError(
                f"Layout has devices 0 to {last}; got device={device}. Use device={last}."
            )
        return {name: places[name] for name in self.axes}

    def group(self, device: int, *axis_names: str) -> list[int]:
        """Returns the devices that `device` works with along these axes, itself among them, in the
        order of their ring.

        Raises:
            ValueError: there is no such axis, or no such device.
        """
        unknown = [name for name in axis_names if name not in AXES]
        if unknown:
            raise ValueError(
                f"Layout has the axes {', '.join(AXES)}; got {unknown[0]!r}. Use one of those."
            )
        fixed = {
            name: place
            for name, place in self.coordinates(device).items()
            if name not in axis_names
        }
        return [
            number
            for number in range(self.devices)
            if fixed.items() <= self.coordinates(number).items()
        ]

    # The batch and the shards, as the recipe and the plan ask for them

    def global_batch(self, sequences: int) -> int:
        """Returns the sequences of a step in which each microbatch has `sequences` on a device."""
        return sequences * self.microbatches * self.replicas

    def sequences(self, batch: int) -> int:
        """Returns the sequences of one microbatch on a device, of a global batch that `check`
        admits."""
        return batch // (self.microbatches * self.replicas)

    @property
    def pipelined(self) -> bool:
        """Whether the layers are split over stages."""
        return self.stage > 1

    @property
    def optimizer_shards(self) -> int:
        """Devices among which the optimizer's state is split: 1 without ZeRO."""
        return self.data * self.context if self.zero >= 1 else 1

    @property
    def gradient_shards(self) -> int:
        """Devices among which the sums of gradients are split: more than 1 from ZeRO-2 on."""
        return self.data * self.context if self.zero >= 2 else 1

    @property
    def parameter_shards(self) -> int:
        """Devices among which the parameters are split: more than 1 for ZeRO-3."""
        return self.data * self.context if self.zero == 3 else 1

    @property
    def token_shards(self) -> int:
        """Devices of the tensor axis among which the residual stream is split by tokens."""
        return self.tensor if self.sequence else 1

    # Checks

    @classmethod
    def admits(cls, **fields: Any) -> bool:
        """Returns whether there is a layout of these fields, the others at their defaults."""
        return validate.fits(DEFAULTS | _as_python(fields), {})

    def check(self, sizes: Mapping[str, int]) -> None:
        """Refuses a model, a global batch (in sequences) or a machine that this layout does not
        fit.

            layout.check(config.sizes | {"batch": 64, "devices": 8})

        Args:
            sizes: layers, heads, hidden, rows, tokens and batch; where they are known, experts,
                devices and processes too.

        Raises:
            ValueError: a size is missing or has another name; or what was needed, what came, and
                the nearest sizes that work in every respect.
        """
        needed, optional = {*validate.SIZES}, {*validate.OPTIONAL_SIZES}
        if not needed <= sizes.keys() <= needed | optional:
            raise ValueError(
                f"Layout.check needs the sizes {', '.join(validate.SIZES)}, and may have "
                f"{', '.join(validate.OPTIONAL_SIZES)}; got {', '.join(sizes) or 'none'}. Use "
                'config.sizes | {"batch": sequences}.'
            )
        self._refuse(dict(sizes))

    def _refuse(self, sizes: dict[str, Any]) -> None:
        message = validate.refusal(vars(self), _as_python(sizes))
        if message is not None:
            raise ValueError(message)

    # Text and JSON

    def __str__(self) -> str:
        """Returns the fields that differ from their defaults, as `parse` reads them:
        `data=2,tensor=4`."""
        return validate.as_text(
            {name: value for name, value in vars(self).items() if value != DEFAULTS[name]}
        )

    @classmethod
    def parse(
        cls, text: str, sizes: Mapping[str, int] | None = None, wording: Wording = validate.TEXT
    ) -> "Layout":
        """Returns the layout that a command line writes as `data=2,tensor=4,sequence=True`.

        Args:
            text: parts separated by commas.
            sizes: sizes that it must fit, by the names of `check`'s arguments; any of them.
            wording: of the message; by default it proposes the whole text.

        Raises:
            ValueError: a part that is no `name=value`, an unknown name or value, a name twice; or
                as `Layout` does.
        """
        # All parts are read before the first fault is told, so that the proposal has the others.
        misread, fields = [], {}
        for part in filter(None, text.replace(" ", "").split(",")):
            name, equals, value = part.partition("=")
            if not equals:
                misread.append(
                    f"Layout.parse needs parts like data=2, set apart by commas; got {part!r}."
                )
            name = _known_name(name, misread)
            if name in fields:
                misread.append(
                    f"Layout.parse: {name} is given twice, as {fields[name]} and {value}."
                )
            fields[name] = _typed(name, value) if equals else _value_of_bare(name)
        return cls._read(fields, dict(sizes or {}), wording, misread)

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        """Returns the layout that `to_json` wrote; fields that are absent have their defaults.

        Raises:
            ValueError: as `parse` does.
        """
        try:
            values = json.loads(text)
        # Deeply nested JSON ends in a RecursionError.
        except (ValueError, RecursionError) as error:
            example = Layout().to_json()
            raise ValueError(
                f"Layout.from_json: {error}. Use the text of to_json, such as {example}"
            ) from error
        if not isinstance(values, dict):
            raise ValueError(
                f"Layout.from_json needs an object; got {values!r}. Use one such as "
                f"{Layout().to_json()}"
            )
        misread: list[str] = []
        fields = {_known_name(name, misread): value for name, value in values.items()}
        return cls._read(fields, {}, validate.JSON, misread)

    @classmethod
    def _read(
        cls, written: dict[str, Any], sizes: dict[str, Any], wording: Wording, misread: list[str]
    ) -> "Layout":
        """Returns the layout of the fields that were read; `misread` are the faults of the text
        that they already mend."""
        message = validate.refusal(
            DEFAULTS | written, sizes, wording, written=written, misread="".join(misread[:1])
        )
        if message is not None:
            raise ValueError(message)
        return cls(**written)

    def to_json(self) -> str:
        """Returns all fields, as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))


def _as_python(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `values` with Python's whole numbers and truth values in the place of NumPy's."""
    return {
        name: value.item() if isinstance(value, np.integer | np.bool_) else value
        for name, value in values.items()
    }


def _typed(name: str, text: str) -> Any:
    """Returns `text` in the type of the field `name`; unchanged where it is not of that type."""
    kind = type(DEFAULTS[name])
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    # Python refuses to read a number of thousands of digits, with an error of its own.
    is_number = text.removeprefix("-").isdecimal() and len(text) < 20
    return int(text) if kind is int and is_number else text


def _value_of_bare(name: str) -> Any:
    """Returns the value of a field that is named without one."""
    return True if isinstance(DEFAULTS[name], bool) else DEFAULTS[name]


def _known_name(name: str, misread: list[str]) -> str:
    """Returns the field of this `name`; else the one with the closest spelling, with a fault added
    to `misread`."""
    if name in DEFAULTS:
        return name
    misread.append(f"Layout has the fields {', '.join(DEFAULTS)}; got {name!r}.")
    return validate.most_like(name, list(DEFAULTS))
