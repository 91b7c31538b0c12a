"""Published runs beside what `plan` says of them: seconds a step, the ratio of the two, and whether
the plan fits the devices.

    python benchmarks/papers.py [--picture FILE] [--docs]   # two minutes

Nothing is compiled, run or fitted. Each row is `plan.plan(..., attention_kernel=True)`. See
benchmarks/README.md for the columns, and docs/planning.md for what the planner is good for. The
runs are in `published.py`.
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import measure
from published import CAUSES, Row, rows

from parallax.layout import Layout
from parallax.plan import Plan
from parallax.plan import plan as plan_of

WITHIN = 0.3  # how far a plan that counts as near is off


class Planned(NamedTuple):
    """A published run and its plan."""

    row: Row
    plan: Plan

    @property
    def ratio(self) -> float:
        """The planned seconds over the published ones."""
        return self.plan.seconds.total / self.row.seconds

    @property
    def near(self) -> bool:
        """Whether the planned time is within 30 % of the published one."""
        return abs(self.ratio - 1) <= WITHIN


def planned(row: Row) -> Planned:
    """The plan of the fastest of the layouts that the paper leaves open."""
    plans = [planned_as(row, layout) for layout in layouts_of(row)]
    return Planned(row, min(plans, key=lambda plan: plan.seconds.total))


def layouts_of(row: Row) -> list[Layout]:
    """The layouts that the paper leaves open: sequences of a microbatch, and chunks."""
    found = []
    for b, chunks in itertools.product(row.sequences, row.chunks):
        part = row.batch // (row.sizes.get("replica", 1) * row.sizes.get("data", 1))
        stages = row.sizes.get("stage", 1)
        interleaves = chunks > 1
        if (
            part % b
            or row.config.layers % (stages * chunks)
            or (interleaves and (part // b) % stages)
        ):
            continue
        fields = row.sizes | {"microbatches": part // b, "chunks": chunks, "precision": "bfloat16"}
        found.append(Layout(**fields))
    return found


def planned_as(row: Row, layout: Layout) -> Plan:
    """The plan of a layout, with an attention kernel."""
    return plan_of(row.config, layout, row.chip, batch=row.batch, attention_kernel=True)


def lines(found: Sequence[Planned]) -> list[dict[str, str]]:
    """The table, a line for each row."""
    return [
        {
            "published": row.source,
            "devices": f"{row.devices:,} {row.chip.name}",
            "s": f"{row.seconds:.4g}",
            "planned s": f"{plan.seconds.total:.4g}",
            "ratio": f"{plan.seconds.total / row.seconds:.2f}",
            "memory": f"{plan.memory.peak / 1e9:.1f} GB",
            "layout": ",".join(
                part for part in str(plan.layout).split(",") if part != "precision=bfloat16"
            ),
        }
        for row, plan in found
    ]


def causes(found: Sequence[Planned]) -> list[str]:
    """A line for each row that is off by more than 30 %, with its cause."""
    told = []
    for each in found:
        if not each.near:
            source = each.row.source
            cause = next((why for start, why in CAUSES.items() if source.startswith(start)), "")
            told.append(
                f"{source}, {each.row.devices:,} devices: ratio {each.ratio:.2f}. "
                f"{cause or 'The cause is not known'}"
            )
    return told


def score(found: Sequence[Planned]) -> str:
    """The median ratio, its ends, and how many rows are near and fit."""
    ratios = [each.ratio for each in found]
    near = sum(each.near for each in found)
    fit = sum(each.plan.fits for each in found)
    return (
        f"{len(found)} rows: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to "
        f"{max(ratios):.2f}; {near} within 30 %; {fit} fit"
    )


def main():
    arguments = parse()
    found = [planned(row) for row in rows()]
    table = lines(found)
    if arguments.docs:
        for line in table:
            del line["layout"]
        print(markdown(table), *causes(found), score(found), sep="\n")
    else:
        print(measure.table(table), "\n", sep="\n")
        print(*causes(found), "", score(found), sep="\n")
    if arguments.picture:
        draw(arguments.picture, found)
        print(f"Drawn in {arguments.picture}.")


def markdown(table: Sequence[dict[str, str]]) -> str:
    """A table for a page."""

    def row(cells):
        return f"| {' | '.join(cells)} |"

    return "\n".join(
        [row(table[0]), row(["---"] * len(table[0])), *(row(line.values()) for line in table)]
    )


def draw(path: str, found: Sequence[Planned]):
    """Published against planned seconds, log-log."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams |= {
        "svg.hashsalt": "papers",
        "svg.fonttype": "none",
    }  # the same bytes each time, and letters as letters
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(6, 6), layout="constrained")
    points: dict[str, list[tuple[float, float]]] = {}
    for row, plan in found:
        source = row.source.split(",")[0].split(":")[0]
        points.setdefault(source, []).append((row.seconds, plan.seconds.total))
    for (source, pairs), mark in zip(points.items(), "os^vDP", strict=True):
        panel.loglog(*zip(*pairs, strict=True), mark, color="C0", label=source)
    seconds = [row.seconds for row, _ in found]
    ends = [min(seconds) / 1.5, max(seconds) * 1.5]
    panel.loglog(ends, ends, "k-", linewidth=0.8, label="equal")
    panel.fill_between(
        ends,
        [end * (1 - WITHIN) for end in ends],
        [end * (1 + WITHIN) for end in ends],
        alpha=0.15,
        color="k",
        linewidth=0,
        label="within 30 %",
    )
    panel.set_xlabel("published, s a step")
    panel.set_ylabel("planned, s a step")
    panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.endswith(".svg") else None)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--picture", help="a file for the picture")
    parser.add_argument("--docs", action="store_true", help="print what docs/planning.md has of it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
