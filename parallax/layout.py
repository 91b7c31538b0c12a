"""A frozen record of the number of devices on each mesh axis, the number of microbatches, and the
other choices of a parallel run.

    layout = Layout(data=2, tensor=4, zero=1)
    Layout.parse("data=2,tensor=4,zero=1") == Layout.from_json(layout.to_json()) == layout

This file does not import the modules that use JAX. `models.recipe` builds a run from a layout, and
`validate` refuses sizes that do not fit the layout. Each thing that is wrong is a *fault*.
`DEFAULTS` has the default of each field. Of the mesh axes in `AXES`, those in `ALWAYS` are in every
mesh, and those in `BATCH_AXES` split the batch by sequences. `validate.refusal` returns the error's
text, or None if there is no fault.
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

KNOWN_SIZES = {*validate.SIZES, *validate.OPTIONAL_SIZES}


@dataclasses.dataclass(frozen=True)
class Layout:
    """The sizes of a parallel run.

    The recipe of `models.decoder` makes the following choices by the kind of the mesh's devices;
    `Compute` overrides these choices:

    | | CPU | GPU | TPU |
    |---|---|---|---|
    | attention (`models.flash`) | the family's function | `cudnn_attention` | `attention` |
    | layers in a loop's body, ZeRO-3 | 2 | 2 | 1: with two the compiler copies stored arrays |
    | `jax.checkpoint`'s barrier for `remat` | yes | yes | no: stored arrays would be copied |
    | a pipeline's slots before the first write | zeros | not initialised | not initialised |
    | queries, keys and values, without stages | one product | one product | three products |
    | the gradient of a bias, without stages | a sum | a sum | a product with ones |

    The kernels `cudnn_attention` and `attention` do not store the attention scores, but compute
    them again in the backward pass.

    Args:
        data: the number of replicas, among which the batch is split.
        stage: the number of pipeline stages, among which the layers are split.
        tensor: the number of devices that share each layer's heads and hidden units.
        replica: the number of groups of `data` replicas, with a slower network between the groups
            (HSDP). Each group has a whole copy of the arrays that ZeRO splits over the `data`
            devices of the group. Gradients are reduced inside a group, and then each device's share
            of the gradients (1/n, for n devices in a group) is reduced between groups.
        expert: the number of devices among which each layer's experts are split; tokens travel to
            their experts. In all else the axis behaves like `data`: its devices take different
            sequences. But ZeRO splits nothing over this axis, only over `data` and `context`. See
            `parallax.experts`.
        context: the number of devices among which the tokens of each sequence are split; attention
            passes the keys and values around these devices. See `parallax.context`.
        microbatches: the number of parts of a replica's batch. The parts run one after another, or,
            with stages, follow each other through the stages; the gradients of all parts are
            accumulated.
        chunks: the number of chunks of layers on each stage; with more than 1, the pipeline is
            interleaved, and the idle time of the stages is smaller.
        zero: the stage of ZeRO; 0 means no ZeRO. From 1 on, the replicas split the optimizer's
            state, instead of each holding a copy; from 2 on, they also split the sums of gradients;
            at 3, also the parameters.
        sequence: whether the residual stream is split by tokens over the tensor axis.
        precision: the type that the model computes in. With `full` it is the type of the
            parameters; with `bfloat16` or `float16` the model computes with copies of the
            parameters in that type.
        remat: the values that the backward pass recomputes. `none`: nothing. `gathers`: the values
            that were gathered over devices. `attention`: the attention. `products`: all values but
            the results of matmuls with weights. `block`: all but each block's input. `stage`: all
            but each stage's input. See `parallax.remat`.
        schedule: the order in which the stages of a pipeline run the forward and backward passes of
            the microbatches: `one_f_one_b_lockstep` (the default; interleaved, if there are
            chunks), `gpipe`, `zero_bubble_lockstep`, `one_f_one_b` or `zero_bubble`. The last two
            hold fewer microbatches in flight than the others, and allow no collectives by `ring`
            inside a stage. `one_f_one_b_lockstep` allows chunks, and any collectives and
            recomputation in a stage. The others refuse some of these choices, or are slower with
            them. docs/pipeline.md has the measured times of all schedules.
        split_sends: whether each of the t devices of the tensor axis sends only 1/t of the
            activation to the next stage. All t devices hold the whole activation, and the next
            stage gathers the parts. Use `split_sends` for stages on different machines. See
            `pipeline.split_over`.
        processes: the number of processes, each of which drives equally many devices.

    Raises:
        ValueError: a size is below 1, or a choice is not known; a choice has no effect, such as
            chunks without stages; there are chunks, and the number of microbatches is not a
            multiple of the number of stages; or the number of devices is not a multiple of the
            number of processes. The message proposes the nearest layout that works.
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
        """Turns NumPy's numbers in the fields into Python's, and refuses fields that do not fit
        each other."""
        # JSON could not write NumPy's numbers, and equal layouts could have different hashes. A
        # field of a frozen class can be set only like this.
        for name, value in _as_python(vars(self)).items():
            object.__setattr__(self, name, value)
        self._refuse({})  # the model, batch and machine are not known here

    # Devices

    @property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh axes, for `mesh.make(**layout.axes)`: data, stage and tensor, and
        each other axis of more than one device."""
        sizes = {name: getattr(self, name) for name in AXES}
        return {name: size for name, size in sizes.items() if name in ALWAYS or size > 1}

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.axes.values())

    @property
    def replicas(self) -> int:
        """The number of parts of the batch, each of which is computed by one copy of the model;
        the copies along the axis `expert` share one set of experts."""
        return math.prod(self.axes[name] for name in self.batch_axes)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that split the batch by sequences, for the batch's `PartitionSpec`:
        `P(layout.batch_axes)`."""
        return tuple(name for name in BATCH_AXES if name in self.axes)

    def coordinates(self, device: int) -> dict[str, int]:
        """Returns the index of a device along each axis. Along the last axis the devices have
        successive numbers, as in a mesh.

        Raises:
            ValueError: the layout has no device with the number `device`.
        """
        places, number = {}, device
        for name in reversed(self.axes):
            number, places[name] = divmod(number, self.axes[name])
        # `number` is the last quotient: 0 if the device exists.
        if number or device < 0:
            last = self.devices - 1
            raise ValueError(
                f"Layout has devices 0 to {last}; got device={device}. Use device={last}."
            )
        return {name: places[name] for name in self.axes}

    def group(self, device: int, *axis_names: str) -> list[int]:
        """Returns the devices with which `device` communicates along these axes, `device` included.
        The devices are in ascending order, which is also their order in a ring.

        Raises:
            ValueError: there is no such axis, or no such device.
        """
        unknown = [name for name in axis_names if name not in AXES]
        if unknown:
            raise ValueError(
                f"Layout has the axes {', '.join(AXES)}; got {unknown[0]!r}. Use one of those."
            )
        # A group has all devices that have the same index along the other axes.
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

    # The batch and the shards, for the recipe and the plan

    def global_batch(self, sequences: int) -> int:
        """Returns the number of sequences of a step, for microbatches of `sequences` sequences on
        each device."""
        return sequences * self.microbatches * self.replicas

    def sequences(self, batch: int) -> int:
        """Returns the number of sequences of one microbatch on a device, for a global `batch` that
        is a multiple of `replicas` x `microbatches`."""
        return batch // (self.microbatches * self.replicas)

    @property
    def pipelined(self) -> bool:
        """Whether the layers are split over stages."""
        return self.stage > 1

    @property
    def optimizer_shards(self) -> int:
        """The number of devices among which ZeRO splits the optimizer's state; 1 without ZeRO."""
        return self.data * self.context if self.zero >= 1 else 1

    @property
    def gradient_shards(self) -> int:
        """The number of devices among which ZeRO splits the sums of gradients; 1 if `zero` is less
        than 2."""
        return self.data * self.context if self.zero >= 2 else 1

    @property
    def parameter_shards(self) -> int:
        """The number of devices among which ZeRO-3 splits the parameters; 1 without ZeRO-3."""
        return self.data * self.context if self.zero == 3 else 1

    @property
    def token_shards(self) -> int:
        """The number of tensor devices among which the residual stream is split by tokens; 1
        without `sequence`."""
        return self.tensor if self.sequence else 1

    # Checks

    @classmethod
    def admits(cls, **fields: Any) -> bool:
        """Returns whether these fields, with all others at their defaults, make a valid layout.
        Unknown names make none."""
        if not fields.keys() <= DEFAULTS.keys():
            return False
        return validate.fits(DEFAULTS | _as_python(fields), {})

    def check(self, sizes: Mapping[str, int | np.integer]) -> None:
        """Raises `ValueError` if a model, a global batch (in sequences) or a machine does not fit
        this layout.

            layout.check(config.sizes | {"batch": 64, "devices": 8})

        Args:
            sizes: layers, heads, hidden, rows (of the padded vocabulary), tokens (of a sequence)
                and batch; and any of experts, devices and processes.

        Raises:
            ValueError: a size is missing or has another name, or does not fit. The message proposes
                the nearest sizes that fit in every respect.
        """
        if not {*validate.SIZES} <= sizes.keys() <= KNOWN_SIZES:
            raise ValueError(
                f"Layout.check needs the sizes {', '.join(validate.SIZES)}, and may have "
                f"{', '.join(validate.OPTIONAL_SIZES)}; got {', '.join(sizes) or 'none'}. Use "
                'config.sizes | {"batch": sequences}.'
            )
        self._refuse(dict(sizes))

    def _refuse(self, sizes: dict[str, Any]) -> None:
        """Raises `ValueError` if the fields are wrong, or do not fit these sizes; without sizes,
        only the fields are checked."""
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
        cls,
        text: str,
        sizes: Mapping[str, int | np.integer] | None = None,
        wording: Wording = validate.TEXT,
    ) -> "Layout":
        """Returns the layout that a command line writes as `data=2,tensor=4,sequence=True`.

        Args:
            text: the parts `name=value`, separated by commas.
            sizes: sizes that the layout must fit, such as layers, batch and devices: any of those
                that `check` takes.
            wording: how an error writes the layout that it proposes; by default as the whole
                corrected text.

        Raises:
            ValueError: a part is not `name=value`, a name or a value is not known, or a name is
                given twice; or the fields do not make a valid layout, or do not fit the sizes.
        """
        if unknown := [name for name in sizes or () if name not in KNOWN_SIZES]:
            raise ValueError(
                f"Layout.parse takes the sizes {', '.join(sorted(KNOWN_SIZES))}; got "
                f"{unknown[0]!r}. Use {validate.most_like(unknown[0], sorted(KNOWN_SIZES))!r}."
            )
        # All parts are read before the first fault is raised, so that the proposal has all fields.
        # `misread` has a sentence for each faulty part. `_known_name` adds one for an unknown name,
        # and returns the name of closest spelling. `_value_of_bare` gives a part without a value
        # the value for the proposal. `_read` refuses wrong values.
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
        return cls._read(fields, _as_python(sizes or {}), wording, misread)

    @classmethod
    def from_json(cls, text: str) -> "Layout":
        """Returns the layout that `to_json` wrote; fields that are missing have their defaults.

        Raises:
            ValueError: the text is not JSON of one object; a name or a value is not known, or a
                name is given twice; or the fields do not make a valid layout.
        """
        try:
            values = json.loads(text, object_pairs_hook=_each_name_once)
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
        # `_known_name` replaces an unknown name by the field of closest spelling, and adds a
        # sentence about it to `misread`. `_read` raises an error that begins with the first such
        # sentence and proposes the corrected fields. `{}`: there are no sizes to fit.
        misread: list[str] = []
        fields = {_known_name(name, misread): value for name, value in values.items()}
        return cls._read(fields, {}, validate.JSON, misread)

    @classmethod
    def _read(
        cls, written: dict[str, Any], sizes: dict[str, Any], wording: Wording, misread: list[str]
    ) -> "Layout":
        """Returns the layout of the fields `written`, or raises `ValueError` with the first fault.

        The fields were read from a text of `name=value` parts, or from JSON. `misread` has a
        sentence for each mistake in this text. In `written`, each unknown name is already replaced
        by the name of the field that the error message proposes. The layout must fit `sizes`, the
        sizes of a model and a batch; if `sizes` is empty, only the fields are checked. `wording`
        says how the message writes the corrected fields.
        """
        # If the text has a mistake, there is always an error message, which begins with the first
        # mistake. The proposal has the fields in `written` and the fields that it changes, but no
        # others.
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
    """Returns `values` with NumPy's integers and booleans as Python's, which JSON can write."""
    return {
        name: value.item() if isinstance(value, np.integer | np.bool_) else value
        for name, value in values.items()
    }


def _each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the members of a JSON object as a dict. Raises `ValueError` if one name has two
    values: `json` would take the last."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name} is given twice, as {values[name]} and {value}")
        values[name] = value
    return values


def _typed(name: str, text: str) -> Any:
    """Returns `text` as a value of the type of the field `name`; a text that is no such value is
    returned unchanged, for `validate` to refuse."""
    kind = type(DEFAULTS[name])
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    # No field has 20 digits: such a text is refused later. (`int` would raise an error of its own
    # for thousands of digits.)
    is_number = text.removeprefix("-").isdecimal() and len(text) < 20
    return int(text) if kind is int and is_number else text


def _value_of_bare(name: str) -> Any:
    """Returns the value to propose for a field that is written without a value: True for a boolean
    field, such as `sequence`, else the field's default."""
    return True if isinstance(DEFAULTS[name], bool) else DEFAULTS[name]


def _known_name(name: str, misread: list[str]) -> str:
    """Returns `name` if there is such a field. Otherwise returns the field with the closest
    spelling, and adds a sentence about the mistake to the list `misread`. The caller raises an
    error that begins with the first of these sentences, and proposes the corrected fields."""
    if name in DEFAULTS:
        return name
    misread.append(f"Layout has the fields {', '.join(DEFAULTS)}; got {name!r}.")
    return validate.most_like(name, list(DEFAULTS))
