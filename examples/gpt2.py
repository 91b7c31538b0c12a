"""Train a byte-level GPT-2 on real text over data x tensor, on a ring all-reduce made of `ppermute`s.

    python examples/gpt2.py

needs no argument, no network and no accelerator: eight virtual CPU devices, data 4 x tensor 2, learn the State of the Union
addresses. `--help` lists what can be changed, such as `--data 8 --tensor 1`, `--all-reduce psum` or `--text FILE`.

On the back of the envelope: 0.8 M parameters and 16 sequences of 64 bytes are (6 N + 12 L D T) tokens = 5.5 GFLOP a step, 12 ms
at the 450 GFLOP/s of two cores. So small a model does not get there: its matrices have 64 to 256 columns on a device, and eight
devices that take turns on two cores meet in some 200 hops of a few kilobytes. A step takes about 0.1 s, 700 take 70 s, and
compiling, evaluating and sampling 25 s more.
"""

import time

STARTED = time.perf_counter()

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import report
import tyro
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from parallax import data, mesh, step
from parallax.collectives import ring
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.models.gpt2.sample import sample

SHIPPED = Path(__file__).resolve().parent / "data"
TINY = gpt2.Config(layers=4, heads=4, width=128, context=64, vocabulary=256)
MODELS = {"tiny": TINY, "small": gpt2.SMALL, "medium": gpt2.MEDIUM, "large": gpt2.LARGE, "xl": gpt2.XL}
ALL_REDUCE = {"ring": ring.all_reduce, "psum": jax.lax.psum}
TOKENIZERS = {"bytes": data.bytes_tokenizer, "gpt2": lambda: data.gpt2_tokenizer(SHIPPED / "gpt2.tiktoken")}
SAMPLED = 300  # tokens of text at the end


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run depends on."""

    model: Literal["tiny", "small", "medium", "large", "xl"] = "tiny"
    """The sizes to start from; `small` to `xl` are the published ones."""
    layers: int | None = None
    """Layers, instead of the model's."""
    heads: int | None = None
    """Attention heads, instead of the model's."""
    width: int | None = None
    """The width of the residual stream, instead of the model's."""
    dropout: float = 0.0
    """The share of activations dropped, in the residual stream and in attention."""

    text: Path = SHIPPED / "state_of_the_union.txt"
    """Any UTF-8 text. Its last tenth is held out."""
    tokenizer: Literal["bytes", "gpt2"] = "bytes"
    """What a token is: a byte, or one of GPT-2's 50,257 pieces of words."""

    data: int | None = None
    """Replicas, among which the batch is split. By default all the devices that `tensor` leaves."""
    tensor: int | None = None
    """Devices that share each layer. By default 2, or 1 where `data` is given or the devices are odd in number."""
    devices: int = 8
    """Virtual CPU devices to make. GPUs or TPUs, where there are any, are used instead, all of them."""
    all_reduce: Literal["ring", "psum"] = "ring"
    """Who adds up over devices: our ring, or XLA's own all-reduce."""
    microbatches: int = 2
    """Parts of each replica's batch, one after another; their gradients are accumulated."""
    remat: bool = False
    """Compute each block again in the backward pass, instead of keeping what it computed."""

    steps: int = 700
    """Optimizer steps."""
    batch: int = 16
    """Sequences in a step, on all devices together."""
    length: int | None = None
    """Tokens in a sequence. By default the model's context; more lengthens that."""
    learning_rate: float = 3e-3
    """The peak of the schedule: a tenth of the steps of warm-up, at most 100, then a cosine down to a tenth."""
    seed: int = 0
    """Of the weights, the order of the text, dropout and the sample. The same seed gives the same losses, on any layout."""

    evaluate_every: int = 50
    """Steps from one held-out loss to the next; there is one at the end in any case."""
    evaluate_tokens: int = 65536
    """About how many held-out tokens to evaluate on: always the first ones."""
    prompt: str = "My fellow Americans, "
    """What the sample at the end goes on from."""
    out: Path = Path("out/gpt2")
    """Folder for metrics and picture. One that holds an earlier run is left as it is, and out/gpt2-2 is made beside it."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings, checked and worked out, and the text: all that is known before a device computes."""

    settings: Settings
    config: gpt2.Config
    layout: Layout
    mesh: Mesh
    tokenizer: data.Tokenizer
    length: int
    train: np.ndarray
    held_out: list[np.ndarray]
    held_out_tokens: int
    prompt: np.ndarray
    lines: dict[str, float]
    out: Path

    @property
    def unit(self) -> str:
        """What a token is called."""
        return "byte" if self.settings.tokenizer == "bytes" else "token"


def prepare(settings: Settings) -> Plan:
    """The plan of a run, and its folder. Raises `ValueError`, `OSError` or `ImportError`, to be read by the user."""
    for name in ("devices", "steps", "evaluate_every"):
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more; got {getattr(settings, name)}.")
    jax.config.update("jax_num_cpu_devices", settings.devices)
    n = jax.device_count()
    tensor = settings.tensor
    if tensor is None:
        tensor = 1 if settings.data or n % 2 else 2
    replicas = max(1, n // max(1, tensor)) if settings.data is None else settings.data
    layout = Layout(data=replicas, tensor=tensor, microbatches=settings.microbatches)
    mesh_ = mesh.make(data=replicas, tensor=tensor)

    tokenizer = TOKENIZERS[settings.tokenizer]()
    preset = MODELS[settings.model]
    length = preset.context if settings.length is None else settings.length
    sizes: dict[str, Any] = {name: getattr(settings, name) for name in ("layers", "heads", "width")}
    config = dataclasses.replace(
        preset,
        context=max(length, preset.context),
        vocabulary=tokenizer.vocabulary,
        dropout=settings.dropout,
        attention_dropout=settings.dropout,
        **{name: size for name, size in sizes.items() if size is not None},
    )
    layout.check(layers=config.layers, heads=config.heads, hidden=4 * config.width, rows=config.rows, batch=settings.batch)

    prompt = tokenizer.encode(settings.prompt)
    if not len(prompt):
        raise ValueError("--prompt must have a character or more; got none. Give it a space.")
    train, held_out = data.split(data.encode_file(settings.text, tokenizer))
    data.batch(train, seed=settings.seed, step=0, size=settings.batch, length=length)  # refuses a text that is too short
    # A multiple of the batch divides over every layout that the batch divides over, so all evaluate on the same tokens.
    # It is as large as keeps a batch's logits at 8 MB, where one batch does.
    step_tokens = settings.batch * length
    size = settings.batch * max(1, min(2**21 // config.rows, len(held_out) - 1) // step_tokens)
    limit = max(1, settings.evaluate_tokens // (size * length))
    batches = list(data.held_out_batches(held_out, size=size, length=length, limit=limit))
    evaluated = len(batches) * size * length
    lines = {
        "uniform": math.log(tokenizer.vocabulary),
        "unigram": data.unigram(train, held_out[1 : evaluated + 1], tokenizer.vocabulary),
        "bigram": data.bigram(train, held_out[: evaluated + 1], tokenizer.vocabulary),
    }
    out = report.new_folder(settings.out)
    return Plan(settings, config, layout, mesh_, tokenizer, length, train, batches, evaluated, prompt, lines, out)


def describe(plan: Plan, shard_bytes: int, rate: float, measured: str) -> str:
    """The plan in words, and what it will cost."""
    s, c, layout = plan.settings, plan.config, plan.layout
    per_step = s.batch * plan.length
    flops = report.step_flops(c, per_step, plan.length)
    sent = report.traffic(c, layout, shard_bytes, batch=s.batch, length=plan.length, remat=s.remat)
    n, platform = plan.mesh.size, plan.mesh.devices.flat[0].platform
    kind = f"virtual CPU devices on {report.cores()} cores" if platform == "cpu" else plan.mesh.devices.flat[0].device_kind
    bytes_ = lambda size: report.quantity(size, "B")
    rows = [
        ("model", f"{c.parameters:,} parameters: {c.layers} layers, {c.heads} heads, width {c.width}, context {c.context}"),
        (
            "text",
            f"{s.text.name}: {len(plan.train):,} {plan.unit}s to train on; {plan.held_out_tokens:,} held out to evaluate on",
        ),
        (
            "run",
            f"{s.steps:,} steps of {per_step:,} {plan.unit}s: {s.steps * per_step / len(plan.train):.2f} epochs, seed {s.seed}",
        ),
        ("mesh", f"data {layout.data} x tensor {layout.tensor}: {n} {kind}"),
        (
            "batch",
            f"{s.batch} sequences of {plan.length} {plan.unit}s; a replica takes {s.batch // layout.data}, in "
            f"{layout.microbatches} microbatches",
        ),
        ("all-reduce", f"{s.all_reduce}: a device sends {bytes_(sum(sent.values()))} a step (theory),"),
        ("", f"{bytes_(sent['data'])} of gradients over data and {bytes_(sent['tensor'])} of activations over tensor"),
        ("arithmetic", f"{report.quantity(flops, 'FLOP')} a step"),
        ("matrix rate", f"{report.quantity(rate, 'FLOP/s')} ({measured}):"),
        ("", f"a step would take {flops / rate * 1000:.3g} ms if it were all matrix products at that rate"),
        ("to beat", ", ".join(f"{name} {nats:.3f}" for name, nats in plan.lines.items()) + f" nats a {plan.unit}, held out"),
        ("out", str(plan.out)),
    ]
    return report.table(rows)


def optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW with warm-up and cosine; only the blocks' matrices decay, not embeddings, norms or biases."""
    peak, warm_up = settings.learning_rate, min(100, settings.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(peak / 10, peak, warm_up, settings.steps, peak / 10)
    decays = lambda path: path.endswith("weight") and "norm" not in path
    mask = lambda tree: jax.tree.map_with_path(lambda path, _: decays(mesh.dotted(path)), tree)
    return optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.1, mask=mask)


def held_out_loss(plan: Plan, model: gpt2.GPT2):
    """A function from the model to its mean loss over the plan's held-out batches, on the same devices, without dropout."""
    all_reduce = ALL_REDUCE[plan.settings.all_reduce]

    def local(model, windows):
        loss = gpt2.loss(model, (windows, None), axis_name="tensor", all_reduce=all_reduce)
        return all_reduce(loss, "data") / plan.layout.data

    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, model)
    one = jax.jit(mesh.spmd(local, mesh=plan.mesh, in_specs=(specs, P("data")), out_specs=P()))
    return lambda model: float(np.mean([one(model, windows).block_until_ready() for windows in plan.held_out]))


def run(plan: Plan) -> None:
    """Train, evaluate, sample, and say where things are."""
    s, seconds = plan.settings, {"start": time.perf_counter() - STARTED}
    rate, measured = report.matrix_rate(plan.mesh.devices.flatten().tolist())
    state, train = step.train_step(
        plan.config,
        optimizer(s),
        plan.layout,
        plan.mesh,
        batch=s.batch,
        all_reduce=ALL_REDUCE[s.all_reduce],
        max_norm=1.0,
        checkpoint=jax.checkpoint if s.remat else lambda block: block,
        key=jax.random.key(s.seed),
    )
    shard = sum(math.prod(w.sharding.shard_shape(w.shape)) * w.dtype.itemsize for w in jax.tree.leaves(state.model))
    print(describe(plan, shard, rate, measured), flush=True)
    held_out = held_out_loss(plan, state.model)
    metrics, progress = report.Metrics(plan.out / "metrics.jsonl"), report.Progress(s.steps)
    (plan.out / "settings.json").write_text(json.dumps(dataclasses.asdict(s), default=str, indent=2) + "\n")
    jax.block_until_ready(state)
    seconds["setup"] = time.perf_counter() - STARTED - seconds["start"]

    tokens = s.batch * plan.length
    flops = report.step_flops(plan.config, tokens, plan.length)
    spent = {"compile": 0.0, "steps": 0.0, "evaluation": 0.0}
    for i in range(1, s.steps + 1):
        start = time.perf_counter()
        windows = data.batch(plan.train, seed=s.seed, step=i - 1, size=s.batch, length=plan.length)
        placed: Any = mesh.place(windows, P("data"), plan.mesh)
        # Wait for every device, not only for the loss: on virtual CPU devices, programs in flight together can take all of XLA's
        # threads and wait for each other for ever.
        state, info = jax.block_until_ready(train(state, placed))
        took = time.perf_counter() - start
        spent["steps" if i > 1 else "compile"] += took
        loss, norm = float(info.loss), float(info.gradient_norm)
        if not math.isfinite(loss) or not math.isfinite(norm):
            progress.done()
            sys.exit(
                f"error: step {i}: the loss is {loss} and the gradient norm {norm}, so the run stops. Lower --learning-rate "
                f"(now {s.learning_rate}). The steps before it are in {metrics.path}."
            )
        record = {"step": i, "loss": loss, "gradient_norm": norm}
        if i % s.evaluate_every == 0 or i == s.steps:
            start = time.perf_counter()
            record["held_out"] = held_out(state.model)
            spent["evaluation"] += time.perf_counter() - start
        record |= {"seconds": took, "tokens_per_second": tokens / took, "share": flops / took / rate}
        metrics.write(**record)
        progress.show(record)
    progress.done()
    finish(plan, metrics, state.model, seconds | spent)


def finish(plan: Plan, metrics: report.Metrics, model: gpt2.GPT2, seconds: dict[str, float]) -> None:
    """The sample, the picture, and the last lines."""
    s, start = plan.settings, time.perf_counter()
    whole = jax.device_put(model, plan.mesh.devices.flat[0])
    write = jax.jit(sample, static_argnames=("tokens", "window"))
    key = jax.random.fold_in(jax.random.key(s.seed), s.steps)
    ids = write(whole, jnp.asarray(plan.prompt, jnp.int32), tokens=SAMPLED, window=plan.length, temperature=0.8, key=key)
    text = plan.tokenizer.decode(np.concatenate([plan.prompt, np.asarray(ids)]))
    print(f"\nsample, {SAMPLED} {plan.unit}s at temperature 0.8:\n{text}\n")
    (plan.out / "sample.txt").write_text(text + "\n", encoding="utf-8")
    seconds["sample"], start = time.perf_counter() - start, time.perf_counter()

    axes = f"data {plan.layout.data} x tensor {plan.layout.tensor}"
    title = f"GPT-2, {plan.config.parameters:,} parameters, {axes}, {s.all_reduce} all-reduce: {s.text.name}"
    report.picture(
        plan.out / "loss.png", metrics.records, plan.lines, tokens_per_step=s.batch * plan.length, unit=plan.unit, title=title
    )
    seconds["picture"] = time.perf_counter() - start
    print("seconds: " + ", ".join(f"{name} {took:.1f}" for name, took in seconds.items()))
    loss, bigram = metrics.records[-1]["held_out"], plan.lines["bigram"]
    verdict = "below" if loss < bigram else "NOT below"
    print(
        f"held-out loss {loss:.3f} nats a {plan.unit}, {verdict} the bigram line of {bigram:.3f}; "
        f"{time.perf_counter() - STARTED:.0f} s in all; metrics.jsonl, loss.png and sample.txt in {plan.out}"
    )


def main() -> None:
    """Read the command line; a mistake in it is told in a line."""
    settings = tyro.cli(Settings, prog=Path(__file__).name, description=__doc__)
    try:
        plan = prepare(settings)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    run(plan)


if __name__ == "__main__":
    main()
