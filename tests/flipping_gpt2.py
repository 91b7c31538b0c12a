"""`examples/gpt2.py` with bits that turn: after a step, in one device's copy of the first array
whose path ends as told.

    python tests/flipping_gpt2.py 7:5:mlp.up.weight:12 ... -- --steps 20 --fingerprint-every 4

Each fault is STEP:DEVICE:PATH:BIT, the device by its place among all of the job's, and happens once
in a process: the first of a step when the run first comes to that step, the second when it comes
there again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import flips
import jax

import gpt2
from gpt2_run import train
from parallax import mesh


def flipping(compiled, faults):
    """The step `compiled`, after which the bits turn that `faults` speak of."""
    left = list(faults)

    def step(state, windows):
        state, info = compiled(state, windows)
        jax.block_until_ready((state, info))
        for fault in [fault for fault in left if fault[0] == int(state.step)][:1]:
            left.remove(fault)
            state = turned(state, *fault[1:])
        return state, info

    return step


def turned(state, device, ending, bit):
    """The state with one bit turned, in the middle of the device's block."""
    path, leaf = next(
        (path, leaf)
        for path, leaf in jax.tree.leaves_with_path(state)
        if mesh.dotted(path).endswith(ending)
    )
    other = flips.flipped(
        leaf, jax.devices()[device].id, leaf.sharding.shard_shape(leaf.shape)[0] // 2, bit
    )
    return jax.tree.map_with_path(lambda at, x: other if at == path else x, state)


def read(text):
    """A fault of its text."""
    number, device, ending, bit = text.split(":")
    return int(number), int(device), ending, int(bit)


def main():
    end = sys.argv.index("--")
    faults = [read(text) for text in sys.argv[1:end]]
    sys.argv[1 : end + 1] = []
    steps = train.steps

    def with_faults(session, state, first):
        session.train = flipping(session.train, faults)
        return steps(session, state, first)

    train.steps = with_faults
    gpt2.main()


if __name__ == "__main__":
    main()
