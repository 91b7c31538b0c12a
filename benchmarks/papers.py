"""Published runs beside what `plan` says of them: seconds a step, and the ratio of the two.

    python benchmarks/papers.py [--picture FILE] [--seed N]     # nothing is compiled or run: a minute

Half of the rows, drawn by the seed, fit three factors (on products, passes over memory, and messages); the other half is the
score. See benchmarks/README.md for the columns, and docs/planning.md for what the planner is good for.

Sources, each row with its table:
* Narayanan et al. 2021 (arXiv 2104.04473): table 1, weak scaling; table 2, beside ZeRO-3. Operations a step by their equation 3,
  96 B s l h^2 (1 + s/6h + V/16lh), with full recomputation.
* Korthikanti et al. 2022 (arXiv 2205.05198): tables 3 and 5, full recomputation, and sequence parallelism with selective.
* Smith et al. 2022 (arXiv 2201.11990), section 2.4: MT-NLG 530B on 280, 350 and 420 machines.
* Chowdhery et al. 2022 (arXiv 2204.02311), table 3: PaLM 540B, 46.2 % of peak; one of the two pods, as a GPT-2.
"""

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import measure
import numpy as np

from parallax import plan
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.plan import hardware

VOCABULARY, TOKENS = 51_200, 2_048


class Row(NamedTuple):
    """A published run: who ran it, the model, how it was split, and the seconds of a step."""

    source: str
    config: gpt2.Config
    chip: hardware.Hardware
    batch: int
    sizes: dict  # of the layout, but for microbatches and chunks
    sequences: Sequence[int]  # in a microbatch: those among which the paper chose the fastest
    chunks: Sequence[int]
    seconds: float

    @property
    def devices(self) -> int:
        """How many there were."""
        return math.prod(self.sizes.get(name, 1) for name in ("data", "stage", "tensor"))


def gpt(layers: int, heads: int, width: int, split: int) -> gpt2.Config:
    """A GPT of the papers; the vocabulary is padded, as there, to what it is split over."""
    multiple = math.lcm(128, split)
    return gpt2.Config(
        layers=layers, heads=heads, width=width, context=TOKENS, vocabulary=VOCABULARY, vocabulary_multiple=multiple
    )


def megatron_seconds(config: gpt2.Config, batch: int, devices: int, teraflops: float) -> float:
    """Seconds of a step, from operations a second that were counted by equation 3 of Narayanan et al."""
    s, h, layers = TOKENS, config.width, config.layers
    operations = 96 * batch * s * layers * h * h * (1 + s / (6 * h) + VOCABULARY / (16 * layers * h))
    return operations / devices / (teraflops * 1e12)


# Parameters in 10^9, heads, width, layers, t, p, GPUs, batch, teraFLOP/s a GPU
TABLE_1 = """
    1.7    24  2304  24  1  1   32  512  137
    3.6    32  3072  30  2  1   64  512  138
    7.5    32  4096  36  4  1  128  512  142
    18.4   48  6144  40  8  1  256 1024  135
    39.1   64  8192  48  8  2  512 1536  138
    76.1   80 10240  60  8  4 1024 1792  140
    145.6  96 12288  80  8  8 1536 2304  148
    310.1 128 16384  96  8 16 1920 2160  155
    529.6 128 20480 105  8 35 2520 2520  163
    1008  160 25600 128  8 64 3072 3072  163
"""
# Parameters, layers, heads, width, t, p, GPUs, batch, sequences in a microbatch, teraFLOP/s a GPU; t = p = 1 is ZeRO-3
TABLE_2 = """
    174.6  96  96 12288 8 12  384 1536 1 153
    174.6  96  96 12288 8 12  768 1536 1 149
    174.6  96  96 12288 8 12 1536 1536 1 141
    529.6 105 128 20480 8 35  560 2240 1 171
    529.6 105 128 20480 8 35 1120 2240 1 167
    529.6 105 128 20480 8 35 2240 2240 1 159
    174.6  96  96 12288 1  1  384 1536 4 144
    174.6  96  96 12288 1  1  768 1536 2  88
    174.6  96  96 12288 1  1 1536 1536 1  44
    529.6 105 128 20480 1  1  640 2560 4 138
    529.6 105 128 20480 1  1 1120 2240 2  98
    529.6 105 128 20480 1  1 2240 2240 1  48
"""
# Parameters, layers, heads, width, p, chunks, batch, sequences in a microbatch, seconds: full recomputation, the paper's own way
KORTHIKANTI = """
    22    48  64  6144  1 1   4 4  1.42  1.10
    175   96  96 12288  8 3  64 1 18.13 13.75
    530  105 128 20480 35 3 280 1 49.05 37.83
    1000 128 160 25600 64 1 512 1 94.42 71.49
"""
MT_NLG = {8: 60.1, 10: 50.2, 12: 44.4}  # replicas of 280 GPUs: seconds of 1,920 sequences
PALM = gpt2.Config(layers=118, heads=48, width=18_432, context=TOKENS, vocabulary=256_000, vocabulary_multiple=1536)


def rows() -> list[Row]:
    """All published runs."""
    lines = lambda table: [[float(word) for word in line.split()] for line in table.strip().splitlines()]
    found = []
    for size, *numbers, teraflops in lines(TABLE_1):
        heads, width, layers, t, p, gpus, batch = map(int, numbers)
        config = gpt(layers, heads, width, t * p)
        sizes = {"data": gpus // t // p, "stage": p, "tensor": t, "remat": "block", "split_sends": t > 1 and p > 1}
        found.append(
            Row(
                f"Narayanan, table 1: {size:g} B",
                *(config, hardware.A100, batch, sizes, (1, 2, 4)),
                (1, 2, 3, 4) if p > 1 else (1,),
                megatron_seconds(config, batch, gpus, teraflops),
            )
        )
    for size, *numbers, teraflops in lines(TABLE_2):
        layers, heads, width, t, p, gpus, batch, b = map(int, numbers)
        config = gpt(layers, heads, width, t * p)
        whole = {"data": gpus // t // p, "stage": p, "tensor": t, "remat": "block"}
        sizes = whole | ({"split_sends": True} if p > 1 else {"zero": 3})
        found.append(
            Row(
                f"Narayanan, table 2: {size:g} B{', ZeRO-3' if p == 1 else ''}",
                *(config, hardware.A100, batch, sizes, (b,), (1,)),
                megatron_seconds(config, batch, gpus, teraflops),
            )
        )
    for size, *numbers, full, selective in lines(KORTHIKANTI):
        layers, heads, width, p, chunks, batch, b = map(int, numbers)
        config, whole = gpt(layers, heads, width, 8 * p), {"stage": p, "tensor": 8}
        for words, seconds, fields in (
            ("full", full, {"remat": "block", "split_sends": p > 1}),
            ("selective", selective, {"remat": "attention", "sequence": True}),
        ):
            source = f"Korthikanti, table 5: {size:g} B, {words}"
            found.append(Row(source, config, hardware.A100, batch, whole | fields, (b,), (chunks,), seconds))
    for replicas, seconds in MT_NLG.items():
        sizes = {"data": replicas, "stage": 35, "tensor": 8, "remat": "block", "split_sends": True}
        found.append(Row("Smith: 530 B", gpt(105, 128, 20480, 280), hardware.A100, 1920, sizes, (1,), (1,), seconds))
    sizes = {"data": 256, "tensor": 12, "zero": 3, "remat": "products"}
    seconds = plan.model_flops(PALM, 1024) / (3072 * 275e12 * 0.462)
    found.append(Row("Chowdhery, table 3: PaLM 540 B", PALM, hardware.TPU_V4, 1024, sizes, (1, 2, 4), (1,), seconds))
    return found


class Planned(NamedTuple):
    """What `plan` says of a row: its layout, and seconds of products, passes over memory, messages, and the rest."""

    layout: Layout
    parts: np.ndarray


def planned(row: Row) -> Planned:
    """The plan of the fastest of the layouts that the paper leaves open."""
    found = []
    for b, chunks in itertools.product(row.sequences, row.chunks):
        part = row.batch // row.sizes.get("data", 1)
        stages = row.sizes.get("stage", 1)
        if part % b or row.config.layers % (stages * chunks) or (chunks > 1 and (part // b) % stages):
            continue
        fields = row.sizes | {"microbatches": part // b, "chunks": chunks, "precision": "bfloat16"}
        layout = Layout(**fields)
        seconds = plan.plan(row.config, layout, row.chip, batch=row.batch).seconds
        found.append(
            Planned(layout, np.array([seconds.products, seconds.passes, seconds.messages, seconds.update + seconds.fresh]))
        )
    return min(found, key=lambda each: each.parts.sum())


PRODUCTS = np.linspace(0.75, 1.25, 21)  # no product is faster than the chip: `efficiency` is 0.75
OTHERS = np.linspace(0.1, 2.0, 77)


def fit(parts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The factors on products, passes and messages with the least squares of the logarithms of the ratios."""
    factors = np.array(list(itertools.product(PRODUCTS, OTHERS, OTHERS)))
    factors = np.concatenate([factors, np.ones((len(factors), 1))], axis=1)
    off = np.log(factors @ parts.T / seconds)
    return factors[np.argmin((off**2).sum(1))]


def main():
    arguments = parse()
    published = rows()
    plans = [planned(row) for row in published]
    parts, seconds = np.array([each.parts for each in plans]), np.array([row.seconds for row in published])
    fitted = set(random.Random(arguments.seed).sample(range(len(published)), len(published) // 2))
    chosen = sorted(fitted)
    factors = fit(parts[chosen], seconds[chosen])
    before, after = parts.sum(1) / seconds, parts @ factors / seconds
    lines = [
        {
            "published": row.source,
            "devices": f"{row.devices:,} {row.chip.name}",
            "s": f"{row.seconds:.4g}",
            "planned s": f"{each.parts @ factors:.4g}",
            "ratio": f"{ratio:.2f}",
            "unfitted": f"{plain:.2f}",
            "half": "fit" if k in fitted else "score",
            "layout": str(each.layout).removesuffix(",precision=bfloat16"),
        }
        for k, (row, each, ratio, plain) in enumerate(zip(published, plans, after, before, strict=True))
    ]
    print(measure.table(lines), "\n")
    print(f"factors: products {factors[0]:.3f}, memory {factors[1]:.3f}, messages {factors[2]:.3f}")
    for name, half in (("fitted", chosen), ("scored", [k for k in range(len(published)) if k not in fitted])):
        print(f"{name} half, {len(half)} rows: {score(after[half])}; unfitted {score(before[half])}")
    if arguments.picture:
        draw(arguments.picture, published, seconds, parts @ factors, fitted)
        print(f"Drawn in {arguments.picture}.")


def score(ratios: np.ndarray) -> str:
    """The median ratio, and the one that is furthest off."""
    worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    return f"median {statistics.median(ratios):.2f}, worst {worst:.2f}"


def draw(path: str, published: Sequence[Row], seconds: np.ndarray, plans: np.ndarray, fitted: set[int]):
    """Published against planned seconds, log-log."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(6, 6), layout="constrained")
    for source, mark in zip(dict.fromkeys(row.source.split(",")[0].split(":")[0] for row in published), "os^v", strict=False):
        own = [k for k, row in enumerate(published) if row.source.startswith(source)]
        for part, style in (("fitted", "none"), ("scored", "full")):
            at = [k for k in own if (k in fitted) == (part == "fitted")]
            panel.loglog(seconds[at], plans[at], mark, fillstyle=style, color="C0", label=f"{source}, {part}")
    ends = np.array([seconds.min() / 1.5, seconds.max() * 1.5])
    panel.loglog(ends, ends, "k-", linewidth=0.8, label="equal")
    panel.fill_between(ends, ends / 1.3, ends * 1.3, alpha=0.15, color="k", linewidth=0, label="within 30 %")
    panel.set_xlabel("published, s a step")
    panel.set_ylabel("planned, s a step")
    panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--picture", help="a file for the picture")
    parser.add_argument("--seed", type=int, default=0, help="which half is fitted (0)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
