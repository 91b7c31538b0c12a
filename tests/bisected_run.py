"""A split run beside the record of one device:
`python bisected_run.py FOLDER "gpt2; data=2,tensor=2; ring"`.

Prints what differs first. A run is a kind of model, a layout, and who moves the data, by default
rings. The record of one device is made in the folder where there is none. Then the package must be
the right one.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tapped_net

from parallax import bisect, collectives, mesh
from parallax.collectives import execute
from parallax.layout import Layout
from parallax.models import decoder, gpt2, llama

BATCH = 8
SIZES: dict[str, Any] = {
    "layers": 2,
    "heads": 4,
    "width": 8,
    "context": 8,
    "vocabulary": 19,
    "vocabulary_multiple": 4,
}
CONFIG = gpt2.Config(**{**SIZES, "heads": 2, "context": 4}, dropout=0.2)
LLAMA: dict[str, Any] = {"groups": 2, "hidden": 12}
DECODERS: dict[str, tuple[Any, Any]] = {
    "gpt2": (gpt2.FAMILY, CONFIG),
    "gpt2 of 8 tokens": (gpt2.FAMILY, gpt2.Config(**SIZES, dropout=0.2)),
    "llama": (llama.FAMILY, llama.Config(**SIZES, **LLAMA)),
    "experts": (
        llama.FAMILY,
        llama.Config(**SIZES, **LLAMA, experts=4, chosen=2, balance=0.3, z=0.05),
    ),
}
ALGORITHMS = {"looped": collectives.ring} | {
    name: getattr(collectives, name) for name in ("ring", "two_rings", "halving")
}


class Run(NamedTuple):
    """A step to be recorded.

    Attributes:
        kind: "own", or one of `DECODERS`.
        layout: its layout.
        algorithm: who moves the data, by its name in `ALGORITHMS`; "looped" is a ring whose hops
            are a loop, as those of many devices.
    """

    kind: str
    layout: Layout = Layout()
    algorithm: str = "ring"

    @classmethod
    def parse(cls, text: str) -> "Run":
        """The run of a kind, a layout and an algorithm, with "; " between."""
        kind, layout, *algorithm = text.split("; ")
        return cls(kind, Layout.parse(layout), *algorithm)

    def record(self) -> bisect.Record:
        """What it computes."""
        with jax.numpy_dtype_promotion(
            "standard"
        ):  # optax mixes float32 schedules with float64 weights
            return bisect.record(self.prepared(), rows=self.layout.batch_axes, means=("context",))

    def prepared(self) -> Any:
        """What `bisect.record` takes."""
        algorithm = (
            collectives.xla
            if self.layout.schedule in ("one_f_one_b", "zero_bubble")
            else ALGORITHMS[self.algorithm]
        )
        execute.UNROLLED = 1 if self.algorithm == "looped" else 8
        if self.kind == "own":
            fields = {
                name: getattr(self.layout, name)
                for name in ("data", "stage", "tensor", "microbatches", "chunks", "zero")
            }
            return tapped_net.run(**fields, schedule=self.layout.schedule, algorithm=algorithm)
        family, config = DECODERS[self.kind]
        return decoder_run(family, config, self.layout, algorithm)


def decoder_run(
    family: Any,
    config: Any,
    layout: Layout,
    algorithm: Any = collectives.ring,
    dtype: Any = jnp.float64,
) -> Any:
    """What `bisect.record` takes, of a decoder."""

    def make():
        devices = mesh.make(devices=jax.devices()[: layout.devices], **layout.axes)
        windows = (
            np.random.default_rng(0)
            .integers(0, config.vocabulary, (BATCH, config.context + 1))
            .astype(np.int32)
        )
        axes = {name: algorithm(name) for name in layout.axes}
        compute = decoder.Compute(axes=axes, dtype=dtype, max_norm=0.5)
        options = {"batch": BATCH, "key": jax.random.key(0), "compute": compute}
        prepared = decoder.train_step(
            family, config, optax.sgd(0.1, momentum=0.9), layout, devices, **options
        )
        return prepared.train, (prepared.init(), windows)

    return make


def said(run: Run, folder: Path) -> list[Any]:
    """The first difference, in the words of `bisected.Said`."""
    stored = folder / f"{run.kind}.npz"
    if not stored.exists():
        Run(run.kind).record().save(stored)
    found = bisect.compare(bisect.load(stored), run.record()).first
    if found is None:
        return ["equal", ""]
    lies = ((), (), ())
    if program_slice := found.program_slice:
        lies = found.collectives_between, program_slice.functions, sorted(program_slice.callers)
    return ["found", str(found.key), found.diagnosis, *lies]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    text = sys.argv[2]
    try:
        found = said(Run.parse(text), Path(sys.argv[1]))
    except Exception as error:  # a fault that says so
        found = ["raised", f"{type(error).__name__}: {error}"[:200]]
    print(json.dumps([text, *found]))
