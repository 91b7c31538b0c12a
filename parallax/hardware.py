"""The table of chips: the rates and sizes that their makers state.

    hardware.A100                                  # a record: the figures of one device

Figures are for one GPU or one TPU chip, even if JAX shows a chip as two devices. Rates of links are
for one direction. A GB is 10^9 bytes, but 2^30 bytes for the memory of a TPU. The figures were
written down before any estimate was made, and not changed to fit measurements. Sources:

* GPU: NVIDIA's documents about the SXM boards. The rates are for dense matrices, without sparsity.
  images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf,
  nvidia-ampere-architecture-whitepaper.pdf, resources.nvidia.com/en-us-tensor-core. The rate of
  NVLink is for one direction. The network between machines is the network of a DGX; each of the
  eight devices of a DGX has an eighth of the network's rate. The latencies of a hop, 3.4 us over
  NVLink and 14 us over the network, are the base latencies in NCCL's model of rings
  (src/graph/tuning.cc).
* TPU: cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x. The rates of links, and 1 us for a hop,
  are from Austin et al., How to scale your model (jax-ml.github.io/scaling-book), chapter 2. For
  the v4 and the TPU7x, the rate of the network between slices is not stated: the table has the rate
  of a v5p for a v4, and the rate of a v6e for a TPU7x. The latency of that network is assumed to be
  10 us. For all links of a chip together, in both directions, Google's pages state 1,200 GB/s (v5p
  and TPU7x, 6 links) and 800 GB/s (v6e, 4 links). So they state 100 GB/s for one link in one
  direction. Austin et al. state 90 GB/s for these three chips, and the table has their rate.
* The compiler for a TPU states times in cycles; the clock turns cycles into seconds. Up to v5p, the
  clock is computed: the rate of matrix products is divided by the chip's operations per cycle. Each
  matrix unit does 2 x 128 x 128 operations per cycle, and a core has 4 such units; a v5e has one
  core, a v4 or v5p two. From v6e on, the number of units is not stated, and the table has the 1.75
  GHz of a v5p.
* A program reaches less than the stated figures. Large products are assumed to reach 0.75 of the
  rate. To estimate the time of a program compiled for a GPU, operations that only read and write
  memory are assumed to reach 0.9 of the bandwidth, and NVLink 0.8 of its rate. For a program
  compiled for a TPU, no share is assumed: the compiler states the cycles of all operations.
"""

import dataclasses
import math
from collections.abc import Mapping

from parallax import torus
from parallax.collectives.cost import Link

GB, GIB, TERA = 1e9, 2.0**30, 1e12


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The figures of one device.

    Args:
        name: the maker's name.
        platform: "tpu", "cuda" or "cpu", as in XLA.
        memory: the bytes of memory.
        rate: the floating-point operations per second of matrix products in 16 bits.
        full_rate: the floating-point operations per second of matrix products of float32 arrays, in
            JAX's default precision.
        bandwidth: the bytes per second from and to memory.
        domain: the number of devices that fast links join, which are the GPUs of a machine or the
            chips of a slice.
        fast: the seconds of a hop inside a domain: per hop (`alpha`), per byte sent (`beta`), and
            per received byte that the device adds to its own numbers (`gamma`). On a TPU the hop is
            over one fast link; on a GPU the hop is over all links from the GPU to the switch.
        slow: the seconds of a hop between domains, in the same form.
        efficiency: the fraction of the rates that large products are assumed to reach.
        reached: `(memory, links)`, for the estimate of a compiled program's time: the fraction of
            the bandwidth and the fraction of the links' rates that the program reaches.
        clock: the cycles per second of a TPU, whose compiler states times in cycles; else 0.
        fresh: the seconds that the system takes to provide a byte of memory for a step's temporary
            arrays; 0 if this memory is kept from step to step.
        short: the bytes of a number in `bfloat16` or `float16`: 2, or 4 if the compiler widens such
            numbers.
        torus: the chips along each dim of the slice that the mesh uses, such as (2, 4). With () a
            hop is always one link.
        cores: the number of devices that share one chip and its links. `for_devices` sets it to 2
            if each core of a chip is a device.
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
    cores: int = 1

    def for_devices(self, devices: int) -> "Hardware":
        """Returns the figures of one device of a mesh. If the mesh has two devices for each chip of
        the torus, each device has half of the chip's memory and rates. Otherwise a chip is one
        device, and the record is returned unchanged. A v5e or v6e chip has one core, so it is
        always one device."""
        # `torus.FLAT` has v5e and v6e, the chips whose torus has two dims.
        is_one_device = self.cores > 1 or self.name in torus.FLAT
        if is_one_device or not self.torus or devices != 2 * math.prod(self.torus):
            return self
        # If `cores` is 2, the record is of one device already. `domain` counts devices, two for
        # each chip. A device adds received bytes at half of the chip's bandwidth (gamma). The two
        # devices share the chip's links, so a byte takes twice as long (beta): for `slow` this is
        # counted here, and for `fast` where `cores` is read, in `link` and `plan.networks`.
        fast, slow = (link._replace(gamma=2 * link.gamma) for link in (self.fast, self.slow))
        return dataclasses.replace(
            self,
            memory=self.memory / 2,
            rate=self.rate / 2,
            full_rate=self.full_rate / 2,
            bandwidth=self.bandwidth / 2,
            domain=2 * self.domain,
            fast=fast,
            slow=slow._replace(beta=2 * slow.beta),
            cores=2,
        )

    def link(self, span: int, links: float = 1.0) -> Link:
        """Returns the times of a hop in a group of devices: the seconds per hop (`alpha`), per byte
        sent (`beta`) and per received byte that the device adds to its own numbers (`gamma`). A
        domain is a set of devices that fast links join. The hop is over fast links if a domain has
        at least `span` devices; else it is over the network.

        Args:
            span: the number of devices from the first device of the group to the last, in the order
                of the devices' numbers.
            links: the number of fast links that the hop crosses. `alpha` and `beta` of a fast link
                are multiplied by this number, since the bytes cross each link. `gamma` is not
                multiplied, since each byte is added once.

        All devices of one chip are assumed to send over the chip's fast links at the same time. So
        the `beta` of a fast link is also multiplied by `cores`, the number of devices of a chip.
        """
        if span > self.domain:
            return self.slow
        beta = links * self.cores * self.fast.beta
        return self.fast._replace(alpha=links * self.fast.alpha, beta=beta)

    def hops(self, axes: Mapping[str, int]) -> dict[str, float]:
        """Returns, for each axis, the mean number of links on the way from a device to the next
        device along the axis, if `mesh.make` lays the axes on the torus. Without a torus each mean
        is 1.

        Raises:
            ValueError: the product of the axes is neither the number of the torus's chips nor the
                number of its cores.
        """
        # The module's `torus.FLAT` has the names of the TPUs whose torus has two dims. Their chips
        # have one core. On other chips, each of two cores may be a device.
        is_flat = self.name in torus.FLAT
        possible = (1,) if is_flat else (1, 2)
        # Devices per chip. Without a torus (`()`, whose product is 1) nothing is refused.
        cores, remainder = divmod(math.prod(axes.values()), math.prod(self.torus))
        if remainder or (self.torus and cores not in possible):
            raise ValueError(
                f"plan: the torus {'x'.join(map(str, self.torus))} has {math.prod(self.torus)} "
                f"chips, and the layout has {math.prod(axes.values())} devices. Use a layout "
                "with one device per chip or one per core, or give another torus."
            )
        if not self.torus:
            return dict.fromkeys(axes, 1.0)
        # For each dim, whether its ends are linked into a ring.
        rings = torus.closed_dims(is_flat, self.torus)
        return dict(
            zip(axes, torus.hops(self.torus, rings, cores, tuple(axes.values())), strict=True)
        )


def _gpu(name, memory, rate, full_rate, bandwidth, nvlink, network) -> Hardware:
    """Returns the record of a GPU.

    `memory` is in GB. `rate` is the rate of products in 16 bits, and `full_rate` the rate of
    products of float32 arrays, both in 10^12 operations per second. `bandwidth`, `nvlink` and
    `network` are in GB per second. `nvlink` is the rate of all links of a device inside a machine,
    and `network` is the rate of a device over the network between machines.
    """
    # Seconds per hop, per byte that is sent, and per received byte that is added (alpha, beta,
    # gamma). gamma is the time to read the device's own number from memory. The time to receive
    # and store a byte is in beta. The head has the sources of the latencies and of the shares
    # reached.
    fast = Link(3.4e-6, 1 / (nvlink * GB), 1 / (bandwidth * GB))
    slow = Link(14e-6, 1 / (network * GB), 1 / (bandwidth * GB))
    rates = rate * TERA, full_rate * TERA, bandwidth * GB  # in the order of `Hardware`'s fields
    domain = 8  # the GPUs of a machine, which NVLink joins
    return Hardware(name, "cuda", memory * GB, *rates, domain, fast, slow, reached=(0.9, 0.8))


def _tpu(name, memory, rate, bandwidth, chips, link, network, clock) -> Hardware:
    """Returns the record of a TPU chip.

    `memory` is in units of 2^30 bytes, `rate` is in 10^12 operations per second, and `clock` is in
    GHz. `bandwidth`, `link` and `network` are in 10^9 bytes per second. `chips` is the number of
    chips of the largest slice. `link` is the rate of one link between neighbours, and `network` is
    the rate of a chip over the network between slices.
    """
    # Seconds per hop, per byte that is sent, and per received byte that is added (alpha, beta,
    # gamma). gamma is the time to read the device's own number from memory. The time to receive
    # and store a byte is in beta. The head of this file has the sources of the latencies.
    fast = Link(1e-6, 1 / (link * GB), 1 / (bandwidth * GB))
    slow = Link(1e-5, 1 / (network * GB), 1 / (bandwidth * GB))
    # JAX multiplies float32 arrays on a TPU in bfloat16 by default, so both rates are the same.
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

# A virtual CPU device. Its rates are placeholders: only the bytes of a plan for it mean something.
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
    """Returns the record of a known chip, by a name such as `a100` or `v5p`.

    A name such as `v5e:2x4` gives the chip with the torus of a slice, so that a hop over several
    links costs the time of all these links.

    Raises:
        ValueError: the chip is not known, the sizes of the torus are not whole numbers of 1 or
            more, the torus of this chip has more or fewer dims, or the name gives a torus for a
            GPU.
    """
    key, _, sizes = name.lower().partition(":")
    # Names such as "TPU v5p" are known too.
    key = key if key in KNOWN else key.replace("tpu", "").strip(" -_")
    if key not in KNOWN:
        raise ValueError(
            f"hardware.named needs one of {', '.join(KNOWN)}; got {name!r}. Use one of them, or "
            "a hardware.Hardware with your numbers."
        )
    box = tuple(int(size) for size in sizes.split("x") if size.isdecimal() and int(size))
    # `box` leaves out sizes that are not whole numbers; its text then differs from `sizes`.
    if "x".join(map(str, box)) != sizes:
        raise ValueError(
            "hardware.named needs whole numbers of 1 or more as the sizes of a torus; got "
            f"{name!r}. Write them like '{key}:2x4'."
        )
    if not box:
        return KNOWN[key]
    if KNOWN[key].platform != "tpu":
        raise ValueError(
            f"hardware.named takes the sizes of a torus only for TPUs; got {name!r}. Use {key!r}."
        )
    is_flat = KNOWN[key].name in torus.FLAT
    if len(box) not in ((2,) if is_flat else (2, 3)):  # two sizes of three: the third is 1
        raise ValueError(
            f"hardware.named needs {2 if is_flat else 3} sizes for the torus of a {key}; got "
            f"{name!r}. Write them like '{key}:{'2x4' if is_flat else '2x2x1'}'."
        )
    # The fast links join only the chips of this slice.
    return dataclasses.replace(KNOWN[key], torus=box, domain=math.prod(box))
