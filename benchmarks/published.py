"""Published runs: who ran which model how, and the seconds of a step. `papers.py` sets plans beside
them.

Sources, each row with its table: * Narayanan et al. 2021 (arXiv 2104.04473): table 1, weak scaling;
table 2, beside ZeRO-3. Operations a step by their equation 3,
  96 B s l h^2 (1 + s/6h + V/16lh), with full recomputation.
* Korthikanti et al. 2022 (arXiv 2205.05198): tables 3 and 5, full recomputation, and sequence
parallelism with selective. * Smith et al. 2022 (arXiv 2201.11990), section 2.4: MT-NLG 530B on 280,
350 and 420 machines. * Chowdhery et al. 2022 (arXiv 2204.02311), table 3: PaLM 540B, 46.2 % of
peak; one of the two pods. * MosaicML, llm-foundry, scripts/train/benchmarking/README.md: MPT on
H100s, every row in bfloat16 with 2,048 tokens and from
  6.7 B on.
* torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3 (H100s of 96 GB and 2.4
TB/s), and docs/performance.md
  (A100s): Llama 2 and 3 by FSDP2.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from parallax import hardware
from parallax.models import gpt2, llama

VOCABULARY, TOKENS = 51_200, 2_048


class Row(NamedTuple):
    """A published run: who ran it, the model, how it was split, and the seconds of a step."""

    source: str
    config: gpt2.Config | llama.Config
    chip: hardware.Hardware
    batch: int
    sizes: dict  # of the layout, but for microbatches and chunks
    sequences: Sequence[int]  # in a microbatch: those among which the paper chose the fastest
    chunks: Sequence[int]
    seconds: float

    @property
    def devices(self) -> int:
        """How many there were."""
        axes = ("replica", "data", "stage", "tensor")
        return math.prod(self.sizes.get(name, 1) for name in axes)


def gpt(layers: int, heads: int, width: int, split: int) -> gpt2.Config:
    """A GPT of the papers; the vocabulary is padded, as there, to what it is split over."""
    multiple = math.lcm(128, split)
    return gpt2.Config(
        layers=layers,
        heads=heads,
        width=width,
        context=TOKENS,
        vocabulary=VOCABULARY,
        vocabulary_multiple=multiple,
    )


def megatron_seconds(config: gpt2.Config, batch: int, devices: int, teraflops: float) -> float:
    """Seconds of a step, from operations a second that were counted by equation 3 of Narayanan et
    al."""
    s, h, layers = TOKENS, config.width, config.layers
    operations = (
        96 * batch * s * layers * h * h * (1 + s / (6 * h) + VOCABULARY / (16 * layers * h))
    )
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
# Parameters, layers, heads, width, t, p, GPUs, batch, sequences in a microbatch, teraFLOP/s a GPU;
# t = p = 1 is ZeRO-3
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
# Parameters, layers, heads, width, p, chunks, batch, sequences in a microbatch, seconds: full
# recomputation, the paper's own way
KORTHIKANTI = """
    22    48  64  6144  1 1   4 4  1.42  1.10
    175   96  96 12288  8 3  64 1 18.13 13.75
    530  105 128 20480 35 3 280 1 49.05 37.83
    1000 128 160 25600 64 1 512 1 94.42 71.49
"""
MT_NLG = {8: 60.1, 10: 50.2, 12: 44.4}  # replicas of 280 GPUs: seconds of 1,920 sequences
PALM = gpt2.Config(
    layers=118, heads=48, width=18_432, context=TOKENS, vocabulary=256_000, vocabulary_multiple=1536
)
PALM_CHIP = dataclasses.replace(hardware.TPU_V4, torus=(16, 16, 12))
# Parameters, layers, heads, width, recomputation, GPUs, batch, sequences in a microbatch, tokens a
# second; all ZeRO-3
MPT = """
    64.9 80 64 8192 1 64 2048  8  66523
    64.9 80 64 8192 1 32 1024  2  28242
    30   48 56 7168 1 32 1344 14  73860
    30   48 56 7168 1 16  480 10  36209
    30   48 56 7168 1  8  504  3  16022
    12.9 40 40 5120 0 64  128  2 307209
    12.9 40 40 5120 0 32   64  2 153960
    12.9 40 40 5120 0 16   32  2  76280
    12.9 40 40 5120 0  8   16  2  38336
     6.7 32 32 4096 0  8   48  6  85144
"""
# Parameters, layers, heads, width, heads of keys, hidden, vocabulary, tokens, remat, GPUs; of each:
# sequences, tokens a second
LLAMA = """
    8  32 32 4096  8 14336 128256 8192 products   8 2 6667
    8  32 32 4096  8 14336 128256 8192 products 128 2 6514
    8  32 32 4096  8 14336 128256 8192 products  64 1 2973
    70 80 64 8192  8 28672 128256 8192 block     64 1  331
    13 40 40 5120 40 13824  32000 4096 none      64 2 2162
    70 80 64 8192  8 28672  32000 4096 block     64 2  353
"""
# Titan's H100s have another memory than those of `hardware`.
H100_HBM2E = dataclasses.replace(hardware.H100, memory=96e9, bandwidth=2.4e12)


def rows() -> list[Row]:
    """All published runs."""

    def lines(table):
        return [[float(word) for word in line.split()] for line in table.strip().splitlines()]

    found = []
    for size, *numbers, teraflops in lines(TABLE_1):
        heads, width, layers, t, p, gpus, batch = map(int, numbers)
        config = gpt(layers, heads, width, t * p)
        sizes = {
            "data": gpus // t // p,
            "stage": p,
            "tensor": t,
            "remat": "block",
            "split_sends": t > 1 and p > 1,
        }
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
        sizes = {"data": gpus // t // p, "stage": p, "tensor": t, "remat": "block"}
        if p > 1:
            sizes["split_sends"] = True
        else:
            sizes["zero"] = 3
            # ZeRO splits along a dim that divides: 20,480 numbers over a seventh of 2,240 devices.
            groups = 7 if width % gpus else 1
            sizes |= {"replica": groups, "data": gpus // groups}
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
            found.append(
                Row(
                    source,
                    config,
                    hardware.A100,
                    batch,
                    whole | fields,
                    (b,),
                    (chunks,),
                    seconds,
                )
            )
    for replicas, seconds in MT_NLG.items():
        sizes = {"data": replicas, "stage": 35, "tensor": 8, "remat": "block", "split_sends": True}
        found.append(
            Row(
                "Smith: 530 B",
                gpt(105, 128, 20480, 280),
                hardware.A100,
                1920,
                sizes,
                (1,),
                (1,),
                seconds,
            )
        )
    return [*found, palm(), *mpt(), *titan()]


def palm() -> Row:
    """PaLM's step on a pod, of half of the batch, by its share of peak; operations as that paper's
    appendix B counts them. It is planned as a GPT-2 of as many layers and heads. A layer keeps one
    activation, and the rest is computed again (section 4)."""
    parameters, attention = 540.35e9, 12 * PALM.layers * 48 * 256 * TOKENS
    seconds = 1024 * TOKENS * (6 * parameters + attention) / (3072 * 275e12 * 0.462)
    sizes = {"data": 256, "tensor": 12, "zero": 3, "remat": "block"}
    source = "Chowdhery, table 3: PaLM 540 B"
    return Row(source, PALM, PALM_CHIP, 1024, sizes, (4,), (1,), seconds)


def mpt() -> list[Row]:
    """MPT: a GPT without biases, its attention by a kernel."""
    found = []
    for line in MPT.strip().splitlines():
        size, *numbers = line.split()
        layers, heads, width, again, gpus, batch, b, rate = map(int, numbers)
        config = gpt2.Config(
            layers=layers, heads=heads, width=width, context=TOKENS, vocabulary=50_368
        )
        sizes = {"data": gpus, "zero": 3, "remat": "block" if again else "none"}
        source = f"MosaicML, H100: {size} B, MPT"
        found.append(
            Row(
                source,
                config,
                hardware.H100,
                batch,
                sizes,
                (b,),
                (1,),
                batch * TOKENS / rate,
            )
        )
    return found


def titan() -> list[Row]:
    """Llama 2 and 3, by FSDP2."""
    found = []
    for line in LLAMA.strip().splitlines():
        *numbers, remat, gpus, each, rate = line.split()
        size, layers, heads, width, groups, hidden, vocabulary, tokens = map(int, numbers)
        config = llama.Config(
            layers=layers,
            heads=heads,
            groups=groups,
            width=width,
            hidden=hidden,
            context=tokens,
            vocabulary=vocabulary,
        )
        chip = hardware.A100 if gpus == "64" else H100_HBM2E
        source = f"torchtitan, {chip.name}: {size} B, Llama {3 if vocabulary > 100_000 else 2}"
        sizes = {"data": int(gpus), "zero": 3, "remat": remat}
        seconds = int(each) * tokens / int(rate)
        batch = int(each) * int(gpus)
        found.append(Row(source, config, chip, batch, sizes, (int(each),), (1,), seconds))
    return found


# Why a row is off, by the beginning of its source; those that are near have none.
CAUSES = {
    "Narayanan, table 2": (
        "DeepSpeed's ZeRO-3 was slower than even one ring over all devices; the plan assumes the "
        "fastest algorithm"
    ),
    "Chowdhery": (
        "The compiler of TPUs gathers weights while products run; in the plan, products wait for "
        "the gathers"
    ),
}
