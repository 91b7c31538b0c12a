"""All-reduces on 4 to 100,000 devices, message by message as their tables have them: on a ring, a
torus and a cluster.

    python benchmarks/simulate.py [--picture simulate.png]

Nothing is measured here: the links are those given. See benchmarks/README.md for what the networks
are.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import measure

from parallax.collectives import (
    algorithm_of_axes,
    cost,
    doubling,
    halving,
    hierarchical,
    ring,
    tables,
    torus,
    two_rings,
)
from parallax.collectives.cost import Link, Round

SIDES = (2, 4, 8, 16, 32, 64, 128, 256, 316)  # of a square torus: 4 to 99,856 devices
CHIP = Link(
    alpha=1e-6, beta=1 / 45e9
)  # a link between neighbours on a board or in a pod, one direction
BOARD = Link(alpha=1e-6, beta=1 / 200e9)  # a switch within a machine
CABLE = Link(alpha=1e-5, beta=1 / 50e9)  # a device's own adapter to the other machines
MACHINE = 8  # devices of a machine


@algorithm_of_axes
def ring_then_halving(machines, devices):
    """A ring within each machine, halving between them."""
    return tables.product([halving.table(machines), ring.table(devices)], (1, 0))


RIVALS = {
    "ring": ring.all_reduce,
    "two rings": two_rings.all_reduce,
    "halving and doubling": halving.all_reduce,
    "doubling": doubling.all_reduce,
    "torus": torus.all_reduce,
    "hierarchical, ring": hierarchical.all_reduce,
    "hierarchical, halving": ring_then_halving.all_reduce,
}
BY_AXES = (
    "torus",
    "hierarchical, ring",
    "hierarchical, halving",
)  # they are given an axis for each dim of the network


class Network(NamedTuple):
    """How devices are wired: the axes that n of them make, what one round takes there, and who can
    run."""

    describe: str
    axes: Callable[[int], tuple[int, ...]]
    round: Callable[[Round, tuple[int, ...], bool], float]
    rivals: tuple[str, ...]


def on_ring(round: Round, axes: tuple[int, ...], split: bool) -> float:
    """A link carries as many of the messages as they go far: all devices send at the same time."""
    (n,) = axes
    return max(_walked(message.bytes, *message.step, n) for message in round.messages)


def on_torus(round: Round, axes: tuple[int, ...], split: bool) -> float:
    """Along its own axis, or, of a function that knows one axis only, first along the columns, then
    along the row."""
    parts = []
    for nbytes, step, _ in round.messages:
        # A ring through all devices is laid as a snake: its neighbours are neighbours.
        snaking = divmod(abs(step[0]), axes[1]) if abs(step[0]) > 1 else (0, 1)
        parts += [
            _walked(nbytes, far, n) for far, n in zip(step if split else snaking, axes, strict=True)
        ]
    return max(parts)


def on_cluster(round: Round, axes: tuple[int, ...], split: bool) -> float:
    """Machines on a switch: a message that some device sends to another machine is what the round
    waits for."""
    machines, _ = axes
    if machines == 1 or (split and round.messages[0].step[0] == 0):
        return BOARD.alpha + BOARD.beta * sum(
            message.bytes for message in round.messages
        )  # through one port
    return CABLE.alpha + CABLE.beta * max(message.bytes for message in round.messages)


def _walked(nbytes: int, step: int, n: int) -> float:
    far = min(abs(step) % n, -abs(step) % n)
    return far and CHIP.alpha * far + CHIP.beta * nbytes * far


NETWORKS = {
    "ring": Network(
        f"each device linked to two, {1 / CHIP.beta / 1e9:.0f} GB/s each way, "
        f"{1e6 * CHIP.alpha:.0f} us a link",
        lambda n: (n,),
        on_ring,
        ("ring", "two rings", "halving and doubling", "doubling"),
    ),
    "torus": Network(
        f"a square of devices, each linked to four, {1 / CHIP.beta / 1e9:.0f} GB/s each way, "
        f"{1e6 * CHIP.alpha:.0f} us a link",
        lambda n: (math.isqrt(n), math.isqrt(n)),
        on_torus,
        ("ring", "two rings", "halving and doubling", "doubling", "torus"),
    ),
    "cluster": Network(
        f"machines of {MACHINE} on a switch of {1 / BOARD.beta / 1e9:.0f} GB/s and "
        f"{1e6 * BOARD.alpha:.0f} us; each device its own adapter to the others, "
        f"{1 / CABLE.beta / 1e9:.0f} GB/s and {1e6 * CABLE.alpha:.0f} us",
        lambda n: (max(n // MACHINE, 1), min(n, MACHINE)),
        on_cluster,
        (
            "ring",
            "two rings",
            "halving and doubling",
            "doubling",
            "hierarchical, ring",
            "hierarchical, halving",
        ),
    ),
}


def seconds(rival: str, network: Network, nbytes: int, n: int) -> float:
    """What an all-reduce of `nbytes` a device takes on n devices."""
    axes, split = network.axes(n), rival in BY_AXES
    return sum(
        r.times * network.round(r, axes, split)
        for r in cost.rounds(RIVALS[rival], nbytes, axes if split else n)
    )


def main():
    arguments = parse()
    counts = [side**2 for side in arguments.sides]
    for name, network in NETWORKS.items():
        print(f"{name}: {network.describe}\n")
        for nbytes in arguments.sizes:
            lines = []
            for n in counts:
                times = {rival: seconds(rival, network, nbytes, n) for rival in network.rivals}
                line = {f"{measure.size(nbytes)}, on": f"{n:,}"}
                line |= {
                    rival + ", ms": measure.milliseconds(time) for rival, time in times.items()
                }
                lines.append(line | {"fastest": min(times, key=times.__getitem__)})
            print(measure.table(lines), "\n", flush=True)
    if arguments.picture:
        draw(arguments.picture, arguments.sizes, counts)
        print(f"Drawn in {arguments.picture}.")


def draw(path: str, sizes: Sequence[int], counts: Sequence[int]):
    """Time against devices: a column for each network, a row for each size."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    shape = {
        "nrows": len(sizes),
        "ncols": len(NETWORKS),
        "figsize": (4.4 * len(NETWORKS), 3.4 * len(sizes) + 0.6),
    }
    figure, panels = plt.subplots(
        **shape, sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    colours = dict(zip(RIVALS, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    marks = dict(zip(RIVALS, "os^vDPX", strict=True))
    for panel, name in zip(panels[0], NETWORKS, strict=True):
        panel.set_title(f"{name} network")
    for panel in panels[-1]:
        panel.set_xlabel("devices")
    for row, nbytes in zip(panels, sizes, strict=True):
        row[0].set_ylabel(f"{measure.size(nbytes)} a device\n\ntime of an all-reduce, ms")
        for panel, network in zip(row, NETWORKS.values(), strict=True):
            for rival in network.rivals:
                times = [1e3 * seconds(rival, network, nbytes, n) for n in counts]
                style = {
                    "color": colours[rival],
                    "markersize": 7 if rival == "ring" else 4,
                    "linewidth": 1.4,
                    "fillstyle": "none",
                }
                panel.loglog(counts, times, marks[rival] + "-", label=rival, **style)
            panel.grid(alpha=0.3)
    handles = {
        label: handle
        for panel in panels[0]
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = [2**12, 2**22, 2**30]
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=sizes, help="bytes a device (4 kB, 4 MB, 1 GB)"
    )
    parser.add_argument(
        "--sides",
        type=int,
        nargs="+",
        default=SIDES,
        help="of a square: n is its square (2 to 316)",
    )
    parser.add_argument("--picture", help="a file for the picture")
    return parser.parse_args()


if __name__ == "__main__":
    main()
