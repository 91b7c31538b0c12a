"""Two published estimates, recomputed: each line shows its arithmetic.

Legend: s tokens, b sequences, h width, a heads, L layers, t tensor devices, p stages, m chunks a stage, N parameters.
"""

import dataclasses

from parallax import hardware
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.plan import layouts, temporaries
from parallax.plan.planned import memory, plan

GPT3 = gpt2.Config(layers=96, heads=96, width=12288, context=2048)
GPT_300M = gpt2.Config(layers=24, heads=16, width=1024)
GB = 1e9


def gpt3_on_64() -> str:
    """GPT-3 175B on 64 A100s with 8-way tensor parallelism: Korthikanti et al. (arXiv 2205.05198), tables 3 and 5."""
    c, chip = GPT3, hardware.A100
    s, h, a, L, t, p, m = c.context, c.width, c.heads, c.layers, 8, 8, 3
    sbh, N = s * h, 12 * L * h * h
    in_flight = 1 + (p - 1) / (p * m)
    ways = {
        "tensor": 10 + 24 / t + 5 * a * s / h / t,
        "tensor, sequence": (34 + 5 * a * s / h) / t,
        "tensor, sequence, selective": 34 / t,
        "all again": 2.0,
    }
    state = 16 * N / (t * p)
    shape = {"stage": p, "tensor": t, "microbatches": 64, "chunks": m, "precision": "bfloat16"}
    lines = [
        f"GPT-3 175B, 64 A100s of 80 GB: tensor {t}, stages {p} in {m} chunks, 64 sequences of {s} tokens, one a microbatch.",
        "",
        f"As published (arXiv 2205.05198): 16 N / (t p) = 16 x {N / 1e9:.1f}e9 / {t * p} = {state / GB:.1f} GB of state, and "
        f"activations of",
        f"s b h L (1 + (p - 1)/(p m)) x bytes a number = {s} x {h} x {L} x {in_flight:.3f} x bytes:",
    ]
    for name, factor in ways.items():
        kept = sbh * L * in_flight * factor
        verdict = "fits" if state + kept <= chip.memory else "does not fit"
        lines.append(
            f"  {name:<29} {factor:>6.2f} bytes  {gb(kept, 6)}  with the state {gb(state + kept, 6)}  {verdict}"
        )
    flops = 72 * 64 * L * s * h * h * (1 + s / (6 * h) + c.rows / (12 * h * L))
    lines += [
        f"72 B L s h^2 (1 + s/6h + V/12hL) = {flops:.4g} operations, / 64 / 312e12 / 13.75 s = "
        f"{flops / 64 / 312e12 / 13.75:.1%} of peak.",
        "",
        "Put right, for what runs here: a layer keeps what JAX's derivative keeps, not what the paper counts",
        f"(of GELU alone {temporaries.results_of_gelu()} arrays of 4 h, of norms and softmax their float32); AdamW's state is",
        "float32 (12 bytes a parameter), its gradient summed in float32 (4) beside the bfloat16 copy (2); the vocabulary,",
        "0.6e9 more, is shared by all devices.",
    ]
    for remat in ("attention", "gathers", "products", "block"):
        layout = Layout(**shape, sequence=True, remat=remat)
        planned = plan(c, layout, chip, batch=64)
        one, kept = temporaries.layer(c, layout, 64), planned.memory.temporary.kept
        verdict = "fits" if planned.fits else "does not fit"
        lines.append(
            f"  remat {remat:<10} {one / sbh:>6.2f} bytes  {gb(kept, 6)} kept, {gb(planned.memory.peak, 6)} in all  "
            f"{verdict:<12}  {planned.seconds.total:>5.1f} s, {planned.share_of_peak:.1%} of peak"
        )
    lines.append(
        "The paper measured 13.75 s with sequence parallelism and selective recomputation, 18.13 s with all again."
    )
    return "\n".join(lines)


def gpt_300m_on_8() -> str:
    """A GPT of 300M on eight V100s of 32 GB: how large a batch fits, and activations against parameters.

    By the rules of Rajbhandari et al. (arXiv 1910.02054) and Korthikanti et al. (arXiv 2205.05198), and by `plan`.
    """
    c, chip = GPT_300M, hardware.V100
    s, h, a, L = c.context, c.width, c.heads, c.layers
    N = 12 * L * h * h
    state, sequence = 16 * N, L * s * h * (34 + 5 * a * s / h)
    most = int((chip.memory - state) // sequence)
    layout = Layout(data=8, precision="float16")
    kept, held = L * temporaries.everything(c, layout, 8), memory(c, layout, chip, 8)
    parts = held.temporary
    fixed = held.parameters + held.optimizer + parts.gathered + parts.gradients
    lines = [
        f"A GPT of 300M ({L} layers, width {h}, {a} heads, {s} tokens), eight V100s of 32 GB, float16, data parallelism.",
        "",
        f"By the rules of thumb: 16 N = 16 x {N / 1e6:.0f}e6 = {gb(state, 0, 2)} of state (arXiv 1910.02054), and a sequence",
        f"L s h (34 + 5 a s / h) = {L} x {s} x {h} x {34 + 5 * a * s / h:.0f} = {gb(sequence, 0, 2)} (arXiv 2205.05198), "
        f"{sequence / (2 * N):.1f} times the weights' {gb(2 * N, 0, 2)}.",
        f"({gb(chip.memory, 0, 0)} - {gb(state, 0, 2)}) / {gb(sequence, 0, 2)} = {(chip.memory - state) / sequence:.1f}: "
        f"{most} sequences a device, {8 * most} in all.",
        "",
        f"Put right: N is {c.parameters / 1e6:.0f}e6 with embeddings. {gb(fixed, 0, 2)} on a device do not depend on the batch:",
        f"parameters {gb(held.parameters, 0, 2)}, AdamW {gb(held.optimizer, 0, 2)}, 16-bit copy {gb(parts.gathered, 0, 2)}, "
        f"gradients {gb(parts.gradients, 0, 2)}. A sequence keeps",
        f"{gb(kept, 0, 2)} ({kept / (2 * c.parameters):.1f} times the weights in 16 bits), and one layer's backward pass "
        f"{gb(parts.block, 0, 2)} more. The largest batch,",
        "by what is computed again:",
    ]
    for changes in (
        {},
        {"remat": "attention"},
        {"remat": "products"},
        {"remat": "block"},
        {"zero": 3, "remat": "block"},
    ):
        tried = dataclasses.replace(layout, **changes)
        batch = layouts.largest_batch(c, tried, chip)
        planned = plan(c, tried, chip, batch=batch)
        name = ", ".join(f"{name} {value}" for name, value in changes.items()) or "nothing"
        lines.append(
            f"  {name:<20} {batch:>5} sequences  {gb(planned.memory.peak, 5)}, kept {gb(planned.memory.temporary.kept, 5)}  "
            f"{planned.seconds.total:>6.2f} s, {planned.share_of_peak:.1%} of peak"
        )
    return "\n".join(lines)


def gb(count: temporaries.Number, width: int, digits: int = 1) -> str:
    """Bytes in 10^9, aligned."""
    return f"{count / GB:>{width}.{digits}f} GB"
