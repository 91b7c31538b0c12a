"""Train a byte-level GPT-2 on real text over data x stage x tensor, on a ring all-reduce made of `ppermute`s.

    python examples/gpt2.py

needs no argument, no network and no accelerator: eight virtual CPU devices, data 2 x stage 2 x tensor 2 under the 1F1B
schedule, learn the State of the Union addresses. `--help` lists what can be changed, such as `--data 4 --tensor 2`,
`--schedule interleaved`, `--all-reduce psum` or `--text FILE`.

On the back of the envelope: 0.8 M parameters and 16 sequences of 64 bytes are (6 N + 12 L D T) tokens = 5.5 GFLOP a step, 12 ms
at the 450 GFLOP/s of two cores. So small a model does not get there: its matrices have 64 to 256 columns on a device, and eight
devices that take turns on two cores meet in some 300 hops of a few kilobytes. A step takes about 0.15 s.
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

from parallax import certificate, data, draw, mesh, schedule, step, training
from parallax import layout as layout_
from parallax.collectives import ring, tuning
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.schedule import Schedule

SHIPPED = Path(__file__).resolve().parent / "data"
TINY = gpt2.Config(layers=4, heads=4, width=128, context=64, vocabulary=256)
MODELS = {"tiny": TINY, "small": gpt2.SMALL, "medium": gpt2.MEDIUM, "large": gpt2.LARGE, "xl": gpt2.XL}
COLLECTIVES: dict[str, dict[str, Any]] = {
    "ring": {"all_reduce": ring.all_reduce, "reduce_scatter": ring.reduce_scatter, "all_gather": ring.all_gather},
    "psum": {"all_reduce": jax.lax.psum, "reduce_scatter": jax.lax.psum_scatter, "all_gather": jax.lax.all_gather},
}
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
    """Replicas, among which the batch is split. By default all the devices that `stage` and `tensor` leave."""
    stage: int | None = None
    """Pipeline stages, among which the layers are split. By default 2 where no axis is given and four divides the devices."""
    tensor: int | None = None
    """Devices that share each layer. By default 2 where no axis is given and the devices are even in number."""
    devices: int = 8
    """Virtual CPU devices to make. GPUs or TPUs, where there are any, are used instead, all of them."""
    all_reduce: Literal["ring", "psum", "auto"] = "ring"
    """Who adds up, scatters and gathers over devices: our ring, XLA's own collectives, or at each size what is fastest here."""
    microbatches: int = 4
    """Parts of each replica's batch, one after another, or one behind another in the pipeline; gradients are accumulated."""
    schedule: str = "one_f_one_b"
    """The pipeline's: `gpipe`, `one_f_one_b`, `interleaved` (1F1B with 2 chunks), or a FILE.csv of your own."""
    chunks: int | None = None
    """Chunks of layers on each stage, taken in turn; more than 1 is the interleaved pipeline."""
    zero: Literal[0, 1, 2, 3] = 0
    """What replicas split instead of copying: 1 the optimizer's state, 2 the sums of gradients too, 3 the parameters too."""
    sequence: bool = False
    """Split the residual stream by tokens over the tensor axis."""
    precision: layout_.Precision = "full"
    """What the model computes in, beside parameters in float32; float16 scales the loss."""
    remat: layout_.Remat = "none"
    """What the backward pass computes again: what was gathered, attention, all but products, or all of a block or a stage."""

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

    skip_budget: int = 10
    """Steps that may be skipped, since their loss or gradient was not finite, before the run stops."""
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
    schedule: Schedule
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
    def axes(self) -> str:
        """The mesh, in words."""
        return " x ".join(f"{name} {size}" for name, size in self.layout.axes.items())

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
    layout, table = split(settings, jax.device_count())
    mesh_ = mesh.make(data=layout.data, stage=layout.stage, tensor=layout.tensor)

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
    sizes = {"layers": config.layers, "heads": config.heads, "hidden": 4 * config.width, "rows": config.rows}
    layout.check(**sizes, batch=settings.batch, tokens=length)

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
    return Plan(settings, config, layout, table, mesh_, tokenizer, length, train, batches, evaluated, prompt, lines, out)


def split(settings: Settings, n: int) -> tuple[Layout, Schedule]:
    """The layout over `n` devices, and the schedule of its pipeline (one stage is a pipeline too)."""
    given = [settings.data, settings.stage, settings.tensor]
    by_default = lambda divisor: 2 if not any(given) and n % divisor == 0 else 1
    tensor = by_default(2) if settings.tensor is None else settings.tensor
    stage = by_default(4) if settings.stage is None else settings.stage
    data_ = max(1, n // max(1, stage * tensor)) if settings.data is None else settings.data
    M, name = settings.microbatches, settings.schedule
    extras = {name: getattr(settings, name) for name in ("zero", "sequence", "precision", "remat")}
    if name.endswith(".csv"):
        table = schedule.from_csv(name)
        if (table.stages, table.microbatches) != (stage, M) or settings.chunks not in (None, table.chunks):
            raise ValueError(
                f"--schedule {name} has {table.stages} stages, {table.microbatches} microbatches and {table.chunks} chunks; the "
                f"run has --stage {stage} --microbatches {M} --chunks {settings.chunks or 1}. Make them agree."
            )
        return Layout(data_, stage, tensor, M, table.chunks, **extras), table
    if name not in ("gpipe", "one_f_one_b", "interleaved"):
        raise ValueError(f"--schedule must be gpipe, one_f_one_b, interleaved or a file that ends in .csv; got {name}.")
    chunks = settings.chunks or (2 if name == "interleaved" else 1)
    if name == "gpipe" and chunks > 1:
        raise ValueError(f"--schedule gpipe has one chunk a stage; got --chunks {chunks}. Take --schedule interleaved.")
    layout = Layout(data_, stage, tensor, M, chunks, **extras)
    return layout, schedule.gpipe(stage, M) if name == "gpipe" else schedule.one_f_one_b(stage, M, chunks)


def describe(plan: Plan, sent: dict[str, int], rate: float, measured: str) -> str:
    """The plan in words, and what it costs: `sent` is what a device sends in a step, by axis."""
    s, c, layout = plan.settings, plan.config, plan.layout
    per_step = s.batch * plan.length
    flops = report.step_flops(c, per_step, plan.length)
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
        ("mesh", f"{plan.axes}: {n} {kind}"),
        *([("pipeline", f"{s.schedule}: {draw.summary(plan.schedule)}")] if layout.stage > 1 else []),
        (
            "batch",
            f"{s.batch} sequences of {plan.length} {plan.unit}s; a replica takes {s.batch // layout.data}, in "
            f"{layout.microbatches} microbatches",
        ),
        ("split", report.split(layout)),
        ("collectives", f"{s.all_reduce}: a device sends {bytes_(sum(sent.values()))} a step (in the compiled program),"),
        ("", ", ".join(f"{bytes_(size)} over {axis}" for axis, size in sent.items())),
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
    rate = optax.warmup_cosine_decay_schedule(peak / 10, peak, warm_up, settings.steps, peak / 10)
    decays = lambda path: path.endswith("weight") and "norm" not in path
    mask = lambda tree: jax.tree.map_with_path(lambda path, _: decays(mesh.dotted(path)), tree)
    return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=mask)


def chosen(plan: Plan) -> dict[str, Any]:
    """The collectives of a run. `auto` races all all-reduces on each axis of the mesh, and says which it takes and why."""
    if plan.settings.all_reduce != "auto":
        return COLLECTIVES[plan.settings.all_reduce]
    axes = [name for name, size in plan.layout.axes.items() if size > 1]
    both = [("stage", "tensor")] if plan.layout.stage > 1 and plan.layout.tensor > 1 else []
    all_reduce, why = tuning.auto(plan.mesh, *axes, *both)
    print(why, flush=True)
    return COLLECTIVES["ring"] | {"all_reduce": all_reduce}


def held_out_loss(plan: Plan, collectives: dict[str, Any]):
    """A function from the model to its mean loss over the plan's held-out batches, on the same devices, without dropout."""
    one: Any = step.loss_step(plan.config, plan.layout, plan.mesh, schedule=plan.schedule, **collectives)
    return lambda model: float(np.mean([one(model, windows).block_until_ready() for windows in plan.held_out]))


def run(plan: Plan) -> None:
    """Train, evaluate, sample, and say where things are."""
    s, seconds = plan.settings, {"start": time.perf_counter() - STARTED}
    rate, measured = report.matrix_rate(plan.mesh.devices.flatten().tolist())
    collectives = chosen(plan)
    prepared = step.prepare(
        plan.config,
        optimizer(s),
        plan.layout,
        plan.mesh,
        batch=s.batch,
        schedule=plan.schedule,
        max_norm=1.0,
        key=jax.random.key(s.seed),
        **collectives,
    )
    start = time.perf_counter()
    windows = jax.ShapeDtypeStruct((s.batch, plan.length + 1), jnp.int32, sharding=mesh.shardings(P("data"), plan.mesh))
    train: Any = prepared.train.lower(prepared.shapes, windows).compile()  # pyright: ignore[reportFunctionMemberAccess]
    spent = {"compile": time.perf_counter() - start, "steps": 0.0, "evaluation": 0.0}
    print(describe(plan, report.sent(certificate.read(train, plan.mesh)), rate, measured), flush=True)
    state = prepared.init()
    if plan.layout.stage > 1:
        draw.timeline(plan.schedule, plan.out / "schedule.png")
    held_out = held_out_loss(plan, collectives)
    skipped = training.Skipped(s.skip_budget)
    metrics, progress = report.Metrics(plan.out / "metrics.jsonl"), report.Progress(s.steps)
    (plan.out / "settings.json").write_text(json.dumps(dataclasses.asdict(s), default=str, indent=2) + "\n")
    jax.block_until_ready(state)
    seconds["setup"] = time.perf_counter() - STARTED - seconds["start"] - spent["compile"]

    tokens = s.batch * plan.length
    flops = report.step_flops(plan.config, tokens, plan.length)
    for i in range(1, s.steps + 1):
        start = time.perf_counter()
        windows = data.batch(plan.train, seed=s.seed, step=i - 1, size=s.batch, length=plan.length)
        placed: Any = mesh.place(windows, P("data"), plan.mesh)
        # Wait for every device, not only for the loss: on virtual CPU devices, programs in flight together can take all of XLA's
        # threads and wait for each other for ever.
        state, info = jax.block_until_ready(train(state, placed))
        took = time.perf_counter() - start
        spent["steps"] += took
        try:
            skip = skipped.count(i, info)
        except training.OverBudget as error:
            progress.done()
            sys.exit(
                f"error: {error} Now --learning-rate is {s.learning_rate} and --skip-budget {s.skip_budget}. The steps before "
                f"are in {metrics.path}."
            )
        measured_now = {"skipped": True} if skip else {"loss": float(info.loss), "gradient_norm": float(info.gradient_norm)}
        record: dict[str, Any] = {"step": i} | measured_now
        if i % s.evaluate_every == 0 or i == s.steps:
            start = time.perf_counter()
            record["held_out"] = held_out(state.model)
            spent["evaluation"] += time.perf_counter() - start
            if not math.isfinite(record["held_out"]):
                progress.done()
                sys.exit(
                    f"error: step {i}: the held-out loss is {record['held_out']}, so the model is lost. Lower --learning-rate "
                    f"(now {s.learning_rate}). The steps before are in {metrics.path}."
                )
        record |= {"seconds": took, "tokens_per_second": tokens / took, "share": flops / took / rate}
        metrics.write(**record)
        progress.show(record)
    progress.done()
    if skipped.steps:
        print(f"{len(skipped.steps)} steps were skipped, since their loss or gradient was not finite: {skipped.steps}")
    finish(plan, metrics, state.model, seconds | spent)


def finish(plan: Plan, metrics: report.Metrics, model: gpt2.GPT2, seconds: dict[str, float]) -> None:
    """The sample, the picture, and the last lines."""
    s, start = plan.settings, time.perf_counter()
    whole = jax.device_put(model, plan.mesh.devices.flat[0])
    whole = whole if plan.layout.stage == 1 else gpt2.unchunked(whole)
    write = jax.jit(gpt2.sample, static_argnames=("tokens", "window"))
    key = jax.random.fold_in(jax.random.key(s.seed), s.steps)
    ids = write(whole, jnp.asarray(plan.prompt, jnp.int32), tokens=SAMPLED, window=plan.length, temperature=0.8, key=key)
    text = plan.tokenizer.decode(np.concatenate([plan.prompt, np.asarray(ids)]))
    print(f"\nsample, {SAMPLED} {plan.unit}s at temperature 0.8:\n{text}\n")
    (plan.out / "sample.txt").write_text(text + "\n", encoding="utf-8")
    seconds["sample"], start = time.perf_counter() - start, time.perf_counter()

    title = f"GPT-2, {plan.config.parameters:,} parameters, {plan.axes}, {s.all_reduce} all-reduce: {s.text.name}"
    report.picture(
        plan.out / "loss.png", metrics.records, plan.lines, tokens_per_step=s.batch * plan.length, unit=plan.unit, title=title
    )
    seconds["picture"] = time.perf_counter() - start
    print("seconds: " + ", ".join(f"{name} {took:.1f}" for name, took in seconds.items()))
    loss, bigram = metrics.records[-1]["held_out"], plan.lines["bigram"]
    verdict = "below" if loss < bigram else "NOT below"
    print(
        f"held-out loss {loss:.3f} nats a {plan.unit}, {verdict} the bigram line of {bigram:.3f}; "
        f"{time.perf_counter() - STARTED:.0f} s in all; metrics.jsonl, loss.png and sample.txt are in {plan.out}"
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
