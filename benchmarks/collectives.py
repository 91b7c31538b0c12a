"""All-reduces in one race with `lax.psum`: in one process on virtual devices, and over gloo between
processes.

    python benchmarks/collectives.py [--quick] [--picture race.png]

A rival is a line of RIVALS. See benchmarks/README.md for the columns.
"""

import argparse
import functools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import measure
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.collectives import (
    cost,
    doubling,
    halving,
    halving_by,
    hierarchical,
    pairs,
    quantized,
    ring,
    torus,
    tuning,
    two_rings,
)
from parallax.collectives.cost import Link
from parallax.compiled import hlo

AXES = ("slow", "fast")  # of 1 x 2, 2 x 2 and 2 x 4 devices, so that those of two axes can run
RIVALS = {
    "psum": lax.psum,
    "ring": ring.all_reduce,
    "two rings": two_rings.all_reduce,
    "halving": halving.all_reduce,
    "by fours": halving_by(4).all_reduce,
    "pairs": pairs.all_reduce,
    "doubling": doubling.all_reduce,
    "torus": torus.all_reduce,
    "hierarchical": hierarchical.all_reduce,
    "int8": quantized.all_reduce,
}
INEXACT = ("int8",)  # not counted among the best
SHORT = 2**20  # bytes up to which there are more rounds: they are over soon, and vary most
FAR = {
    "gloo": 2**12,
    "process": 2**22,
}  # means are taken from 4 kB over gloo, from 4 MB in one process


class Place(NamedTuple):
    """What was measured in one place: a row for each size, the link that was fitted, and what
    `auto` says."""

    where: str
    n: int
    link: Link
    told: str
    rows: list[dict]

    @property
    def over_gloo(self) -> bool:
        """Whether the devices are in processes of their own."""
        return self.where.endswith("gloo")

    @property
    def shape(self) -> tuple[int, int]:
        """Devices on the slow and on the fast axis."""
        return shape(self.n)

    def knows(self, rival: str) -> bool:
        """Whether it has a table: psum and auto have none."""
        return rival in RIVALS and rival != "psum"

    def predicted(self, rival: str, nbytes: int) -> float:
        """Seconds by the table and the link."""
        return (
            cost.seconds(cost.of(RIVALS[rival], nbytes, self.shape), self.link)
            if self.knows(rival)
            else math.nan
        )


def main():
    arguments = parse()
    if arguments.process is not None:
        (count,) = arguments.processes
        run = functools.partial(raced, count, arguments)
        return measure.one_of_many(
            run, port=arguments.port, processes=count, process=arguments.process
        )
    measure.virtual_devices(max(arguments.devices, default=1))
    places = []
    for n in arguments.devices:
        world = mesh.make(**dict(zip(AXES, shape(n), strict=True)), devices=jax.devices()[:n])
        places.append(Place(f"{n} devices of one process", n, *race(world, arguments)))
        report(places[-1])
    for n in arguments.processes:
        flags = [
            "--rounds",
            str(arguments.rounds),
            "--sizes",
            *map(str, arguments.sizes),
            "--rivals",
            *arguments.rivals,
        ]
        flags = ["--processes", str(n), "--port", str(measure.free_port()), *flags]
        commands = [[sys.executable, __file__, "--process", str(i), *flags] for i in range(n)]
        first, *_ = measure.run_together(commands, timeout=arguments.timeout)
        link, told, rows = json.loads(first.splitlines()[-1])
        places.append(Place(f"{n} processes over gloo", n, Link(*link), told, rows))
        report(places[-1])
    summarise(places)
    if arguments.picture:
        draw(arguments.picture, places)
        print(f"Drawn in {arguments.picture}.")


def shape(n: int) -> tuple[int, int]:
    """Two machines, of n/2 devices each; of two devices, one."""
    return (2, n // 2) if n > 2 and n % 2 == 0 else (1, n)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--devices", type=int, nargs="*", default=None, help="device counts in one process (2 4 8)"
    )
    parser.add_argument(
        "--processes", type=int, nargs="*", default=None, help="process counts over gloo (2 4)"
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=None,
        help="bytes a device, in float32 (4 kB to 64 MB)",
    )
    parser.add_argument(
        "--rounds", type=int, default=None, help="times that each rival is measured in turn (7)"
    )
    parser.add_argument(
        "--rivals",
        nargs="+",
        choices=[*RIVALS, "auto"],
        default=None,
        help="who races (all); psum always does",
    )
    parser.add_argument(
        "--timeout", type=float, default=900, help="seconds for the processes of one count"
    )
    parser.add_argument("--picture", help="a file for the picture")
    parser.add_argument(
        "--quick", action="store_true", help="a run of some seconds, to see that it works"
    )
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    usual = dict(
        devices=[2, 4, 8],
        processes=[2, 4],
        sizes=[4**k * 1024 for k in range(1, 9)],
        rounds=7,
        rivals=[*RIVALS, "auto"],
    )
    quick = dict(
        devices=[2, 8],
        processes=[2],
        sizes=[4096, 2**20],
        rounds=3,
        rivals=["psum", "ring", "halving"],
    )
    for name, value in (quick if arguments.quick else usual).items():
        setattr(
            arguments, name, value if getattr(arguments, name) is None else getattr(arguments, name)
        )
    arguments.rivals = list(dict.fromkeys(["psum", *arguments.rivals]))
    return arguments


def raced(count: int, arguments: argparse.Namespace):
    """What each of `count` processes over gloo runs: the race, printed for the one that started
    them."""
    print(
        json.dumps(race(mesh.make(**dict(zip(AXES, shape(count), strict=True))), arguments)),
        flush=True,
    )


def race(world: Mesh, arguments: argparse.Namespace) -> tuple[Link, str, list[dict]]:
    """The link fitted, what `auto` says, and for each size the median seconds and compiled bytes of
    all rivals, and of a copy."""
    rivals, told = {name: RIVALS[name] for name in arguments.rivals if name != "auto"}, ""
    link = tuning.fit(world, AXES)
    if "auto" in arguments.rivals:
        auto, told = tuning.auto(world, AXES, link=link)
        rivals["auto"] = auto.all_reduce
    rows = []
    for S in arguments.sizes:
        runs, sent, programs = {}, {}, {}
        x = placed(world, S)
        for name, all_reduce in rivals.items():

            def local(x, f=all_reduce):
                return f(x, AXES)

            program = (
                jax.jit(mesh.spmd(local, mesh=world, in_specs=(P(AXES),), out_specs=P()))
                .lower(x)
                .compile()
            )
            runs[name] = functools.partial(program, x)
            programs[name] = hlo.module(re.sub(r", metadata=\{[^}]*\}", "", program.as_text()))
            sent[name] = sum(kind.bytes for kind in measure.collectives(program).values())
        check(world, runs)
        calls = max(1, min(20, 2**22 // S))  # a sample of a short one is many calls
        rounds = arguments.rounds * (3 if S <= SHORT else 1)
        times = measure.interleaved(runs | {"copy": measure.copy(x)}, rounds=rounds, calls=calls)
        # Auto's program is that of what it chose, instruction by instruction: their samples are of
        # one thing.
        for name in rivals:
            if name != "auto" and programs[name] == programs.get("auto"):
                times["auto"] = times[name] = times["auto"] + times[name]
        rows.append({"S": S, "seconds": measure.medians(times), "sent": sent})
    return link, told, rows


def placed(world: Mesh, nbytes: int) -> jax.Array:
    """An array of `nbytes` on each device: small whole numbers, other ones on each."""
    size, sharding = nbytes // 4, NamedSharding(world, P(AXES))

    def block(index):
        return (np.arange(size, dtype=np.float32) % 13 + (index[0].start or 0))[None]

    return jax.make_array_from_callback((world.size, size), sharding, block)


def check(world: Mesh, runs: dict[str, Callable]):
    """Refuse rivals whose sum is another than psum's."""
    host = {name: np.asarray(run().addressable_data(0)) for name, run in runs.items()}
    for name, found in host.items():
        bound = np.abs(host["psum"]).max() * world.size / 127 if name in INEXACT else 0
        if not np.abs(found - host["psum"]).max() <= bound:
            raise AssertionError(
                f"{name}: the sum is off by {np.abs(found - host['psum']).max()}, of {bound} at "
                "most."
            )


def report(place: Place):
    """Print the table of one place."""
    lines = []
    for row in place.rows:
        S, seconds = row["S"], row["seconds"]
        for name in row["sent"]:
            predicted, known = place.predicted(name, S), place.knows(name)
            line = {
                "size": measure.size(S),
                "rival": name,
                "ms": measure.milliseconds(seconds[name]),
                "predicted ms": measure.milliseconds(predicted),
                "off by": f"{predicted / seconds[name] - 1:+.0%}" if known else "nan",
                "to psum": f"{seconds[name] / seconds['psum']:.2f}",
                "predicted B": cost.of(RIVALS[name], S, place.shape).sent if known else "nan",
                "compiled B": row["sent"][name],
            }
            if not place.over_gloo:
                touched = (
                    touches(name, S, place.shape) if S >= 2**20 else math.nan
                )  # a small copy is all overhead
                floor = touched * seconds["copy"] / (2 * S)
                line |= {
                    "floor ms": measure.milliseconds(floor),
                    "to floor": f"{seconds[name] / floor:.2f}",
                }
            lines.append(line)
    print(f"{place.where}\n\n{measure.table(lines)}\n")
    link = place.link
    print(
        f"The link fitted: {1e6 * link.alpha:.3g} us a hop, {1e9 * link.beta:.3g} ns a byte, "
        f"{1e9 * link.gamma:.3g} ns a byte added, {1e6 * link.start:.3g} us a call, "
        f"{'one port' if link.one_port else 'links of their own'}; off by {link.error:.0%} in the "
        f"median of what it was fitted to.\n{place.told}\n",
        flush=True,
    )


def touches(rival: str, nbytes: int, axes: tuple[int, ...]) -> float:
    """Bytes that a device reads and writes in one process: a message is copied (2), then added (3)
    or stored (2)."""
    if rival == "psum":
        return 2 * nbytes
    if rival not in RIVALS:
        return math.nan
    price = cost.of(RIVALS[rival], nbytes, axes)
    return 4 * price.sent + price.reduced


def summarise(places: Sequence[Place]):
    """Print who won at each size, the means of the ratios to psum, how auto did, and how far the
    model was off."""
    winners, means = [], []
    for place in places:
        exact = [name for name in place.rows[0]["sent"] if name not in (*INEXACT, "auto")]
        ours = [name for name in exact if name != "psum"]
        ratios = {
            name: [] for name in [*place.rows[0]["sent"], "the best of ours"] if name != "psum"
        }
        off, behind = [], []
        for row in place.rows:
            S, seconds = row["S"], row["seconds"]
            best = min(ours, key=seconds.__getitem__)
            line = {
                "where": place.where,
                "size": measure.size(S),
                "fastest": min(exact, key=seconds.__getitem__),
            }
            line |= {"of ours": best, "to psum": f"{seconds[best] / seconds['psum']:.2f}"}
            to_the_best = seconds.get("auto", math.nan) / min(seconds[name] for name in exact)
            winners.append(line | {"auto to the best": f"{to_the_best:.2f}"})
            off += [abs(place.predicted(name, S) / seconds[name] - 1) for name in ours]
            if "auto" in seconds:
                behind.append(to_the_best)
            if FAR["gloo" if place.over_gloo else "process"] <= S:
                for name, of in ratios.items():
                    of.append(
                        seconds[best if name == "the best of ours" else name] / seconds["psum"]
                    )
        line = {"where": place.where} | {
            name: f"{measure.geometric_mean(of):.2f}" for name, of in ratios.items()
        }
        line |= {"auto at worst to the best": f"{max(behind, default=math.nan):.2f}"}
        means.append(line | {"model off by, median": f"{statistics.median(off):.0%}"})
    if places:
        print(f"Who wins\n\n{measure.table(winners)}\n")
        far = (
            f"{measure.size(FAR['gloo'])} over gloo, from {measure.size(FAR['process'])} in one "
            "process"
        )
        print(
            f"Geometric means of the ratio to psum, from {far}\n\n{measure.table(means)}\n",
            flush=True,
        )


def draw(path: str, places: Sequence[Place]):
    """Time against size, a panel for each place: what was measured as marks, the model as lines."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    columns = min(len(places), 3)
    size = {"nrows": -(-len(places) // columns), "ncols": columns}
    figure, panels = plt.subplots(
        **size,
        figsize=(5 * columns, 4.2 * size["nrows"] + 0.5),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    marks = dict(zip([*RIVALS, "auto"], "ks^v<>DPXo*", strict=False)) | {"psum": "o", "int8": "x"}
    colours = dict(
        zip(
            [*RIVALS, "auto"],
            ["black", *plt.rcParams["axes.prop_cycle"].by_key()["color"]],
            strict=False,
        )
    )
    for panel, place in zip(panels.flat, places, strict=False):
        sizes = [row["S"] for row in place.rows]
        for name in place.rows[0]["sent"]:
            style = {"color": colours[name], "markersize": 5, "fillstyle": "none"}
            measured = [1e3 * row["seconds"][name] for row in place.rows]
            panel.loglog(
                sizes,
                measured,
                marks[name],
                label=name,
                linestyle=":" if name == "psum" else "none",
                **style,
            )
            model = [1e3 * place.predicted(name, S) for S in sizes]
            panel.loglog(sizes, model, color=colours[name], linewidth=1, alpha=0.7)
        panel.set(
            title=place.where, xlabel="bytes on each device", ylabel="time of an all-reduce, ms"
        )
        panel.grid(alpha=0.3)
    for panel in panels.flat[len(places) :]:
        panel.set_visible(False)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels),
        frameon=False,
        title="marks: measured; lines: the model",
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
