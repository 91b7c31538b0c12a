"""The memory of a device over the time of a compiled step: the forward ramp, the backward descent, the update.

    profile = memory.of(train.lower(*arguments).compile())
    draw.memory(profile, "memory.png")

A compiled step is one program: the runtime sets its memory aside at once, so a clock beside it sees one block for each step.
What lives when inside the block is in the program's text, which is in the order in which it runs: a buffer lives from the
instruction that makes it to the last that reads it. `of` adds those up, which needs no device at all; `Sampled` asks a live
device that reports its memory (GPU, TPU), and `live` counts the arrays that exist between steps.
"""

import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from parallax._typing import Device
from parallax.compiled import buffers
from parallax.compiled.buffers import Value

PHASES = ("forward", "backward", "update")


class Profile(NamedTuple):
    """What a device holds at each position of a program, loops rolled out.

    Attributes:
        arguments: bytes of what the program takes, there all the time.
        outputs: bytes of results that take no argument's place (not donated), there all the time.
        live: temporary bytes at each position, one position for each instruction that runs.
        filled: of them, those that hold something: what a loop stacks up fills with its trips, and is done with as another
            loop reads it.
        phase: the index in `PHASES` of each position: the pass that JAX made its instruction of, or else the one it stands in.
        at_peak: the temporaries at the fullest position, the largest first.
        assigned: the temporary bytes that the compiler sets aside, with what alignment and gaps cost.
    """

    arguments: int
    outputs: int
    live: np.ndarray
    filled: np.ndarray
    phase: np.ndarray
    at_peak: list[Value]
    assigned: int

    @property
    def peak(self) -> int:
        """The most temporary bytes that live at one time. `assigned` is near: within 15 % for GPT-2's steps on CPU."""
        return int(self.live.max(initial=0))


def of(compiled: jax.stages.Compiled) -> Profile:
    """The profile of a compiled program, on each device, from the live ranges in its text.

    Values have the sizes of their types: what a TPU pads is not counted. Loops whose number of trips the compiler does not
    know count one trip; of the branches of a conditional the fullest is drawn.
    """
    life = buffers.read(compiled)
    memory = compiled.memory_analysis()
    assert memory is not None, "This backend gives no memory analysis."
    return Profile(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        live=life.live,
        filled=life.filled,
        phase=_phases(life.phase),
        at_peak=sorted(life.peak, reverse=True),
        assigned=memory.temp_size_in_bytes,
    )


def live(device: Device | None = None) -> int:
    """The bytes of all arrays that exist on `device` (the first of this process by default), each buffer once."""
    device = jax.local_devices()[0] if device is None else device
    shards = (
        shard.data
        for array in jax.live_arrays()
        for shard in array.addressable_shards
        if shard.device == device
    )
    return sum(
        {shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards if shard.nbytes}.values()
    )


class Sampled:
    """A device's memory, asked for by a thread while the `with` block runs; `mark` ends a step.

        with memory.Sampled(jax.devices()[0]) as sampled:
            for batch in batches:
                state, info = jax.block_until_ready(train(state, batch))
                sampled.mark()
        draw.sampled(sampled, "memory.png")

    Attributes:
        samples: the seconds since the block began and the bytes in use.
        marks: when each step ended, in seconds.
        peak: the most bytes since the process began, as the device counts them, between samples too.
    """

    def __init__(self, device: Any, *, every: float = 0.002):
        """Ask `device`, a `jax.Device`, once in `every` seconds.

        Raises:
            ValueError: the device does not report its memory, as a CPU does not.
        """
        if not device.memory_stats():
            raise ValueError(
                f"memory.Sampled needs a device that reports its memory, and {device} does not. Take "
                f"memory.of(compiled) for the program's own memory and memory.live() between steps."
            )
        self.device, self.every = device, every
        self.samples: list[tuple[float, int]] = []
        self.marks: list[float] = []
        self.peak = 0
        self._start = time.perf_counter()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True, name="memory samples")

    def mark(self) -> None:
        """Note that a step ends now."""
        self.marks.append(time.perf_counter() - self._start)

    def _ask(self) -> None:
        stats = self.device.memory_stats() or {}
        used = stats.get("bytes_in_use", 0)
        self.samples.append((time.perf_counter() - self._start, used))
        self.peak = max(self.peak, stats.get("peak_bytes_in_use", used))

    def _sample(self) -> None:
        while not self._done.wait(self.every):
            self._ask()

    def __enter__(self) -> "Sampled":
        self._start = time.perf_counter()
        self._ask()
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._done.set()
        self._thread.join()
        self._ask()


def _phases(phase: np.ndarray) -> np.ndarray:
    """Forward and backward as JAX made them, what stands between as what stands before it, the rest as the update."""
    found, last = [], 0
    backward = np.flatnonzero(phase == buffers.BACKWARD)
    end = backward[-1] if len(backward) else -1
    for k, own in enumerate(phase.tolist()):
        last = own if own != buffers.UNKNOWN else 2 if k > end else last
        found.append(last)
    return np.array(found, int)
