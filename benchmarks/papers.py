"""Published runs beside what `plan` says of them: seconds a step, and the ratio of the two.

    python benchmarks/papers.py [--picture FILE] [--seed N] [--draws N]
        # nothing is compiled or run: a minute

Half of the rows, drawn by the seed, fit four factors (on products, those of H100s, passes over
memory, and messages); the other half is the score. See benchmarks/README.md for the columns, and
docs/planning.md for what the planner is good for.

The runs, with their sources, are in `published.py`. A model that is no GPT-2 is planned as one of
as many layers and heads, and what differs is counted: `published.Unlike`.
"""

import argparse
import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import measure
import numpy as np
from published import CAUSES, Row, rows

from parallax import hardware, plan
from parallax.collectives import ring, send_next
from parallax.layout import Layout
from parallax.plan import algorithms, networks, residuals, traffic
from parallax.plan.planned import PASSES
from parallax.plan.planned import messages as messages_of
from parallax.plan.recomputed import recomputed

BY_LEAF = ("gradients scattered", "parameters gathered")


class Planned(NamedTuple):
    """What `plan` says of a row: its layout, and seconds by part.

    The parts are products, those of H100s, passes over memory, messages that they wait for,
    messages beside them, and the rest.
    """

    layout: Layout
    parts: np.ndarray


def planned(row: Row) -> Planned:
    """The plan of the fastest of the layouts that the paper leaves open."""
    found = []
    for b, chunks in itertools.product(row.sequences, row.chunks):
        part = row.batch // row.sizes.get("data", 1)
        stages = row.sizes.get("stage", 1)
        if (
            part % b
            or row.config.layers % (stages * chunks)
            or (chunks > 1 and (part // b) % stages)
        ):
            continue
        fields = row.sizes | {"microbatches": part // b, "chunks": chunks, "precision": "bfloat16"}
        layout = Layout(**fields)
        found.append(Planned(layout, parts_of(row, _planned(row, layout))))
    return min(found, key=lambda each: total(each.parts))


def _planned(row: Row, layout: Layout) -> plan.Plan:
    """The plan with a ring along each axis, as these runs' libraries sent."""
    rings = {name: ring(name) for name in layout.axes}
    return plan.plan(row.config, layout, row.chip, batch=row.batch, axes=rings)


def parts_of(row: Row, planned: plan.Plan) -> np.ndarray:
    """Seconds of products, passes over memory, messages and the rest, with what is unlike a GPT-2.

    Of products, weights, scores and the head are counted apart: T / 6D scores and V / 12LD of a
    head to a layer's weights. A head on the last stage alone takes that stage P times as long, and
    nothing is summed over stages. Messages over data are of weights. On a torus, and through all
    adapters of a machine, messages are those of the algorithm that is fastest on the network.
    """
    unlike, config, seconds = row.unlike, row.config, planned.seconds
    scores, head = (
        config.context / (6 * config.width),
        config.rows / (12 * config.layers * config.width),
    )
    heads = head * (planned.layout.stage if unlike.at_ends else 1)
    products = (
        (seconds.products + last_products(row, planned))
        * (unlike.weights + unlike.scores * scores + heads)
        / (1 + scores + head)
    )
    of_stages = lambda term: "stage" in term.axes and term.collective is not send_next
    if planned.layout.zero == 3:
        planned = dataclasses.replace(planned, traffic=joined(planned.traffic))
    terms = [term for term in planned.traffic if not (unlike.at_ends and of_stages(term))]
    along = dict(messages_of(terms, planned.layout, row.chip))
    if unlike.torus or unlike.adapters:
        network = (
            networks.Torus(unlike.torus, row.chip.fast)
            if unlike.torus
            else networks.of(row.chip, row.devices)
        )
        along |= {
            (each.axis,): each.seconds[each.algorithm]
            for each in algorithms.chosen(planned, network)
        }
    share: dict[tuple[str, ...], float] = {("data",): unlike.weights, ("tensor",): unlike.sums}
    shares = {axes: taken * share.get(axes, 1.0) for axes, taken in along.items()}
    beside = shares.pop(("data",), 0.0) if unlike.prefetched else 0.0
    of_chip = (0.0, products) if row.chip.name == hardware.H100.name else (products, 0.0)
    return np.array(
        [
            *of_chip,
            passes_of(row, planned),
            math.fsum(shares.values()),
            beside,
            seconds.update + seconds.fresh,
        ]
    )


def last_products(row: Row, planned: plan.Plan) -> float:
    """Seconds of the last product of each layer that is computed again: libraries run a layer again
    whole, and XLA drops it."""
    layout, chip = planned.layout, row.chip
    if layout.remat != "block":
        return 0.0
    size = traffic.sizes(row.config, layout, row.batch)
    operations = 8 * row.config.width**2 * size.tokens / layout.tensor
    return size.layers * size.backward * operations / (chip.rate * chip.efficiency)


def joined(terms: Sequence[traffic.Term]) -> tuple[traffic.Term, ...]:
    """The terms, those of ZeRO-3 with a layer's weights in one message, as in DeepSpeed and FSDP;
    ours sends each leaf alone."""
    bytes_of: dict[traffic.Term, int] = {}
    for term in terms:
        if term.what in BY_LEAF:
            kind = term._replace(nbytes=0)
            bytes_of[kind] = bytes_of.get(kind, 0) + term.nbytes
    buckets = (kind._replace(nbytes=nbytes) for kind, nbytes in bytes_of.items())
    return (*(term for term in terms if term.what not in BY_LEAF), *buckets)


def passes_of(row: Row, planned: plan.Plan) -> float:
    """Seconds of passes over what a layer makes: by the plan, without scores, or by Korthikanti et
    al., section 4."""
    config, layout, t = row.config, planned.layout, planned.layout.tensor
    size = traffic.sizes(config, layout, row.batch)
    if row.unlike.fused:
        split = 34 if layout.sequence else 24
        scores = 5 * config.heads * config.context / config.width
        made = size.tokens * config.width * (34 - split + (split + scores) / t)
    elif row.unlike.kernel:
        made = residuals.everything(
            config, dataclasses.replace(layout, remat="attention", zero=0), row.batch
        )
    elif row.chip.platform == "tpu":  # these runs wrote scores
        made = residuals.everything(config, dataclasses.replace(layout, remat="none"), row.batch)
    else:
        return planned.seconds.passes
    times = size.layers * (size.forward + size.backward * (1 + recomputed(layout).passes))
    return PASSES * made * times / row.chip.bandwidth


def total(parts: np.ndarray, factors: Sequence[float] | np.ndarray = (1, 1, 1, 1)) -> np.ndarray:
    """Seconds of a step, from parts [..., 6] and factors [..., 4] on products, those of H100s,
    passes and messages."""
    by = np.asarray(factors)
    waited = (parts[..., :4] * by).sum(-1) + parts[..., 5]
    return np.maximum(waited, parts[..., 4] * by[..., 3])


PRODUCTS = np.linspace(0.75, 1.5, 16)  # no product is faster than the chip: `efficiency` is 0.75
OTHERS = np.linspace(0.1, 2.0, 20)


def fit(parts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The factors of `total` with the least squares of the logarithms of the ratios."""
    factors = np.array(list(itertools.product(PRODUCTS, PRODUCTS, OTHERS, OTHERS)))
    off = sum(
        np.log(total(row, factors) / taken) ** 2 for row, taken in zip(parts, seconds, strict=True)
    )
    return factors[np.argmin(off)]


class Scored(NamedTuple):
    """All rows and their plans: seconds of both, and which rows were fitted, by which factors."""

    published: list[Row]
    plans: list[Planned]
    fitted: set[int]
    factors: np.ndarray

    @property
    def ratios(self) -> np.ndarray:
        """Planned over published, with the factors."""
        return total(self.parts, self.factors) / self.seconds

    @property
    def unfitted(self) -> np.ndarray:
        """The same of the plan as it is."""
        return total(self.parts) / self.seconds

    @property
    def parts(self) -> np.ndarray:
        """Of all plans."""
        return np.array([each.parts for each in self.plans])

    @property
    def seconds(self) -> np.ndarray:
        """Published."""
        return np.array([row.seconds for row in self.published])

    @property
    def scored(self) -> list[int]:
        """The rows that were not fitted."""
        return [k for k in range(len(self.published)) if k not in self.fitted]


def scored(seed: int, published: list[Row], plans: list[Planned]) -> Scored:
    """Half of the rows, drawn by the seed, fit the factors."""
    fitted = set(random.Random(seed).sample(range(len(published)), len(published) // 2))
    alone = Scored(published, plans, fitted, np.ones(4))
    chosen = sorted(fitted)
    return alone._replace(factors=fit(alone.parts[chosen], alone.seconds[chosen]))


def lines(found: Scored) -> list[dict[str, str]]:
    """The table, a line for each row."""
    return [
        {
            "published": row.source,
            "devices": f"{row.devices:,} {row.chip.name}",
            "s": f"{row.seconds:.4g}",
            "planned s": f"{ratio * row.seconds:.4g}",
            "ratio": f"{ratio:.2f}",
            "unfitted": f"{plain:.2f}",
            "half": "fit" if k in found.fitted else "score",
            "layout": ",".join(
                part for part in str(each.layout).split(",") if part != "precision=bfloat16"
            ),
        }
        for k, (row, each, ratio, plain) in enumerate(
            zip(found.published, found.plans, found.ratios, found.unfitted, strict=True)
        )
    ]


def causes(found: Scored) -> list[str]:
    """A line for each row that is off by more than 15 %, with its cause."""
    told = []
    for row, ratio in zip(found.published, found.ratios, strict=True):
        if abs(math.log(ratio)) > math.log(1.15):
            cause = next(
                (why for start, why in CAUSES.items() if row.source.startswith(start)), "not known"
            )
            told.append(f"{row.source}, {row.devices:,} devices: {ratio:.2f}: {cause}")
    return told


def summary(found: Scored) -> list[str]:
    """The factors, and both halves."""
    names = ("products", "products of H100s", "memory", "messages")
    factors = ", ".join(
        f"{name} {factor:.2f}" for name, factor in zip(names, found.factors, strict=True)
    )
    halves = {"fitted": sorted(found.fitted), "scored": found.scored}
    of = lambda name, half: (
        f"{len(half)} rows: {score(found.ratios[half])}; unfitted {score(found.unfitted[half])}"
    )
    return [
        f"factors: {factors}",
        *(f"{name} half, {of(name, half)}" for name, half in halves.items()),
    ]


def main():
    arguments = parse()
    published = rows()
    found = scored(arguments.seed, published, [planned(row) for row in published])
    if arguments.docs:
        table = [
            {name: text for name, text in line.items() if name != "layout"} for line in lines(found)
        ]
        print(markdown(table), *summary(found), *causes(found), sep="\n")
        return
    print(measure.table(lines(found)), "\n", sep="\n")
    print(*causes(found), "", *summary(found), sep="\n")
    for seed in range(arguments.seed + 1, arguments.seed + 1 + arguments.draws):
        other = scored(seed, published, found.plans)
        print(f"half drawn by seed {seed}: {score(other.ratios[other.scored])}")
    if arguments.picture:
        draw(arguments.picture, found)
        print(f"Drawn in {arguments.picture}.")


def markdown(table: Sequence[dict[str, str]]) -> str:
    """A table for a page."""
    row = lambda cells: f"| {' | '.join(cells)} |"
    return "\n".join(
        [row(table[0]), row(["---"] * len(table[0])), *(row(line.values()) for line in table)]
    )


def score(ratios: np.ndarray) -> str:
    """The median ratio, and the one that is furthest off."""
    worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    return f"median {statistics.median(ratios):.2f}, worst {worst:.2f}"


def draw(path: str, found: Scored):
    """Published against planned seconds, log-log."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams |= {
        "svg.hashsalt": "papers",
        "svg.fonttype": "none",
    }  # the same bytes each time, and letters as letters
    import matplotlib.pyplot as plt

    seconds, plans = found.seconds, found.seconds * found.ratios
    figure, panel = plt.subplots(figsize=(6, 6), layout="constrained")
    sources = dict.fromkeys(row.source.split(",")[0].split(":")[0] for row in found.published)
    for source, mark in zip(sources, "os^vDP", strict=True):
        for half, style in (("fitted", "none"), ("scored", "full")):
            at = [
                k
                for k, row in enumerate(found.published)
                if row.source.startswith(source) and (k in found.fitted) == (half == "fitted")
            ]
            panel.loglog(
                seconds[at],
                plans[at],
                mark,
                fillstyle=style,
                color="C0",
                label=f"{source}, {half}" if at else None,
            )
    ends = np.array([seconds.min() / 1.5, seconds.max() * 1.5])
    panel.loglog(ends, ends, "k-", linewidth=0.8, label="equal")
    panel.fill_between(
        ends, ends / 1.3, ends * 1.3, alpha=0.15, color="k", linewidth=0, label="within 30 %"
    )
    panel.set_xlabel("published, s a step")
    panel.set_ylabel("planned, s a step")
    panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.endswith(".svg") else None)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--picture", help="a file for the picture")
    parser.add_argument("--seed", type=int, default=0, help="which half is fitted (0)")
    parser.add_argument("--draws", type=int, default=0, help="score so many other halves too (0)")
    parser.add_argument("--docs", action="store_true", help="print what docs/planning.md has of it")
    return parser.parse_args()


if __name__ == "__main__":
    main()
