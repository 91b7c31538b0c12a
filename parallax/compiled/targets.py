"""Programs for accelerators that are not there: the real TPU and GPU compilers run on any machine.

    there = targets.target("v5e:2x4")                     # or "8 x h100", "2 x v5e:4x4", "16 x h100"
    world = mesh.make(devices=there.devices, data=4, tensor=2)
    program = targets.compile(train, shapes, windows, target=there)

`shapes` are `jax.ShapeDtypeStruct`s with shardings on a mesh of the target's devices, as a decoder's `prepare` gives them. The
TPU's compiler comes with `pip install -e ".[tpu]"`, the GPU's with `".[gpu-compile]"`, each in an environment
of its own. Nothing is run, and no device is asked for.
"""

import contextlib
import importlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from parallax.compiled import certificate, links, memory, timeline
from parallax.compiled.certificate import Entry
from parallax.hardware import KNOWN, Hardware

MACHINE = 8  # GPUs that one switch joins
# What compilers need to know of a GPU beside its rates: cores, threads, memory near them, clock, the version of its instructions.
GPUS = {
    "a100": (8, 0, 108, 64, 167936, 166912, 41943040, 1.41, "NVIDIA A100-SXM4-80GB"),
    "h100": (9, 0, 132, 128, 233472, 232448, 52428800, 1.98, "NVIDIA H100 80GB HBM3"),
    "h200": (9, 0, 132, 128, 233472, 232448, 52428800, 1.98, "NVIDIA H200"),
    "b200": (10, 0, 148, 128, 233472, 232448, 132644864, 1.965, "NVIDIA B200"),
}
CHIPS = {name: chip for name, chip in KNOWN.items() if chip.platform == "tpu" or name in GPUS}
# What a TPU's compiler says of a step that does not fit, in libtpu 0.0.42 and before it.
FULL = re.compile(r"(?:Used |\()([\d.]+\w)\)? (?:of|exceeds available \w+) \(?([\d.]+\w)")
NAME = re.compile(r"(?:(\d+) ?x ?)?([a-z]+\d+[a-z]*)(?::(\d+(?:x\d+)*))?$")


class Target(NamedTuple):
    """Devices to compile for.

    Attributes:
        name: as "v5e:2x4" or "8 x h100".
        chip: as "v5e" or "h100".
        hardware: one of the chips.
        devices: that a mesh can be made of; they run nothing.
        cores: devices that share a chip.
    """

    name: str
    chip: str
    hardware: Hardware
    devices: tuple[Any, ...]
    cores: int

    @property
    def memory(self) -> float:
        """Bytes of a device."""
        return self.hardware.memory / self.cores

    def machine(self, mesh: Mesh) -> links.Machine:
        """The links between the devices of a mesh, in its order."""
        devices = list(mesh.devices.flat)
        groups = [getattr(device, "slice_index", None) or 0 for device in devices]
        if self.hardware.platform == "tpu":
            return links.torus(self.hardware, [device.coords for device in devices], groups)
        machines = tuple(device.process_index for device in devices)
        return links.switch(self.hardware, len(devices))._replace(groups=machines)


class Program(NamedTuple):
    """A step compiled for a target.

    Attributes:
        compiled: the program.
        target: what it was compiled for.
        mesh: of the target's devices.
    """

    compiled: jax.stages.Compiled
    target: Target
    mesh: Mesh

    @property
    def text(self) -> str:
        """The program, in the order in which it runs."""
        return self.compiled.as_text() or ""

    @property
    def memory(self) -> dict[str, int]:
        """Bytes on a device, as `memory.of` has them."""
        return memory.of(self.compiled)

    @property
    def fits(self) -> bool:
        """Whether a device has the memory."""
        return self.memory["peak"] <= self.target.memory

    def certificate(self) -> list[Entry]:
        """Its collectives, by axes of the mesh."""
        return certificate.read(self.text, self.mesh)

    def by_link(self) -> dict[str, int]:
        """Bytes that all devices together send over each kind of link: "link" inside a slice or machine, "network" between."""
        return links.by_kind(self.text, self.target.machine(self.mesh))

    def timeline(self) -> timeline.Timeline:
        """Its estimated time."""
        return timeline.of(self.text, self.target.machine(self.mesh), dict(self.mesh.shape))


def target(name: str) -> Target:
    """The devices of a machine, by name: a TPU's topology, slices of it, or a number of GPUs, in machines of eight.

    Raises:
        ValueError: a name that is not known, or a size that its compiler refuses.
        ImportError: the compiler is not installed; the message says what to install.
    """
    found = NAME.match(name.strip().lower())
    if not found or found[2] not in CHIPS:
        raise ValueError(
            f"targets.target needs a number of one of {', '.join(CHIPS)}; got {name!r}. {_examples()}"
        )
    count, chip, sizes = int(found[1] or 1), found[2], found[3]
    here = CHIPS[chip]
    if (here.platform == "tpu") != bool(sizes) or not count:
        raise ValueError(
            f"targets.target: {name!r} is no machine: a TPU has the sizes of its topology, GPUs a number. {_examples()}"
        )
    try:
        with quiet():
            topology = _tpus(chip, sizes, count) if here.platform == "tpu" else _gpus(chip, count)
    except ImportError:
        raise
    except Exception as error:
        sentence = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"targets.target: the compiler has no {name!r}: {sentence[0]}. {_examples()}"
        ) from error
    devices = tuple(topology.devices)
    chips = (
        {(getattr(d, "slice_index", 0), tuple(d.coords)) for d in devices}
        if here.platform == "tpu"
        else devices
    )
    return Target(name, chip, here, devices, len(devices) // len(chips))


def compile(train: Any, *shapes: Any, target: Target) -> Program:
    """`train` compiled for `target`.

    Args:
        train: a function under `jax.jit`, or anything with `lower(*shapes)`.
        shapes: `jax.ShapeDtypeStruct`s with shardings on a mesh of the target's devices.
        target: of `target(name)`.

    Raises:
        ValueError: no shape has a sharding, or theirs are of other devices; or the step does not fit in the devices' memory.
    """
    meshes = [
        leaf.sharding.mesh
        for leaf in jax.tree.leaves(shapes)
        if getattr(leaf, "sharding", None) is not None
    ]
    if not meshes or not set(meshes[0].devices.flat) <= set(target.devices):
        got = (
            f"devices such as {meshes[0].devices.flat[0]}"
            if meshes
            else "shapes without a sharding"
        )
        raise ValueError(
            f"targets.compile needs shapes whose shardings are on devices of {target.name}; got {got}. Make the mesh of them: "
            "mesh.make(devices=target.devices, ...)."
        )
    try:
        with quiet():
            compiled = train.lower(*shapes).compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        used = FULL.search(str(error))
        needs = f": it needs {used[1]} of {used[2]}" if used else ""
        raise ValueError(
            f"targets.compile: the step does not fit in the memory of a device of {target.name}{needs}. Split it over more "
            "devices, take more microbatches, or compute more again: remat=block."
        ) from error
    return Program(compiled, target, meshes[0])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep from stderr what compilers write there; exceptions carry what matters."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def gpu_text(chip: str) -> str:
    """A GPU as XLA's compiler is told of it: the fields of its `GpuTargetConfigProto`."""
    major, minor, cores, units, near, near_optin, cache, clock, name = GPUS[chip]
    here = CHIPS[chip]
    info: Mapping[str, Any] = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": near,
        "threads_per_core_limit": 2048,
        "core_count": cores,
        "fpus_per_core": units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(here.bandwidth),
        "l2_cache_size": cache,
        "clock_rate_ghz": clock,
        "device_memory_size": int(here.memory),
        "shared_memory_per_block_optin": near_optin,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    fields = " ".join(f"{field}: {value}" for field, value in info.items())
    return (
        f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        f'runtime_version {{ major: 12 minor: 8 }} platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 7 }} '
        f'device_description_str: "{name}"'
    )


def _tpus(chip: str, sizes: str, slices: int) -> Any:
    os.environ.setdefault(
        "TPU_SKIP_MDS_QUERY", "1"
    )  # a machine of Google's cloud is asked for its TPUs otherwise
    os.environ.setdefault(
        "ALLOW_MULTIPLE_LIBTPU_LOAD", "1"
    )  # or a second process that compiles dies of a lock file
    _installed("libtpu", "tpu")
    many = {"num_slices": slices} if slices > 1 else {}
    return _topologies().get_topology_desc(platform="tpu", topology_name=f"{chip}:{sizes}", **many)


def _gpus(chip: str, count: int) -> Any:
    _installed("jax_plugins.xla_cuda12", "gpu-compile")
    machines = math.ceil(count / MACHINE)
    if count % machines:
        raise ValueError(f"{count} GPUs do not divide into machines of {MACHINE}")
    shape = f"1x{machines}x{count // machines}"
    return _topologies().get_topology_desc(
        platform="cuda", topology_name=chip, target_config=gpu_text(chip), topology=shape
    )


def _topologies() -> Any:
    return importlib.import_module("jax.experimental.topologies")


def _installed(module: str, extra: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'This target needs its compiler, {module}: pip install -e ".[{extra}]", in an environment of its own.'
        ) from error


def _examples() -> str:
    return "Take such as v5e:2x4, v5p:2x2x2, v6e:4x4, 2 x v5e:4x4 (slices), 8 x h100 or 16 x h100 (machines of eight)."
