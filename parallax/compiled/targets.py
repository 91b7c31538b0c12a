"""Compiles programs for accelerators that this machine does not have, with the compilers of these
accelerators.

    v5e = targets.target("v5e:2x4")                     # or "8 x h100", "2 x v5e:4x4", "16 x h100"
    world = mesh.make(devices=v5e.devices, data=4, tensor=2)
    program = targets.compile(train, shapes, windows, target=v5e)

`shapes` are `jax.ShapeDtypeStruct`s with shardings on a mesh of the target's devices, such as the
attribute `shapes` of a decoder's training step. The TPU's compiler comes with
`pip install -e ".[tpu]"`, and the GPU's compiler with `".[gpu-compile]"`. Each of the two needs an
environment of its own. Nothing runs, and no device is needed.
"""

import contextlib
import importlib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from parallax.compiled import certificate, links, memory, slices, timeline
from parallax.compiled.certificate import Entry
from parallax.hardware import KNOWN, Hardware

MACHINE = 8  # GPUs behind one switch
# The numbers that compilers need of a GPU besides its rates: compute capability (major, minor),
# cores, units in a core, bytes of shared memory in a core and for a block, bytes of cache, clock in
# GHz, name.
GPUS = {
    "a100": (8, 0, 108, 64, 167936, 166912, 41943040, 1.41, "NVIDIA A100-SXM4-80GB"),
    "h100": (9, 0, 132, 128, 233472, 232448, 52428800, 1.98, "NVIDIA H100 80GB HBM3"),
    "h200": (9, 0, 132, 128, 233472, 232448, 52428800, 1.98, "NVIDIA H200"),
    "b200": (10, 0, 148, 128, 233472, 232448, 132644864, 1.965, "NVIDIA B200"),
}
CHIPS = {name: chip for name, chip in KNOWN.items() if chip.platform == "tpu" or name in GPUS}
# The memory that a step needs and the memory that there is, in the error of a TPU's compiler, as
# libtpu 0.0.42 and earlier versions write it.
FULL = re.compile(r"(?:Used |\()([\d.]+\w)\)? (?:of|exceeds available \w+) \(?([\d.]+\w)")
# A target's name: the number of slices or GPUs, the chip, and the sizes of a TPU's topology.
NAME = re.compile(r"(?:(\d+) ?x ?)?([a-z]+\d+[a-z]*)(?::(\d+(?:x\d+)*))?$")


class Target(NamedTuple):
    """Devices to compile for.

    Attributes:
        name: the name of the target, such as "v5e:2x4" or "8 x h100".
        chip: the name of the chip, such as "v5e" or "h100".
        hardware: the rates of the chip.
        devices: the devices to make a mesh of. They run nothing.
        cores: the number of devices that share a chip.
    """

    name: str
    chip: str
    hardware: Hardware
    devices: tuple[Any, ...]
    cores: int

    @property
    def memory(self) -> float:
        """The bytes of memory of one device."""
        return self.hardware.memory / self.cores

    def machine(self, mesh: Mesh) -> links.Machine:
        """Returns the `Machine` that has the links between the devices of `mesh`. Its devices are
        in the mesh's order."""
        devices = list(mesh.devices.flat)
        # The index of each TPU's slice. If there is one slice, its devices may lack the attribute.
        groups = [getattr(device, "slice_index", None) or 0 for device in devices]
        if self.hardware.platform == "tpu":
            torus = links.torus(self.hardware, [device.coords for device in devices], groups)
            return torus._replace(numbers=tuple(slices.numbers(mesh)))
        # The topology of GPUs has one process for each server.
        servers = tuple(device.process_index for device in devices)
        return links.switch(self.hardware, len(devices))._replace(groups=servers)


class Program(NamedTuple):
    """A step compiled for a target.

    Attributes:
        compiled: the program.
        target: the devices that the program was compiled for.
        mesh: the mesh of these devices.
    """

    compiled: jax.stages.Compiled
    target: Target
    mesh: Mesh

    @property
    def text(self) -> str:
        """The program's text, with the instructions in the order in which they run."""
        return self.compiled.as_text() or ""

    @property
    def memory(self) -> dict[str, int]:
        """The bytes on one device, as `memory.of` counts them."""
        return memory.of(self.compiled)

    @property
    def fits(self) -> bool:
        """Whether the program fits in the memory of one device."""
        return self.memory["peak"] <= self.target.memory

    def certificate(self) -> list[Entry]:
        """Returns the counts and bytes of the program's collectives, for each kind of collective
        and set of mesh axes; see `certificate.read`."""
        return certificate.read(self.text, self.mesh)

    def by_link(self) -> dict[str, int]:
        """Returns the bytes that all devices together send, by kind of link: "link" inside a slice
        of TPUs or a server of GPUs, "network" between slices or servers."""
        return links.by_kind(self.text, self.target.machine(self.mesh))

    def timeline(self) -> timeline.Timeline:
        """Returns the program's estimated time."""
        return timeline.replayed(self.text, self.target.machine(self.mesh), dict(self.mesh.shape))


def target(name: str) -> Target:
    """Returns the devices that a name stands for: "v5e:2x4" is a TPU topology, "2 x v5e:4x4" is two
    slices of such a topology, and "16 x h100" is 16 GPUs, in machines of eight.

    Raises:
        ValueError: the name is unknown, or the compiler has no topology of this size.
        ImportError: the compiler is not installed; the message says how to install it.
    """
    parsed = NAME.match(name.strip().lower())
    if not parsed or parsed[2] not in CHIPS:
        raise ValueError(
            f"targets.target needs a machine with one of the chips {', '.join(CHIPS)}; got "
            f"{name!r}. {_examples()}"
        )
    count, chip, sizes = int(parsed[1] or 1), parsed[2], parsed[3]
    hardware = CHIPS[chip]
    is_tpu = hardware.platform == "tpu"
    if is_tpu != bool(sizes) or not count:
        raise ValueError(
            f"targets.target: {name!r} is no machine: a TPU needs the sizes of its topology, and "
            f"GPUs need their number. {_examples()}"
        )
    try:
        with quiet():
            topology = _tpus(chip, sizes, count) if is_tpu else _gpus(chip, count)
    except ImportError:  # raised unchanged: its message says what to install
        raise
    except Exception as error:
        sentence = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"targets.target: the compiler has no {name!r} among its topologies: {sentence[0]}. "
            f"{_examples()}"
        ) from error
    devices = tuple(topology.devices)
    chips = len(devices)
    # On a TPU, devices of one slice with the same coordinates are cores of one chip. A GPU is one
    # device. The last field of the result, `cores`, is the number of devices of a chip.
    if is_tpu:
        chips = len({(getattr(d, "slice_index", 0), tuple(d.coords)) for d in devices})
    return Target(name, chip, hardware, devices, len(devices) // chips)


def choose_platform(name: str) -> None:
    """Chooses the platform on which JAX runs while it compiles for the target `name`. Call this
    function before JAX first uses a device.

    For a TPU target, JAX uses this machine's CPU, and does not look for TPUs. For a GPU target, JAX
    uses this machine's GPU if there is one, and else its CPU. XLA can compile cuDNN's attention
    only on a machine with a GPU.
    """
    parsed = NAME.match(name.strip().lower())
    if parsed and parsed[2] in GPUS:
        with quiet():  # without a GPU, JAX warns that it uses the CPU
            jax.devices()
    else:
        jax.config.update("jax_platforms", "cpu")


def compile(train: Any, *shapes: Any, target: Target) -> Program:
    """Returns the function `train` compiled for the devices of `target`. It is not run.

    Args:
        train: a function under `jax.jit`, or anything with `lower(*shapes)`.
        shapes: the shapes of the arguments of `train`, as `jax.ShapeDtypeStruct`s. Their shardings
            are on a mesh of the target's devices.
        target: the result of `target(name)`.

    Raises:
        ValueError: no shape has a sharding, the shardings are not on devices of `target`, or the
            step does not fit in the devices' memory.
    """
    meshes = [
        leaf.sharding.mesh
        for leaf in jax.tree.leaves(shapes)
        if hasattr(getattr(leaf, "sharding", None), "mesh")
    ]
    if not meshes or not set(meshes[0].devices.flat) <= set(target.devices):
        got = "shapes without a sharding"
        if meshes:
            got = f"devices such as {meshes[0].devices.flat[0]}"
        raise ValueError(
            f"targets.compile needs shapes whose shardings are on devices of {target.name}; got "
            f"{got}. Make the mesh of the target's devices: mesh.make(devices=target.devices, ...)."
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
            f"targets.compile: the step does not fit in the memory of a device of {target.name}"
            f"{needs}. Split it over more devices, use more microbatches, or recompute more: "
            "remat=block."
        ) from error
    return Program(compiled, target, meshes[0])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discards all output on stderr inside a `with`. Compilers print much to stderr; the useful
    part of it is also in the exceptions that they raise.

    Compilers write to file descriptor 2 and not to Python's `sys.stderr`, so the descriptor itself
    is replaced by that of `os.devnull`, and restored at the end.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with open(os.devnull, "wb") as file:
            os.dup2(file.fileno(), 2)
            yield
    finally:
        sys.stderr.flush()  # what Python still keeps is discarded too
        os.dup2(stderr, 2)
        os.close(stderr)


def gpu_text(chip: str) -> str:
    """Returns the description of a GPU for XLA's compiler: the fields of a
    `GpuTargetConfigProto`, as text."""
    major, minor, cores, units, shared, shared_of_block, cache, clock, name = GPUS[chip]
    hardware = CHIPS[chip]
    # The numbers written here are limits that all these GPUs have in common.
    info: Mapping[str, Any] = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": shared,
        "threads_per_core_limit": 2048,
        "core_count": cores,
        "fpus_per_core": units,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(hardware.bandwidth),
        "l2_cache_size": cache,
        "clock_rate_ghz": clock,
        "device_memory_size": int(hardware.memory),
        "shared_memory_per_block_optin": shared_of_block,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    fields = " ".join(f"{field}: {value}" for field, value in info.items())
    capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
    # XLA is to assume these versions of CUDA and of cuDNN (`dnn`) on the target.
    return (
        f"gpu_device_info {{ {fields} {capability} }} runtime_version {{ major: 12 minor: 8 }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 7 }} '
        f'device_description_str: "{name}"'
    )


def _tpus(chip: str, sizes: str, slices: int) -> Any:
    """Returns JAX's description of TPUs that are not on this machine; its `devices` stand for these
    TPUs. There are `slices` slices, and each is a torus of the size `sizes`, such as "2x4"."""
    # Without this, libtpu asks Google's metadata server (MDS) for the TPUs of this machine.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Without this, libtpu's lock file lets only one process compile at a time: a second one fails.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    _installed("tpu", "libtpu")
    slice_option = {"num_slices": slices} if slices > 1 else {}
    return _topologies().get_topology_desc(
        platform="tpu", topology_name=f"{chip}:{sizes}", **slice_option
    )


def _gpus(chip: str, count: int) -> Any:
    """Returns JAX's description of `count` GPUs that are not on this machine; its `devices` stand
    for these GPUs. The GPUs are in machines with the same number of GPUs each, at most `MACHINE`
    (8).
    """
    _installed("gpu-compile", "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    machines = math.ceil(count / MACHINE)
    # `target` writes the target's name, such as "9 x h100", before this message, and examples of
    # targets after it.
    if count % machines:
        raise ValueError(
            f"{count} GPUs cannot be divided equally among {machines} machines of at most "
            f"{MACHINE} GPUs"
        )
    # JAX wants three numbers: groups of machines, machines in a group, GPUs in a machine.
    shape = f"1x{machines}x{count // machines}"
    # `gpu_text` returns XLA's description of the chip.
    return _topologies().get_topology_desc(
        platform="cuda", topology_name=chip, target_config=gpu_text(chip), topology=shape
    )


def _topologies() -> Any:
    """Returns JAX's module of topologies."""
    return importlib.import_module("jax.experimental.topologies")


def _installed(extra: str, *modules: str) -> None:
    """Raises an `ImportError` if none of `modules` can be imported. Each of them has the compiler.
    The message names the last module, and says to install Parallax with the optional dependencies
    `extra`."""
    for module in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
            return
    raise ImportError(
        f"This target needs a compiler that is not installed, {modules[-1]}. In a separate "
        f'environment, run: pip install -e ".[{extra}]"'
    )


def _examples() -> str:
    """Returns a sentence for error messages, with examples of the names of targets."""
    return (
        "Examples: v5e:2x4, v5p:2x2x2, v6e:4x4, 2 x v5e:4x4 (slices), 8 x h100 or 16 x h100 "
        "(machines of eight)."
    )
