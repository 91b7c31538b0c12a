"""What an asynchronous save costs the steps that run beside it: 500 MB over eight virtual devices, hashed and sealed.

    python benchmarks/checkpoint.py [--quick]

Once beside steps that wait for an accelerator (the host is idle), and once beside steps that compute on all cores of this
machine, where the save takes its processor time from them. See benchmarks/README.md for the columns.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.run.checkpoint import Checkpoints

DEVICES = 8


def main():
    arguments = parse()
    measure.virtual_devices(DEVICES)
    axes = mesh.make(data=DEVICES)
    rows = arguments.megabytes * 1000 // 4 // DEVICES // arguments.leaves * DEVICES
    normal = np.random.default_rng(0).standard_normal((rows, 1000)).astype(np.float32)
    state = {f"w{i}": mesh.place(normal + i, P("data"), axes) for i in range(arguments.leaves)}
    nbytes = sum(leaf.nbytes for leaf in state.values())
    x = jnp.ones((arguments.width, arguments.width))
    product = jax.jit(lambda x: x @ x)
    kinds = {"waits": lambda: time.sleep(0.02), "computes": lambda: jax.block_until_ready(product(x))}
    size = f"{nbytes / measure.MB:.0f} MB in {arguments.leaves} arrays over {DEVICES} devices"
    print(f"A state of {size}; medians of {arguments.rounds} saves.\n")
    print(measure.table([row(kind, one_step, state, arguments.rounds) for kind, one_step in kinds.items()]))


def row(kind: str, one_step: Callable[[], object], state: dict[str, jax.Array], rounds: int) -> dict[str, str]:
    """Saves in turn with as many steps without one."""
    saves, blocked, costs, beside = [], [], [], []
    one_step()
    with tempfile.TemporaryDirectory() as folder, Checkpoints(Path(folder), settings={}, keep=1, say=lambda line: None) as store:
        for number in range(rounds + 1):  # the first one makes the folders and the memory
            start = time.perf_counter()
            store.save(number, state)
            returned = time.perf_counter()
            steps = 0
            while store.saving():
                one_step()
                steps += 1
            saved = time.perf_counter()
            store.wait()
            for _ in range(steps):
                one_step()
            alone = time.perf_counter() - saved
            saves.append(saved - start)
            blocked.append(returned - start)
            costs.append((saved - start - alone) / (saved - start))
            beside.append(steps)
    median = lambda values: statistics.median(values[1:])
    return {
        "steps": kind,
        "save ms": measure.milliseconds(median(saves)),
        "blocked ms": measure.milliseconds(median(blocked)),
        "steps beside": f"{median(beside):.0f}",
        "blocked": f"{median(blocked) / median(saves):.1%}",
        "cost": f"{median(costs):.1%}",
    }


def parse() -> argparse.Namespace:
    """The arguments; `--quick` changes their defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="see in seconds that it works; the numbers mean nothing")
    small, usual = {"megabytes": 8, "width": 64, "rounds": 1}, {"megabytes": 500, "width": 500, "rounds": 5}
    for name, value in (small if "--quick" in sys.argv else usual).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--leaves", type=int, default=10, help="arrays of the state")
    return parser.parse_args()


if __name__ == "__main__":
    main()
