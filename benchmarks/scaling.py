"""Does a second process pay? GPT-2 training, data-parallel over gloo, each process pinned to a
core; beside PyTorch's DDP.

    python benchmarks/scaling.py [--quick]

One process on one core, two on a core each, and four that share the two; with the same work a
process (weak scaling) and the same work in all (strong). Every job is started anew, in turn, in
every round, so no rival has the machine to itself for longer than another. PyTorch and transformers
are optional; without them ours runs alone. See benchmarks/README.md for the columns.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import measure

WARM_UP = 3  # steps that compile, allocate and connect


@dataclasses.dataclass(frozen=True)
class Job:
    """Some processes that train together, and how many sequences each takes in a step."""

    library: str
    processes: int
    sequences: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The model, the same in both libraries, and how long to train it."""

    layers: int
    heads: int
    width: int
    length: int
    vocabulary: int
    steps: int


def main():
    arguments = parse()
    fields = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Sizes)}
    sizes = Sizes(**fields)
    if arguments.rank is not None:
        os.sched_setaffinity(0, {arguments.core})  # before a library counts the cores
        train = {"ours": ours, "PyTorch": pytorch}[arguments.library]
        seconds = train(sizes, arguments)
        if arguments.rank == 0:
            print(json.dumps(seconds), flush=True)
        return
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit(
            "scaling.py compares one core with two, and this process may use one. Give it two: "
            "taskset -c 0,1."
        )
    libraries = ["ours"]
    if all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        libraries.append("PyTorch")
    else:
        print(
            'PyTorch is left out: it needs torch and transformers (pip install -e ".[parity]").\n'
        )
    jobs = [
        Job(library, processes, sequences)
        for library in libraries
        for processes, sequences in dict.fromkeys(
            [(n, arguments.batch) for n in (1, 2, 4)] + [(n, arguments.batch // n) for n in (2, 4)]
        )
    ]
    seconds: dict[Job, list[float]] = {job: [] for job in jobs}
    for _, job in itertools.product(range(arguments.rounds), jobs):
        seconds[job].append(statistics.median(run(job, sizes, cores)[WARM_UP:]))
    report(
        sizes,
        arguments.batch,
        {job: statistics.median(each) for job, each in seconds.items()},
        libraries,
    )


def run(job: Job, sizes: Sizes, cores: list[int]) -> list[float]:
    """Start the processes, each with one thread on a core of its own (four of them on two cores);
    seconds of each step."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--library",
        job.library,
        "--processes",
        str(job.processes),
    ]
    command += ["--address", f"127.0.0.1:{measure.free_port()}", "--batch", str(job.sequences)]
    command += [f"--{name}={value}" for name, value in dataclasses.asdict(sizes).items()]
    ranks = [
        [*command, "--rank", str(rank), "--core", str(cores[rank % len(cores)])]
        for rank in range(job.processes)
    ]
    said = measure.run_together(ranks, timeout=600)
    return json.loads(said[0].splitlines()[-1])


def ours(sizes: Sizes, job: argparse.Namespace) -> list[float]:
    """Seconds of each step of a float32 GPT-2 over `job.processes` replicas, on a device each."""
    import jax
    import numpy as np
    import optax
    from jax.sharding import PartitionSpec as P

    from parallax import mesh
    from parallax.collectives import bucketed, ring
    from parallax.data import prefetch
    from parallax.layout import Layout
    from parallax.models import decoder, gpt2
    from parallax.run import processes

    processes.initialize(
        job.address, job.processes, job.rank, cpu_devices=job.processes, say=lambda line: None
    )
    config = gpt2.Config(
        layers=sizes.layers,
        heads=sizes.heads,
        width=sizes.width,
        context=sizes.length,
        vocabulary=sizes.vocabulary,
    )
    layout, size = Layout(data=job.processes), job.batch * job.processes
    mesh_ = mesh.make(**layout.axes)
    compute = decoder.Compute(axes={"data": bucketed(ring("data"))})
    made = decoder.train_step(
        *(gpt2.FAMILY, config, optax.adamw(3e-4), layout, mesh_),
        batch=size,
        key=jax.random.key(0),
        compute=compute,
    )
    state, train = made.init(), made.train
    tokens = np.random.default_rng(0).integers(sizes.vocabulary, size=size * (sizes.length + 1) * 4)
    sharding = mesh.shardings(P("data"), mesh_)
    seconds = []
    for i in range(sizes.steps + WARM_UP):
        windows = prefetch.placed(tokens, sharding, seed=0, step=i, size=size, length=sizes.length)
        start = time.perf_counter()
        state, info = jax.block_until_ready(train(state, windows))
        seconds.append(time.perf_counter() - start)
    assert np.isfinite(float(info.loss))
    if job.processes > 1:
        jax.distributed.shutdown()
    return seconds


def pytorch(sizes: Sizes, job: argparse.Namespace) -> list[float]:
    """The same of transformers' GPT-2 under DistributedDataParallel."""
    import torch
    import transformers
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{job.address}", world_size=job.processes, rank=job.rank
    )
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=sizes.layers,
        n_head=sizes.heads,
        n_embd=sizes.width,
        n_positions=sizes.length,
        vocab_size=sizes.vocabulary,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = DistributedDataParallel(transformers.GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-4)
    seconds = []
    for _ in range(sizes.steps + WARM_UP):
        windows = torch.randint(sizes.vocabulary, (job.batch, sizes.length + 1))
        start = time.perf_counter()
        logits = model(windows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    assert loss.isfinite()
    torch.distributed.destroy_process_group()
    return seconds


def report(sizes: Sizes, batch: int, seconds: dict[Job, float], libraries: list[str]):
    """A line a job, and the two ratios that count."""
    parameters = (
        12 * sizes.layers * sizes.width**2 + (sizes.vocabulary + sizes.length) * sizes.width
    )
    flops = (6 * parameters + 12 * sizes.layers * sizes.width * sizes.length) * sizes.length
    print(
        f"GPT-2 with {parameters / 1e6:.1f} M parameters, {sizes.length} tokens and "
        f"{flops / 1e9:.2f} GFLOP a sequence, {4 * parameters / measure.MB:.1f} MB of "
        "gradients.\nSpeed-up: sequences a second in all, over one process's; predicted: the "
        "cores.\n"
    )
    rate = {job: job.processes * job.sequences / each for job, each in seconds.items()}
    rows = []
    for job, each in seconds.items():
        kind = "one" if job.processes == 1 else "weak" if job.sequences == batch else "strong"
        rows.append(
            {
                "library": job.library,
                "scaling": kind,
                "processes": job.processes,
                "sequences each": job.sequences,
                "ms": measure.milliseconds(each),
                "GFLOP/s": f"{flops * rate[job] / 1e9:.1f}",
                "predicted": f"{min(job.processes, 2):.2f}",
                "speed-up": f"{rate[job] / rate[Job(job.library, 1, batch)]:.2f}",
            }
        )
    print(measure.table(rows))
    print()
    for library in libraries:
        two, one = rate[Job(library, 2, batch)], rate[Job(library, 1, batch)]
        beside = (
            f"; {two / rate[Job('PyTorch', 2, batch)]:.2f} times PyTorch's two"
            if "PyTorch" in libraries
            else ""
        )
        print(f"{library}: two processes train {two / one:.2f} times as fast as one{beside}.")


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
    quick = "--quick" in sys.argv
    small = {
        "layers": 1,
        "heads": 2,
        "width": 32,
        "length": 16,
        "vocabulary": 64,
        "steps": 2,
        "rounds": 1,
        "batch": 4,
    }
    usual = {
        "layers": 6,
        "heads": 8,
        "width": 256,
        "length": 128,
        "vocabulary": 512,
        "steps": 12,
        "rounds": 3,
        "batch": 16,
    }
    for name, value in (small if quick else usual).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    for name in ("address", "library"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("rank", "processes", "core"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is None and arguments.batch % 4:
        parser.error(
            f"--batch must be a multiple of 4, for four processes to share it; got "
            f"{arguments.batch}."
        )
    return arguments


if __name__ == "__main__":
    main()
