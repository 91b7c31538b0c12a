"""A ring all-reduce, hop by hop: what each device holds before and after each message.
Run: python examples/01_a_ring.py.

Each device starts with an array of n blocks. A block is printed as the letters of the
devices whose terms it has. First the sum of each block moves round the ring, and gains
one letter per hop. Then the finished sums move on until each device has all of them.
"""

# Estimate: the sum of S bytes on n = 8 devices takes 2 (n - 1) = 14 hops of S / n, so
# each device sends 2 (n - 1)/n S = 1.75 S. If one device got all arrays and sent the
# sum back, its link would carry 2 (n - 1) S = 14 S.

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.collectives import ring, send_next

n, letters = 8, "ABCDEFGH"


def shown(when: str, blocks: np.ndarray) -> None:
    """Prints one line for each device, with the blocks of that device. A term of device
    A is 1, of B 10, of C 100. So the digits of a sum show whose terms the sum has."""
    print(f"\n{when}\n          " + "  ".join(f"block {j} " for j in range(n)))
    for device, row in enumerate(blocks):
        who = [
            "".join(
                letter if total // 10**k % 10 else "."
                for k, letter in enumerate(letters)
            )
            for total in row
        ]
        print(f"device {device}  " + "  ".join(who))


def scatter_hop(h, blocks):
    """Sends the partial sum of block i - h from each device i to device i + 1. The
    receiver adds its own term of the block. All numbers are modulo n."""
    me = lax.axis_index("x")
    message = send_next(blocks[0, (me - h) % n], "x")
    return blocks.at[0, (me - h - 1) % n].add(message)


def gather_hop(h, blocks):
    """Sends block i + 1 - h, a finished sum, from each device i to device i + 1. The
    receiver stores the block. All numbers are modulo n."""
    me = lax.axis_index("x")
    message = send_next(blocks[0, (me + 1 - h) % n], "x")
    return blocks.at[0, (me - h) % n].set(message)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    devices = mesh.make(x=n)
    start = blocks = np.repeat(10 ** np.arange(n, dtype=np.int32), n).reshape(
        n, n
    )  # row i: device i's blocks, all of them 10^i
    shown("Each device has its own numbers.", blocks)
    for name, hop in (("Reduce-scatter", scatter_hop), ("All-gather", gather_hop)):
        one_hop = jax.jit(
            mesh.spmd(hop, mesh=devices, in_specs=(P(), P("x")), out_specs=P("x"))
        )
        for h in range(n - 1):
            blocks = np.asarray(one_hop(np.int32(h), blocks))
            shown(
                f"{name}, hop {h + 1} of {n - 1}: each device has sent one block to "
                "the next.",
                blocks,
            )
    # The same all-reduce by the library, in one call.
    ours = jax.jit(
        mesh.spmd(
            lambda x: ring.all_reduce(x[0], "x"),
            mesh=devices,
            in_specs=(P("x"),),
            out_specs=P(),
        )
    )(start)
    assert (blocks == np.asarray(ours)).all()
    print(
        f"\nEqual to ring.all_reduce: {2 * (n - 1)} hops of one block each, so each "
        f"device sent {2 * (n - 1) / n} of its array."
    )
