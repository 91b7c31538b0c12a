"""What an asynchronous save costs the steps that run beside it, and what the checks add to a save
and a restore.

    python benchmarks/checkpoint.py [--quick]

A state of 500 MB over eight virtual devices is saved, hashed and sealed once beside steps that wait
for an accelerator (the host is idle), and once beside steps that compute on all cores of this
machine, where the save takes its processor time from them. Then one of 1 GB is saved and restored
with nothing beside, in turn with Orbax alone. See benchmarks/README.md for the columns.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import orbax.checkpoint
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.run import stored
from parallax.run.checkpoint import Checkpoints
from parallax.run.retention import Retention

DEVICES = 8
GOALS = {"save": 1.2, "restore": 1.5}  # times what Orbax alone takes


def main():
    arguments = parse()
    measure.virtual_devices(DEVICES)
    state = state_of(arguments.megabytes, arguments.leaves)
    nbytes = sum(leaf.nbytes for leaf in state.values())
    x = jnp.ones((arguments.width, arguments.width))
    product = jax.jit(lambda x: x @ x)
    kinds = {
        "waits": lambda: time.sleep(0.02),
        "computes": lambda: jax.block_until_ready(product(x)),
    }
    size = f"{nbytes / measure.MB:.0f} MB in {arguments.leaves} arrays over {DEVICES} devices"
    print(f"A state of {size}; medians of {arguments.rounds} saves.\n")
    print(
        measure.table(
            [row(kind, one_step, state, arguments.rounds) for kind, one_step in kinds.items()]
        )
    )
    del state
    large = state_of(2 * arguments.megabytes, arguments.leaves)
    print(
        "\nTwice as much with nothing beside, and Orbax alone in turn; medians of "
        f"{arguments.rounds}.\n"
    )
    print(measure.table(beside_orbax(large, arguments.rounds)))


def state_of(megabytes: int, leaves: int) -> dict[str, Any]:
    """Normal numbers, split over the devices."""
    axes = mesh.make(data=DEVICES)
    rows = megabytes * 1000 // 4 // DEVICES // leaves * DEVICES
    normal = np.random.default_rng(0).standard_normal((rows, 1000)).astype(np.float32)
    return {f"w{i}": mesh.place(normal + i, P("data"), axes) for i in range(leaves)}


def beside_orbax(state: dict[str, jax.Array], rounds: int) -> list[dict[str, str]]:
    """A save and a restore by each, in turn, in folders that are removed; the files are in the page
    cache when they are read."""
    like = stored.shapes(state)
    restore_args = orbax.checkpoint.checkpoint_utils.construct_restore_args(like)
    seconds: dict[tuple[str, str], list[float]] = {
        (what, who): [] for what in GOALS for who in ("ours", "orbax")
    }

    def timed(what: str, who: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        jax.block_until_ready(work())
        seconds[what, who].append(time.perf_counter() - start)

    handler = orbax.checkpoint.PyTreeCheckpointHandler(use_compression=False)
    alone = orbax.checkpoint.AsyncCheckpointer(handler)
    for _ in range(rounds + 1):  # the first one makes the memory
        with (
            tempfile.TemporaryDirectory() as folder,
            Checkpoints(Path(folder), settings={}, say=lambda line: None) as store,
        ):
            timed("save", "ours", lambda store=store: (store.save(1, state), store.wait())[1])
            timed("restore", "ours", lambda store=store: restored_by(store, like))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "1")

            def saved(path: Path = path) -> None:
                alone.save(path, args=orbax.checkpoint.args.PyTreeSave(state))
                alone.wait_until_finished()

            timed("save", "orbax", saved)
            args = orbax.checkpoint.args.PyTreeRestore(like, restore_args)
            timed("restore", "orbax", lambda path=path, args=args: alone.restore(path, args=args))
    median = {key: statistics.median(values[1:]) for key, values in seconds.items()}
    return [
        {
            "what": what,
            "ms": measure.milliseconds(median[what, "ours"]),
            "Orbax alone ms": measure.milliseconds(median[what, "orbax"]),
            "times": f"{median[what, 'ours'] / median[what, 'orbax']:.2f}",
            "goal": f"{goal}",
        }
        for what, goal in GOALS.items()
    ]


def restored_by(store: Checkpoints, like: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The state that is restored, every file checked."""
    restored = store.restore(like)
    assert restored is not None
    return restored.state


def row(
    kind: str, one_step: Callable[[], object], state: dict[str, jax.Array], rounds: int
) -> dict[str, str]:
    """Saves in turn with as many steps without one."""
    saves, blocked, costs, beside = [], [], [], []
    one_step()
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(Path(folder), settings={}, keep=Retention(1), say=lambda line: None) as store,
    ):
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

    def median(values):
        return statistics.median(values[1:])

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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="see in seconds that it works; the numbers mean nothing",
    )
    small, usual = (
        {"megabytes": 8, "width": 64, "rounds": 1},
        {"megabytes": 500, "width": 500, "rounds": 5},
    )
    for name, value in (small if "--quick" in sys.argv else usual).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--leaves", type=int, default=10, help="arrays of the state")
    return parser.parse_args()


if __name__ == "__main__":
    main()
