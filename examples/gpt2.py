"""Train a byte-level GPT-2 on real text over data x stage x tensor, with rings of
`ppermute`s.

    python examples/gpt2.py

It needs no argument, no network and no accelerator. It trains on State of the Union
speeches, on a mesh of eight virtual CPU devices (data 2 x stage 2 x tensor 2), with the
1F1B schedule. Useful options are `--data 4 --tensor 2`, `--schedule interleaved`,
`--all-reduce psum` and `--text FILE`. By default, a train step of Parallax uses the
collectives of `jax.lax`. This program uses a ring along each axis, so that you can
count every message in the compiled step.

An estimate: to train a model with N parameters in L layers of width D on sequences of T
tokens takes 6 N + 12 L D T FLOP per token. With 0.8 M parameters and 16 sequences of 64
bytes, a step is 5.5 GFLOP, 12 ms at the 450 GFLOP/s of two cores. Such a small model
does not reach that rate. Its matrices have 64 to 256 columns on a device, and eight
devices that share two cores exchange some 300 messages of a few kilobytes. A step takes
0.15 s.
"""

import time

STARTED = time.perf_counter()

import importlib.util
import os
import signal
from pathlib import Path

import tyro

from gpt2_run.settings import Settings, check
from parallax.run import job, lock, signals

# Variables of the launchers that `jax.distributed` knows.
LAUNCHED = {
    "JAX_COORDINATOR_ADDRESS",
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_STEP_NODELIST",
    "KUBERNETES_SERVICE_HOST",
}


def main() -> None:
    """Checks the flags and locks the output folder; then imports JAX, which takes
    seconds, and trains."""
    settings, claim = (
        tyro.cli(Settings, prog=Path(__file__).name, description=__doc__),
        None,
    )
    try:
        check(settings)
        # In a job of several processes JAX alone knows which one is rank 0.
        if not (LAUNCHED & os.environ.keys() or importlib.util.find_spec("libtpu")):
            claim = lock.take(settings.out)
    except (ValueError, OSError) as error:
        job.end(f"error: {error}\n", job.REFUSED)
    with signals.listening(job.interrupted, signal.SIGINT):
        from gpt2_run import train

        train.main(settings, claim, STARTED)


if __name__ == "__main__":
    main()
