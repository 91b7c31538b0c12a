"""Which pipeline schedule pays: the time and the memory of each, by its table, beside those of
torch.distributed.pipelining.

Nothing runs: a schedule's time is a fold over its table (`makespan`), its memory the microbatches
that its neediest stage holds. F, I, W and an exchange have times that are drawn. Torch's tables are
made by torch, where it is installed, and run here as ours do: all stages wait for the dearest job
of a tick, and exchange in each.

    python benchmarks/schedules.py --stages 8 --microbatches 16 32
"""

import argparse
import csv
import os
import random
import statistics
import tempfile
import types

from parallax import schedule

NAMED = (  # of F, I, W, and a tick's exchange
    ("F = I = W", (1, 1, 1, 0)),
    ("a GPT-2 layer", (1, 1.2, 0.8, 0)),
    ("and an exchange", (1, 1.2, 0.8, 0.1)),
    ("recomputed", (1, 2, 1, 0)),
)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[16, 32])
    parser.add_argument(
        "--draws", type=int, default=200, help="of F, I, W and the exchange, for the last line"
    )
    arguments = parser.parse_args()
    for M in arguments.microbatches:
        own, others = ours(arguments.stages, M), of_torch(arguments.stages, M)
        table(arguments.stages, M, own | others)
        if others:
            at_equal_memory(own, others, arguments.draws)


def ours(P, M):
    """Every schedule of the package, and some of any number in flight."""
    made = {
        "1F1B lockstep": schedule.one_f_one_b_lockstep(P, M),
        "1F1B lockstep, 2 chunks": schedule.one_f_one_b_lockstep(P, M, 2),
        "zero bubble lockstep": schedule.zero_bubble_lockstep(P, M),
        "zero bubble lockstep, 2 chunks": schedule.zero_bubble_lockstep(P, M, 2),
        "1F1B": schedule.one_f_one_b(P, M),
    }
    for chunks, held in ((1, P), (1, 2 * P - 1), (2, P), (2, 2 * P - 1)):
        name = f"zero bubble, {'2 chunks, ' * (chunks == 2)}{held} in flight"
        made[name] = schedule.zero_bubble(P, M, chunks, in_flight=held)
    for held in (P, 2 * P - 1):
        made[f"V, {held} in flight"] = schedule.greedy(schedule.v_placement(P), M, [2 * held] * P)
    return made


def of_torch(P, M):
    """The tables of torch's schedules, by way of the text that it writes; none where torch is not
    installed or makes none."""
    try:
        from torch.distributed.pipelining import schedules as theirs
    except ImportError:
        print("torch is not installed: its schedules are left out.")
        return {}
    found = {}
    for name, chunks in (
        ("Schedule1F1B", 1),
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleLoopedBFS", 2),
        ("ScheduleInterleavedZeroBubble", 2),
        ("ScheduleZBVZeroBubble", 2),
        ("ScheduleDualPipeV", 2),
    ):
        try:
            found[f"torch, {name.removeprefix('Schedule')}"] = read(
                orders(getattr(theirs, name), P, M, chunks)
            )
        except ValueError as error:
            print(f"torch, {name}: {error}")
    return found


def orders(kind, P, M, chunks):
    """Each rank's jobs, of a schedule of torch that no process group runs."""
    if chunks == 1:
        made = kind.__new__(kind)
        made._num_stages, made._n_microbatches, made._stage = P, M, None
        return made._get_pipeline_order()

    def stage(index):
        return types.SimpleNamespace(
            group_size=P, group_rank=0, stage_index=index, num_stages=2 * P, submod=None,
            has_backward=True, is_first=index == 0, is_last=index == 2 * P - 1,
            stage_index_to_group_rank=None, group=None, device="cpu",
        )  # fmt: skip

    second = 2 * P - 1 if kind.__name__ in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else P
    return kind([stage(0), stage(second)], M, loss_fn=lambda out, target: out).pipeline_order


def read(orders):
    """The schedule of these orders, as text and back."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "torch.csv")
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(orders[rank] for rank in sorted(orders))
        return schedule.from_csv(path)


def seconds(table, f, i, w, hop):
    """The time of a schedule; one without W runs B, which is I and W."""
    return table.makespan(f, i + w if table.weight is None else i, w, hop=hop)


def in_flight(table):
    """The microbatches whose residuals the stage that holds most has."""
    return float(table.in_flight.max())


def table(P, M, made):
    """A row a schedule."""
    print(
        f"\nP = {P}, M = {M}; time without any bubble: "
        + ", ".join(f"{M * (f + i + w):g}" for _, (f, i, w, _) in NAMED)
    )
    print(f"{'':52}{'in flight':>10}" + "".join(f"{name:>17}" for name, _ in NAMED))
    for name, each in made.items():
        times = [seconds(each, *costs) for _, costs in NAMED]
        print(f"{name:52}{in_flight(each):10g}" + "".join(f"{time:17.1f}" for time in times))


def at_equal_memory(own, others, draws):
    """The best of ours over the best of theirs, among those that hold no more than the latter."""
    generator, ratios = random.Random(0), []
    for _ in range(draws):
        costs = 1.0, generator.uniform(0.8, 2.2), generator.uniform(0.5, 1.2)
        costs = *costs, generator.uniform(0, 0.1)
        best = min(others.values(), key=lambda table: (seconds(table, *costs), in_flight(table)))
        fitting = [table for table in own.values() if in_flight(table) <= in_flight(best)]
        ratios.append(min(seconds(table, *costs) for table in fitting) / seconds(best, *costs))
    print(
        f"ours over theirs at equal memory, {draws} draws: median {statistics.median(ratios):.3f}, "
        f"most {max(ratios):.3f}"
    )


if __name__ == "__main__":
    main()
