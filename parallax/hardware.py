"""The one table of chips: what devices can do as their makers state it.

    hardware.A100                                  # a record: numbers of one device

Figures are of one device (a TPU chip), in one direction of a link, in 10^9 bytes; a TPU's memory in
2^30. They were written down before the first estimate and are tuned to none. Sources:

* GPU: NVIDIA's data sheets of the SXM boards, dense rates: images.nvidia.com/content/technologies/
  volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf, .../ampere-architecture/
  nvidia-ampere-architecture-whitepaper.pdf, resources.nvidia.com/en-us-tensor-core. NVLink one way;
  between machines, the network of a DGX, for each of eight devices. A hop: the base latencies of
  NCCL's model of rings (src/graph/tuning.cc): 3.4 and 14 us.
* TPU: cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x; links one way and between slices from
  Austin et al., How to scale your model (jax-ml.github.io/scaling-book), chapter 2, which also has
  1 us a hop. A v4's share of the network between slices is not stated: it is taken as a v5p's, a
  TPU7x's as a v6e's, and the latency of that network is taken as 10 us. Google's pages state both
  directions of all links of a chip together: 1,200 GB/s for a v5p and a TPU7x, 800 for a v6e, or
  100 GB/s one way; the 90 of the book are taken for all three.
* A TPU's clock turns its compiler's cycles into seconds: the rate of products over the operations
  of a cycle, 2 x 128 x 128 a matrix unit, 4 units a core up to v5p. From v6e on it is not stated,
  and a v5p's 1.75 GHz is taken.
* Shares: of the stated figures, large products reach 0.75; in the replay of a compiled program,
  passes over a GPU's memory reach 0.9 and NVLink 0.8. These are assumptions. In a TPU's program
  products and passes are in the compiler's own cycles.
"""

import dataclasses
import math
from collections.abc import Mapping

from parallax import torus
from parallax.collectives.cost import Link

GB, GIB, TERA = 1e9, 2.0**30, 1e12


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device of many.

    Args:
        name: the maker's name for it.
        platform: "tpu", "cuda" or "cpu", as XLA calls it.
        memory: bytes.
        rate: floating-point operations a second of matrix products, in 16 bits.
        full_rate: the same where the model computes in its parameters' own type: with float32, as
            JAX computes it by default.
        bandwidth: bytes a second from and to memory.
        domain: devices that the fast links join: a machine, a slice.
        fast: a hop over one of those links (TPU), or over all of a GPU's links to the switch.
        slow: a hop between domains.
        efficiency: the share of the rates that large products reach.
        reached: the shares of the bandwidth and of the links that a replayed program reaches.
        clock: cycles a second; 0 where the compiler counts none.
        fresh: seconds a byte of temporaries, where each step gets its memory anew from the system;
            0 where it is kept.
        short: bytes of a number in `bfloat16` or `float16`: 4 where the compiler widens them.
        torus: chips along each dim of the slice that the mesh takes, as (2, 4); () counts every hop
            as one link.
    """

    name: str
    platform: str
    memory: float
    rate: float
    full_rate: float
    bandwidth: float
    domain: int
    fast: Link
    slow: Link
    efficiency: float = 0.75
    reached: tuple[float, float] = (1.0, 1.0)
    clock: float = 0.0
    fresh: float = 0.0
    short: int = 2
    torus: tuple[int, ...] = ()

    def link(self, span: int, links: float = 1.0) -> Link:
        """Returns a hop in a group whose first and last device are `span` apart: slow where it
        leaves the domain.

        One over several `links` takes so many times as long, since its bytes use them all.
        """
        return (
            self.fast._replace(alpha=links * self.fast.alpha, beta=links * self.fast.beta)
            if span <= self.domain
            else self.slow
        )

    def hops(self, axes: Mapping[str, int]) -> dict[str, float]:
        """Returns the links that a hop along each axis takes in the mean, where `mesh.make` lays
        them: 1 where no torus is given.

        Raises:
            ValueError: the axes multiply to another number than the torus has chips, or cores of
                chips.
        """
        cores, rest = divmod(math.prod(axes.values()), math.prod(self.torus))
        if rest or (self.torus and cores not in (1, 2)):
            raise ValueError(
                f"plan: the torus {'x'.join(map(str, self.torus))} has {math.prod(self.torus)} "
                f"chips, and the layout {math.prod(axes.values())} devices. Use a layout of as "
                "many, or another torus."
            )
        if not self.torus:
            return dict.fromkeys(axes, 1.0)
        rings = torus.closed_dims(self.name in torus.FLAT, self.torus)
        return dict(
            zip(axes, torus.hops(self.torus, rings, cores, tuple(axes.values())), strict=True)
        )


def _gpu(name, memory, rate, full_rate, bandwidth, nvlink, network) -> Hardware:
    fast = Link(3.4e-6, 1 / (nvlink * GB), 1 / (bandwidth * GB))
    slow = Link(14e-6, 1 / (network * GB), 1 / (bandwidth * GB))
    rates = rate * TERA, full_rate * TERA, bandwidth * GB
    return Hardware(name, "cuda", memory * GB, *rates, 8, fast, slow, reached=(0.9, 0.8))


def _tpu(name, memory, rate, bandwidth, chips, link, network, clock) -> Hardware:
    fast = Link(1e-6, 1 / (link * GB), 1 / (bandwidth * GB))
    slow = Link(1e-5, 1 / (network * GB), 1 / (bandwidth * GB))
    rates = rate * TERA, rate * TERA, bandwidth * GB
    return Hardware(name, "tpu", memory * GIB, *rates, chips, fast, slow, clock=clock * 1e9)


V100 = _gpu("V100", 32, 125, 15.7, 900, 150, 6.25)
A100 = _gpu("A100", 80, 312, 156, 2039, 300, 25)
H100 = _gpu("H100", 80, 989, 495, 3350, 450, 50)
H200 = _gpu("H200", 141, 989, 495, 4800, 450, 50)
B200 = _gpu("B200", 180, 2250, 1125, 8000, 900, 50)
TPU_V4 = _tpu("TPU v4", 32, 275, 1228, 4096, 45, 6.25, 1.05)
TPU_V5E = _tpu("TPU v5e", 16, 197, 819, 256, 45, 3.125, 1.5)
TPU_V5P = _tpu("TPU v5p", 95, 459, 2765, 8960, 90, 6.25, 1.75)
TPU_V6E = _tpu("TPU v6e", 32, 918, 1640, 256, 90, 12.5, 1.75)
TPU7X = _tpu("TPU7x", 192, 2307, 7380, 9216, 90, 12.5, 1.75)

# A virtual CPU device: it has no rates of its own, so that a plan for it is about bytes alone.
VIRTUAL_CPU = Hardware(
    *("virtual CPU", "cpu", math.inf, 1e11, 1e11, 1e10, 1),
    *2 * (Link(1e-5, 1e-10),),
    efficiency=1.0,
    short=4,
)

KNOWN = {
    **{"v100": V100, "a100": A100, "h100": H100, "h200": H200, "b200": B200},
    **{"v4": TPU_V4, "v5e": TPU_V5E, "v5p": TPU_V5P, "v6e": TPU_V6E, "tpu7x": TPU7X},
}


def named(name: str) -> Hardware:
    """Returns the record of a known chip, by a name such as `a100` or `v5p`, or a TPU's slice as
    `v5e:2x4`, whose links then count.

    Raises:
        ValueError: it is not known.
    """
    key, _, sizes = name.lower().partition(":")
    key = key if key in KNOWN else key.replace("tpu", "").strip(" -_")
    torus = tuple(int(size) for size in sizes.split("x") if size.isdigit())
    if key not in KNOWN or "x".join(map(str, torus)) != sizes:
        raise ValueError(
            f"hardware.named needs one of {', '.join(KNOWN)}; got {name!r}. Use one of them, or "
            "a hardware.Hardware with your numbers."
        )
    return (
        dataclasses.replace(KNOWN[key], torus=torus, domain=math.prod(torus))
        if torus
        else KNOWN[key]
    )
