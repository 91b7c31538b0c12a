"""All-reduces against `lax.psum`: in one process on virtual devices, and over gloo between processes.

    python benchmarks/collectives.py [--quick]

A rival is a line of RIVALS. See benchmarks/README.md for the columns.
"""

import argparse
import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import measure
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parallax import mesh
from parallax.collectives import ring


class Rival(NamedTuple):
    """An all-reduce, and what theory says of it, for n devices and arrays of S bytes."""

    all_reduce: Callable
    sends: Callable[[int, int], float]  # the bytes of its collectives' results, on a device
    touches: Callable[[int, int], float]  # the bytes that a device reads and writes, in one process


RIVALS = {
    "psum": Rival(lax.psum, lambda n, S: S, lambda n, S: 2 * S),
    # Each of n - 1 hops copies a message (2) and adds it to a block (3), then each of n - 1 copies one (2) and stores it (2).
    "ring": Rival(ring.all_reduce, lambda n, S: 2 * (n - 1) / n * S, lambda n, S: 9 * (n - 1) / n * S),
}
FAR = 2**20, 2**22  # means are taken from 1 MB over gloo, from 4 MB in one process


def main():
    arguments = parse()
    if arguments.process is not None:
        return one_of_many(arguments)
    measure.virtual_devices(max(arguments.devices, default=1))
    means = []
    for n in arguments.devices:
        rows = sweep(mesh.make(x=n, devices=jax.devices()[:n]), arguments.sizes, arguments.rounds)
        means += report(f"{n} devices of one process", rows, FAR[1])
    for n in arguments.processes:
        flags = ["--rounds", str(arguments.rounds), "--sizes", *map(str, arguments.sizes)]
        flags = ["--processes", str(n), "--port", str(measure.free_port()), *flags]
        commands = [[sys.executable, __file__, "--process", str(i), *flags] for i in range(n)]
        first, *_ = measure.run_together(commands, timeout=arguments.timeout)
        means += report(f"{n} processes over gloo", json.loads(first.splitlines()[-1]), FAR[0])
    if means:
        print(f"Geometric means of the ratio to psum\n\n{measure.table(means)}\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="*", default=None, help="device counts in one process (2 4 8)")
    parser.add_argument("--processes", type=int, nargs="*", default=None, help="process counts over gloo (2 4)")
    parser.add_argument("--sizes", type=int, nargs="+", default=None, help="bytes a device, in float32 (4 kB to 64 MB)")
    parser.add_argument("--rounds", type=int, default=None, help="times that each rival is measured in turn (7)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for the processes of one count")
    parser.add_argument("--quick", action="store_true", help="a run of some seconds, to see that it works")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    defaults = dict(devices=[2, 4, 8], processes=[2, 4], sizes=[4**k * 1024 for k in range(1, 9)], rounds=7)
    quick = dict(devices=[2, 8], processes=[2], sizes=[4096, 2**20], rounds=3)
    for name, value in (quick if arguments.quick else defaults).items():
        setattr(arguments, name, value if getattr(arguments, name) is None else getattr(arguments, name))
    return arguments


def one_of_many(arguments: argparse.Namespace):
    """What each process over gloo runs, one device each; all in step, since each waits for the others in every collective."""
    (count,) = arguments.processes
    try:
        measure.virtual_devices(1)
        jax.distributed.initialize(f"127.0.0.1:{arguments.port}", count, arguments.process)
        rows = sweep(mesh.make(x=count), arguments.sizes, arguments.rounds)
        print(json.dumps(rows), flush=True)
        jax.distributed.shutdown()
    except Exception:  # the others would wait for this process for minutes: end at once
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def sweep(mesh_: Mesh, sizes: Sequence[int], rounds: int) -> list[dict]:
    """For each size, the median seconds and the compiled traffic of all rivals, and the seconds of a copy of the array."""
    n = mesh_.size
    rows = []
    for S in sizes:
        local = np.ones((1, S // 4), np.float32)
        sharding = NamedSharding(mesh_, P("x"))
        x = jax.make_array_from_callback((n, S // 4), sharding, lambda _: local)  # noqa: B023
        programs = {}
        for name, rival in RIVALS.items():
            local_sum = functools.partial(rival.all_reduce, axis_name="x")
            programs[name] = jax.jit(mesh.spmd(local_sum, mesh=mesh_, in_specs=(P("x"),), out_specs=P()))
        runs = {name: functools.partial(program, x) for name, program in programs.items()}
        calls = max(1, min(20, 2**22 // S))  # a sample of a short one is many calls
        times = measure.interleaved(runs | {"copy": measure.copy(x)}, rounds=rounds, calls=calls)
        sent = {name: measure.collectives(program.lower(x).compile()) for name, program in programs.items()}
        bytes_sent = {name: sum(kind.bytes for kind in kinds.values()) for name, kinds in sent.items()}
        rows.append({"n": n, "S": S, "seconds": measure.medians(times), "sent": bytes_sent})
    return rows


def report(where: str, rows: list[dict], far: int) -> list[dict]:
    """Print the table of one count of devices; return its geometric means."""
    in_one_process = where.endswith("one process")
    lines, ratios = [], {name: [] for name in RIVALS if name != "psum"}
    for row in rows:
        n, S, seconds = row["n"], row["S"], row["seconds"]
        for name, rival in RIVALS.items():
            predicted = rival.sends(n, S)
            line = {
                "size": measure.size(S),
                "rival": name,
                "ms": measure.milliseconds(seconds[name]),
                "to psum": f"{seconds[name] / seconds['psum']:.2f}",
                "GB/s": f"{2 * (n - 1) / n * S / seconds[name] / 1e9:.3f}",
                "predicted B": f"{predicted:.0f}",
                "compiled B": f"{row['sent'][name]}",
            }
            if in_one_process:
                seconds_a_byte = seconds["copy"] / (2 * S) if FAR[0] <= S else math.nan  # a small copy is all overhead
                floor = rival.touches(n, S) * seconds_a_byte
                line |= {"floor ms": measure.milliseconds(floor), "to floor": f"{seconds[name] / floor:.2f}"}
            lines.append(line)
            if name in ratios and far <= S:
                ratios[name].append(seconds[name] / seconds["psum"])
    print(f"{where}\n\n{measure.table(lines)}\n", flush=True)
    return [
        {"where": where, "from": measure.size(far), "rival": name, "to psum": f"{measure.geometric_mean(of):.2f}"}
        for name, of in ratios.items()
        if of
    ]


if __name__ == "__main__":
    main()
