"""What the accelerators do and what joins them, as their makers state it: the one table that estimates are made of.

It was written down before the first estimate and is never tuned to one. Rates are of a chip, in one direction of a link.

* TPU: cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x: products in 16 bits, memory, bandwidth. Links one way, and 1 us a hop:
  Austin et al., How to scale your model (jax-ml.github.io/scaling-book), chapter 2. Between slices: as `plan.hardware`.
  The clock that turns a compiler's cycles into seconds is the rate of products over what the chip's matrix units do in a cycle:
  2 x 128 x 128 operations a unit, 4 units a core up to v5p; from v6e on it is not stated, and 1.75 GHz, a v5p's, is taken.
  Google's pages on TPU7x state both directions of all links of a chip together: 1,200 GB/s for a v5p and a TPU7x, 800 for a v6e,
  which over 6 and 4 links both ways is 100 GB/s; the 90 here are the book's for v5p and v6e, taken for TPU7x too.
* GPU: NVIDIA's data sheets of the SXM boards, dense rates; NVLink one way; the network of a DGX, one 400 Gb/s port a GPU (A100:
  200). A hop: the base latencies of NCCL's model of rings (src/graph/tuning.cc): 3.4 and 14 us.
* Shares: of what is stated, large products reach 0.75, passes over memory 0.9, NVLink 0.8. These are assumptions; a TPU's
  products and passes are in the compiler's own cycles.
"""

from typing import NamedTuple

GB, TERA, GIB = 1e9, 1e12, 2**30


class Rates(NamedTuple):
    """One chip.

    Attributes:
        name: what it is called.
        platform: "tpu" or "cuda".
        memory: bytes.
        products: floating-point operations a second in 16 bits.
        bandwidth: bytes a second from and to memory.
        link: bytes a second one way, over one link to a neighbour (TPU), or over all of a GPU's links to the switch.
        hop: seconds a message takes beside its bytes, for each link that it goes over.
        network: bytes a second one way between slices or machines.
        far_hop: seconds a message takes beside its bytes, between slices or machines.
        clock: cycles a second; 0 where the compiler counts none.
        reached: the share of products, of bandwidth and of links that programs reach.
    """

    name: str
    platform: str
    memory: float
    products: float
    bandwidth: float
    link: float
    hop: float
    network: float
    far_hop: float
    clock: float = 0.0
    reached: tuple[float, float, float] = (1.0, 1.0, 1.0)


def _tpu(name, gib, tera, bandwidth, link, network, clock) -> Rates:
    return Rates(
        name,
        "tpu",
        gib * GIB,
        tera * TERA,
        bandwidth * GB,
        link * GB,
        1e-6,
        network * GB,
        1e-5,
        clock * 1e9,
    )


def _gpu(name, gb, tera, bandwidth, link, network) -> Rates:
    speeds = gb * GB, tera * TERA, bandwidth * GB, link * GB, 3.4e-6, network * GB, 14e-6
    return Rates(name, "cuda", *speeds, reached=(0.75, 0.9, 0.8))


CHIPS = {
    "v4": _tpu("TPU v4", 32, 275, 1228, 45, 6.25, 1.05),
    "v5e": _tpu("TPU v5e", 16, 197, 819, 45, 3.125, 1.5),
    "v5p": _tpu("TPU v5p", 95, 459, 2765, 90, 6.25, 1.75),
    "v6e": _tpu("TPU v6e", 32, 918, 1640, 90, 12.5, 1.75),
    "tpu7x": _tpu("TPU7x", 192, 2307, 7380, 90, 12.5, 1.75),
    "a100": _gpu("A100", 80, 312, 2039, 300, 25),
    "h100": _gpu("H100", 80, 989, 3350, 450, 50),
    "h200": _gpu("H200", 141, 989, 4800, 450, 50),
    "b200": _gpu("B200", 180, 2250, 8000, 900, 50),
}
