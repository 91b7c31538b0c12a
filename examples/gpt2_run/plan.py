"""The plan of a run, checked before a device computes: the sizes, the layout, the
training text, the cost, and the settings on which the losses depend."""

import contextlib
import dataclasses
import functools
import json
import math
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import corpus
from gpt2_run import fitting, report
from gpt2_run.settings import SHIPPED, Settings, profiled
from parallax import data, draw, mesh
from parallax.collectives import Axis, ring, tuning, xla
from parallax.layout import Layout
from parallax.models import gpt2
from parallax.plan import quantity
from parallax.run import lock, metrics, processes, retention
from parallax.run import record as records
from parallax.schedule import Schedule

SETTINGS, PARTIAL, CHECKPOINTS = (
    "settings.json",
    ".settings.json.partial",
    "checkpoints",
)


def default_dtype():
    return jnp.result_type(float)  # float64 where JAX_ENABLE_X64=1 says so


ALGORITHMS = {"ring": ring, "psum": xla}
TOKENIZERS = {
    "bytes": corpus.bytes_tokenizer,
    "gpt2": lambda: corpus.gpt2_tokenizer(SHIPPED / "gpt2.tiktoken"),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The checked settings of a run, the values that follow from them, and the text to
    train on: all that is known before a device computes."""

    settings: Settings
    job: processes.Job
    config: gpt2.Config
    begins_with: gpt2.GPT2 | None
    layout: Layout
    schedule: Schedule
    mesh: Mesh
    tokenizer: corpus.Tokenizer
    length: int
    train: np.ndarray
    held_out: list[np.ndarray]
    held_out_tokens: int
    prompt: np.ndarray
    lines: dict[str, float]
    profiled: range

    @property
    def numbers(self) -> dict[str, Any]:
        """The settings on which the losses depend, by name. The layout is not one of
        them."""
        s, c = self.settings, self.config
        flags = (
            "model",
            "batch",
            "steps",
            "learning_rate",
            "seed",
            "precision",
            "dropout",
        )
        begun = {} if self.begins_with is None else {"from": checksum(self.begins_with)}
        text_checksum = zlib.crc32(self.train.tobytes())
        return {name: getattr(s, name) for name in flags} | {
            "layers": c.layers,
            "heads": c.heads,
            "width": c.width,
            "length": self.length,
            "text": f"{len(self.train)} {self.unit}s, crc32 {text_checksum:08x}",
            "dtype": str(default_dtype()),
            **begun,
        }

    @property
    def windows(self) -> jax.ShapeDtypeStruct:
        """The shape, dtype and sharding of the batch of one step."""
        sharding = mesh.shardings(P("data"), self.mesh)
        return jax.ShapeDtypeStruct(
            (self.settings.batch, self.length + 1), jnp.int32, sharding=sharding
        )

    @property
    def axes(self) -> str:
        """The mesh, in words."""
        return " x ".join(f"{name} {size}" for name, size in self.layout.axes.items())

    @property
    def unit(self) -> str:
        """The word for a token in the output of the run: "byte" or "token"."""
        return "byte" if self.settings.tokenizer == "bytes" else "token"


def prepare(settings: Settings, job: processes.Job) -> Plan:
    """The plan of a run. Every rank makes its own; rank 0 also checks the folder of
    results.

    Raises `ValueError`, `OSError` or `ImportError`, with a message for the user.
    """
    tokenizer = TOKENIZERS[settings.tokenizer]()
    begins_with = None if settings.source is None else loaded(settings.source)
    text = functools.cache(
        lambda: data.split(corpus.encode_file(settings.text, tokenizer))
    )
    config, length, layout, table = fitting.fitted(
        settings,
        fitting.World(
            devices=None if jax.default_backend() == "cpu" else jax.device_count(),
            vocabulary=tokenizer.vocabulary,
            processes=job.processes,
            source=None if begins_with is None else begins_with.config,
            room=lambda: (len(text()[0]), len(text()[1])),
        ),
    )
    mesh_ = mesh.make(devices=None, **layout.axes)

    prompt = tokenizer.encode(settings.prompt)
    if not len(prompt):
        raise ValueError(
            "--prompt must have a character or more; got none. A space is enough."
        )
    train, held_out = text()
    # Refuses a text that is too short.
    data.batch(train, seed=settings.seed, step=0, size=settings.batch, length=length)
    # A multiple of the batch divides over every layout that the batch divides over, so
    # all evaluate on the same tokens. It is as large as keeps a batch's logits at 8 MB,
    # where one batch does.
    step_tokens = settings.batch * length
    size = settings.batch * max(
        1, min(2**21 // config.rows, len(held_out) - 1) // step_tokens
    )
    limit = max(1, settings.evaluate_tokens // (size * length))
    batches = list(
        data.held_out_batches(held_out, size=size, length=length, limit=limit)
    )
    evaluated = len(batches) * size * length
    lines = {
        "uniform": math.log(tokenizer.vocabulary),
        "unigram": corpus.unigram(
            train, held_out[1 : evaluated + 1], tokenizer.vocabulary
        ),
        "bigram": corpus.bigram(train, held_out[: evaluated + 1], tokenizer.vocabulary),
    }
    told = profiled(settings)
    texts = (train, batches, evaluated, prompt)
    plan = Plan(
        settings,
        job,
        config,
        begins_with,
        layout,
        table,
        mesh_,
        tokenizer,
        length,
        *texts,
        lines,
        told,
    )
    if job.rank == 0:
        check_folder(plan)
    return plan


def loaded(folder: Path) -> gpt2.GPT2:
    """Loads the model in `folder` into the host's memory, and returns it. Each device
    later gets its part from there."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return gpt2.load(folder, dtype=default_dtype())


def checksum(model: gpt2.GPT2) -> str:
    """Returns the crc32 of the weights, as text. A run that starts from a model
    (`--from`) stores this text, and can be resumed only with the same model."""
    crc = 0
    for leaf in jax.tree.leaves(model):
        crc = zlib.crc32(np.asarray(leaf).tobytes(), crc)
    return f"crc32 {crc:08x}"


def check_folder(plan: Plan) -> None:
    """Raises `ValueError` if the folder of results holds another run or other files, or
    if its checkpoints are lost.

    A run that was killed as it began may leave a folder without results. Such a folder
    is accepted.
    """
    out, stored, written = plan.settings.out, checkpoints_of(plan.settings.out), {}
    if (out / SETTINGS).exists():
        if not (written := settings_in(out / SETTINGS)) and not stored:
            raise ValueError(
                f"{out / SETTINGS}: needed the settings of a run, found a damaged "
                f"file. No checkpoint names the run of the folder {out} either. Choose "
                "another --out."
            )
        # If the settings are damaged, the checkpoints say to which run they belong.
        if written and (
            differing := records.differences(written["numbers"], plan.numbers)
        ):
            raise ValueError(
                f"{out} holds another run, with {differing}. Choose another --out. To "
                "go on with the run in this folder, use its settings."
            )
    elif (
        not stored
        and out.exists()
        and {path.name for path in out.iterdir()} - {lock.FILE, CHECKPOINTS, PARTIAL}
    ):
        raise ValueError(
            f"{out}: needed an empty folder or the folder of a run, found other files. "
            "Choose another --out."
        )
    reached = max(
        (record["step"] for record in metrics.recorded(out / "metrics.jsonl")),
        default=0,
    )
    # A save begins twice in this number of steps, and waits for the save before it.
    lost_at_most = written.get("flags", {}).get(
        "checkpoint_every", plan.settings.checkpoint_every
    )
    if not stored and reached > lost_at_most:
        raise ValueError(
            f"{out / 'metrics.jsonl'} has records up to step {reached:,}, but "
            f"{out / CHECKPOINTS} holds no checkpoint: the run's checkpoints are lost. "
            "Put them back, or choose another --out to begin again."
        )


def checkpoints_of(out: Path) -> bool:
    """Whether a checkpoint was ever finished in this folder of results, as far as can
    be seen."""
    folder = out / CHECKPOINTS
    return folder.is_dir() and bool(
        retention.finished(folder) or (folder / retention.NEWEST).exists()
    )


def settings_in(path: Path) -> dict[str, Any]:
    """Returns the dict that `claim_folder` wrote to the file `path`; an empty dict if
    the file holds something else."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record, dict) and all(
            isinstance(record.get(name), dict) for name in ("numbers", "flags")
        ):
            return record
    return {}


def claim_folder(plan: Plan) -> None:
    """Makes the folder of results, and writes into it which run it belongs to: the
    settings on which the losses depend, and all flags."""
    out = plan.settings.out
    out.mkdir(parents=True, exist_ok=True)
    written = json.dumps(
        {"numbers": plan.numbers, "flags": dataclasses.asdict(plan.settings)},
        default=str,
        indent=2,
    )
    write_whole(out / SETTINGS, written + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes the file at `path` atomically: it never holds only a part of `text`."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def describe(
    plan: Plan, sent: dict[str, int], rate: float, measured: str, first: int
) -> str:
    """The plan and its cost in words.

    Args:
        sent: the bytes that a device sends in a step, by mesh axis.
        rate: the flops per second of all devices together, in matrix products.
        measured: how `rate` was measured.
        first: the number of steps that are already done.
    """
    s, c, layout = plan.settings, plan.config, plan.layout
    per_step = s.batch * plan.length
    flops = report.step_flops(c, per_step, plan.length)
    n, platform = plan.mesh.size, plan.mesh.devices.flat[0].platform
    kind = (
        f"virtual CPU devices on {report.cores()} cores"
        if platform == "cpu"
        else plan.mesh.devices.flat[0].device_kind
    )
    rows = [
        (
            "model",
            f"{c.parameters:,} parameters: {c.layers} layers, {c.heads} heads, width "
            f"{c.width}, context {c.context}",
        ),
        (
            "text",
            f"{s.text.name}: {len(plan.train):,} {plan.unit}s to train on; "
            f"{plan.held_out_tokens:,} held out to evaluate on",
        ),
        (
            "run",
            f"{s.steps:,} steps of {per_step:,} {plan.unit}s: "
            f"{s.steps * per_step / len(plan.train):.2f} epochs, seed {s.seed}",
        ),
        ("mesh", f"{plan.axes}: {n} {kind}"),
        *([("processes", str(plan.job))] if plan.job.processes > 1 else []),
        *(
            [("pipeline", f"{s.schedule}: {draw.summary(plan.schedule)}")]
            if plan.schedule.stages > 1
            else []
        ),
        (
            "batch",
            f"{s.batch} sequences of {plan.length} {plan.unit}s; a replica takes "
            f"{s.batch // layout.data}, in {layout.microbatches} microbatches",
        ),
        ("split", report.split(layout)),
        *report.sending(said(plan), sent),
        ("arithmetic", f"{quantity(flops, 'FLOP')} a step"),
        ("matrix rate", f"{quantity(rate, 'FLOP/s')} ({measured}):"),
        (
            "",
            f"a step would take {flops / rate * 1000:.3g} ms if it were all matrix "
            "products at that rate",
        ),
        (
            "to beat",
            ", ".join(f"{name} {nats:.3f}" for name, nats in plan.lines.items())
            + f" nats per {plan.unit}, held out",
        ),
        ("out", f"{s.out}: goes on after step {first:,}" if first else str(s.out)),
    ]
    return report.table(rows)


def optimizer(settings: Settings) -> optax.GradientTransformation:
    """AdamW with warm-up and cosine; only the blocks' matrices decay, not embeddings,
    norms or biases."""
    peak, warm_up = settings.learning_rate, min(100, settings.steps // 10)
    rate = optax.warmup_cosine_decay_schedule(
        peak / 10, peak, warm_up, settings.steps, peak / 10
    )

    def decays(path, leaf):
        name = mesh.dotted(path)
        return name.endswith("weight") and "norm" not in name

    def mask(tree):
        return jax.tree.map_with_path(decays, tree)

    return optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=mask)


def said(plan: Plan) -> str:
    """Returns the collective algorithm as text. If the schedule runs each stage as its
    own program, the tensor axis uses `jax.lax`, whatever `--all-reduce` is."""
    asked = plan.settings.all_reduce
    alone = plan.schedule.per_stage and plan.layout.tensor > 1 and asked != "psum"
    return f"{asked} (psum over tensor)" if alone else asked


def chosen(plan: Plan) -> dict[str, Axis]:
    """Returns each axis of the mesh with its collective algorithm. `--all-reduce auto`
    measures the time of several all-reduces on each axis, and prints the choice."""
    if plan.settings.all_reduce == "auto":
        axes = [name for name, size in plan.layout.axes.items() if size > 1]
        both = [("stage", "tensor")] if {"stage", "tensor"} <= {*axes} else []
        algorithm, why = tuning.auto(plan.mesh, *axes, *both)
        if plan.job.rank == 0:
            print(why, flush=True)
    else:
        algorithm = ALGORITHMS[plan.settings.all_reduce]
    # Rings need all stages at once.
    inside = xla if plan.schedule.per_stage else algorithm
    return {
        name: (inside if name == "tensor" else algorithm)(name)
        for name in plan.layout.axes
    }
