"""Two processes whose storage fails, or is slow, on one of them: what `test_storage_processes.py`
starts.

    python tests/process_storage.py COORDINATOR RANK FOLDER SECONDS

Each prints a JSON line about what happened. SECONDS is how long the second process takes to hash
its share.
"""

import errno
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.data import manifest
from parallax.run import barriers, processes, writer
from parallax.run.checkpoint import Checkpoints

AT = {"open": 0, "os.mkdir": 0, "os.rename": 1}


class Faults:
    """Errors of the operations on files whose path holds `part`, as many as are left."""

    def __init__(self):
        self.part, self.left = "", 0
        sys.addaudithook(self._hook)

    def _hook(self, event, arguments):
        if self.left and event in AT and self.part in str(arguments[AT[event]]):
            self.left -= 1
            raise OSError(errno.EIO, "Input/output error", str(arguments[AT[event]]))


def main(coordinator: str, rank: int, folder: Path, seconds: float) -> None:
    writer.PAUSE, barriers.SOON = 0.1, 4.0
    processes.initialize(coordinator, 2, rank, cpu_devices=4, say=lambda line: None)
    axes, faults, said = mesh.make(data=4), Faults(), []
    seen: dict[str, Any] = {}
    state_of = lambda step: mesh.place(
        {
            "split": np.arange(16.0, dtype=np.float32).reshape(8, 2) * step,
            "whole": np.full(3, step),
        },
        {"split": P("data"), "whole": P()},
        axes,
    )
    double = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)

    def save(step: int) -> str:
        state = state_of(step)
        try:
            store.save(step, state)
            double(state)
            store.wait()
        except OSError as error:
            return str(error)
        finally:
            faults.left = 0
        return ""

    with Checkpoints(folder, settings={}, tries=3, say=said.append) as store:
        seen["undisturbed"] = save(1)
        for step, failing, part in [
            (2, 1, "process_1"),
            (3, 0, "contents.json"),
            (4, 0, "manifest.json"),
        ]:
            faults.part, faults.left = part, int(rank == failing)
            seen[f"once, in {part}"] = save(step), faults.left
        faults.part, faults.left = "process_1", 100 * int(rank == 1)
        seen["always"] = save(5)
        seen["steps"] = store.steps()
    seen["said"] = said

    hashed, check_hashes = [], manifest.check_hashes

    def slow(folder, files):
        hashed.extend(files)
        time.sleep(seconds if rank == 1 else 0)
        check_hashes(folder, files)

    manifest.check_hashes = slow
    began = time.monotonic()
    again = Checkpoints(folder, settings={}, say=lambda line: None)
    restored = again.restore(state_of(0))
    assert restored is not None
    same = jax.jit(
        lambda a, b: jnp.all(a["split"] == b["split"]) & jnp.all(a["whole"] == b["whole"])
    )
    seen |= {"restored": restored.step, "same": bool(same(restored.state, state_of(restored.step)))}
    seen |= {"took": time.monotonic() - began, "hashed": sorted(hashed)}
    if rank == 0:  # a bit turns in each file of the second process's share
        damaged = folder / f"{restored.step:08d}"
        for name in {*manifest.read(damaged / "manifest.json")["files"]} - {
            *hashed,
            "contents.json",
        }:
            content = bytearray((damaged / name).read_bytes())
            content[-1] ^= 1
            (damaged / name).write_bytes(content)
    multihost_utils.sync_global_devices("damaged")
    restored = again.restore(state_of(0))
    assert restored is not None
    seen |= {"then": restored.step, "refused": restored.refused}
    if rank == 0:  # a fault that only the first process looks for
        (folder / "00000003" / "manifest.json").unlink()
    multihost_utils.sync_global_devices("unfinished")
    restored = again.restore(state_of(0))
    assert restored is not None
    print(json.dumps(seen | {"refused by the first": restored.refused}), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]))
