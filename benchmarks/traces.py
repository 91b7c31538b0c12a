"""What `plan.trace` reads from a step beside what the step's compiled program has: operations,
bytes sent, the peak of memory.

    python benchmarks/traces.py [--count 60] [--seed 0] [--picks 1,2]
        # compiles 60 small steps, runs nothing

Sixty layouts are drawn, as many in each of four families: plain, what the backward pass computes
again, ZeRO, pipelines. They split a small GPT-2 by the recipe, and models that know nothing of it:
the gallery's variational autoencoder, LeNet, mixer and mixture of experts. See benchmarks/README.md
for the columns.
"""

import argparse
import functools
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import measure
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from parallax import grads, hardware, mesh, pipeline, plan, rules, schedule, step, zero
from parallax.collectives import ring
from parallax.compiled import certificate, hlo
from parallax.compiled.seconds import Costs
from parallax.layout import Layout
from parallax.models import decoder, gpt2

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import custom_training
import experts
import lenet
import tensor_parallel_vae

MEDIAN, WORST = 0.15, 0.40  # of the peak, in each family
TINY = gpt2.Config(layers=4, heads=4, width=32, context=32, vocabulary=100, vocabulary_multiple=16)
FAMILIES = ("plain", "remat", "ZeRO", "pipeline")
# Of the machine code, not of the program: how memory is assigned does not depend on it.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
ADAMW = optax.adamw(1e-3)


class Model(NamedTuple):
    """A model of a user's own, and the ways in which it is split here.

    Attributes:
        make: the model.
        loss: `(model, batch, axis) -> loss`; `axis` is that of tensor parallelism, or `()`.
        batch: the shapes of a batch of so many rows.
        rows: in a microbatch on a device.
        split: the specs of what tensor parallelism splits, by glob; a model without is not split
            so.
        stages: of a pipeline: how the batch enters, `(axis) -> stage`, and the head; None where
            there is none.
    """

    make: Callable[[], Any]
    loss: Callable[..., Any]
    batch: Callable[[int], Any]
    rows: int
    split: Mapping[str, P] = MappingProxyType({})
    stages: tuple[Callable[..., Any], ...] | None = None


class Case(NamedTuple):
    """One drawn layout of a model."""

    family: str
    model: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.model} {self.layout}"


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Of an array."""
    return jax.ShapeDtypeStruct(dims, dtype)


def of_mixer(axis):
    """The mixer's stage, whose layers are split over `axis`."""
    return functools.partial(custom_training.stage, axis=axis)


def mixer_loss(model, batch, axis):
    return pipeline.unpipelined(custom_training.embed, of_mixer(axis), custom_training.head)(
        model, batch
    )


def digits_of(rows: int):
    """Images and their labels."""
    return shape(rows, 8, 8), shape(rows, dtype=jnp.int32)


def mixture_loss(model, windows, axis):
    return experts.loss(model, windows, k=experts.K, axis=axis)[0]


MODELS = {
    "VAE": Model(
        lambda: tensor_parallel_vae.VAE(jax.random.key(0)),
        tensor_parallel_vae.loss,
        lambda rows: (
            shape(rows, tensor_parallel_vae.PIXELS),
            shape(rows, tensor_parallel_vae.LATENT),
        ),
        30,
        {"*.up": P(None, "tensor"), "*.up_bias": P("tensor"), "*.down": P("tensor")},
    ),
    "LeNet": Model(
        lambda: lenet.LeNet(8, 8, jax.random.key(0)),
        lambda m, b, _: lenet.loss(m, b),
        digits_of,
        12,
    ),
    "mixer": Model(
        lambda: custom_training.Mixer(jax.random.key(0)),
        mixer_loss,
        digits_of,
        16,
        {"**.up": P(None, None, None, "tensor"), "**.down": P(None, None, "tensor")},
        (custom_training.embed, of_mixer, custom_training.head),
    ),
    "mixture": Model(
        lambda: experts.decoder(experts.EXPERTS, experts.HIDDEN, jax.random.key(0)),
        mixture_loss,
        lambda rows: shape(rows, experts.CONTEXT + 1, dtype=jnp.int32),
        2,
    ),
}
GPT2 = "GPT-2"


# Layouts, drawn


def drawn(count: int, seed: int = 0) -> list[Case]:
    """So many layouts of at most eight devices, a quarter of them in each family."""
    draw, found = random.Random(seed), []
    for family in FAMILIES:
        own: dict[Case, None] = {}
        while len(own) < count // len(FAMILIES):
            name = draw.choice((GPT2,) * 3 + tuple(MODELS))
            if (layout := _layout(draw, family, name)) is not None:
                own[Case(family, name, layout)] = None
        found += own
    return found


def _layout(draw: random.Random, family: str, name: str) -> Layout | None:
    """A layout of the family, or None where those that were drawn do not go together."""
    settings: dict[str, Any] = {
        "data": draw.choice((1, 2, 4, 8)),
        "microbatches": draw.choice((1, 2, 4)),
    }
    settings |= {
        "tensor": draw.choice((1, 2, 4)),
        "stage": draw.choice((2, 4)) if family == "pipeline" else 1,
    }
    again = ("block", "products", "attention") if name == GPT2 else ("block",)
    settings["remat"] = draw.choice(again) if family == "remat" or draw.random() < 0.3 else "none"
    settings["zero"] = (
        draw.choice((1, 2, 3))
        if family == "ZeRO" or (family == "pipeline" and draw.random() < 0.3)
        else 0
    )
    settings["sequence"] = name == GPT2 and settings["tensor"] > 1 and draw.random() < 0.5
    if family == "plain":
        settings["remat"] = "none"
    if (
        not Layout.admits(**settings)
        or not 1 < Layout(**settings).devices <= 8
        or (settings["zero"] and settings["data"] == 1)
    ):
        return None
    # XLA scatters alike zeros of ZeRO-2's idle ticks once, and joins what a lone microbatch
    # computes again: docs/planning.md.
    if settings["stage"] > 1 and (
        settings["zero"] == 2 or (settings["microbatches"] == 1 and settings["remat"] != "none")
    ):
        return None
    if name != GPT2:
        model = MODELS[name]
        if (settings["tensor"] > 1 and not model.split) or (
            settings["stage"] > 1 and model.stages is None
        ):
            return None
        if settings["stage"] > 1 and (settings["zero"] == 3 or settings["remat"] != "none"):
            return None
    return Layout(**settings)


# A step of each, and the shapes that it takes


def prepared(case: Case, world: Any) -> tuple[Any, tuple[Any, Any]]:
    """The jitted step of a case, and its state's and its batch's shapes."""
    settings = case.layout
    if case.model == GPT2:
        batch = 4 * settings.data * settings.microbatches
        made = decoder.train_step(
            gpt2.FAMILY, TINY, plan.ADAMW, settings, world, batch=batch, key=jax.random.key(0)
        )
        return made.train, (made.shapes, shape(batch, TINY.context + 1, dtype=jnp.int32))
    model = MODELS[case.model]
    rule = rules.first(
        *(rules.match(glob, spec) for glob, spec in split_of(model, settings).items()),
        rules.match("**", P()),
    )
    keep = {"blocks.**": (0, 1)} if model.stages else {}
    shares = rules.fsdp("data", size=settings.data, inside=rule, min_size=256, keep=keep)
    specs = rules.specs(eqx.filter_eval_shape(model.make), shares, world)
    grad, optimizer = grad_of(model, settings, specs)
    held = shares if settings.zero in (1, 2) else None
    planned = step.planned(
        model.make, ADAMW, shares if settings.zero == 3 else rule, world, optimizer_rule=held
    )
    train = step.make(grad, optimizer)
    train = mesh.spmd(
        train, mesh=world, in_specs=(planned.specs, P("data")), out_specs=(planned.specs, P())
    )
    return jax.jit(train, donate_argnums=0), (
        planned.shapes,
        model.batch(model.rows * settings.data * settings.microbatches),
    )


def split_of(model: Model, settings: Layout) -> Mapping[str, P]:
    """The specs of what tensor parallelism and the pipeline split."""
    split: Mapping[str, P] = model.split if settings.tensor > 1 else {}
    if settings.stage == 1:
        return split
    return {glob: P(None, "stage", *spec[2:]) for glob, spec in split.items()} or {
        "blocks.**": P(None, "stage")
    }


def grad_of(model: Model, settings: Layout, specs: Any) -> tuple[Any, Any]:
    """The gradient function and the optimizer of a layout, composed as a user would."""
    axis, data = ring("tensor") if settings.tensor > 1 else (), ring("data")

    def whole(model_, batch):
        return model.loss(model_, batch, axis)

    whole = jax.checkpoint(whole) if settings.remat == "block" else whole
    if settings.stage > 1:
        assert model.stages is not None
        embed, stage, head = model.stages
        table = schedule.one_f_one_b_lockstep(settings.stage, settings.microbatches)
        grad = pipeline.value_and_grad(embed, stage(axis), head, table, ring("stage"))
    else:
        grad = jax.value_and_grad(
            zero.gathered(whole, data, specs) if settings.zero == 3 else whole
        )
    parts = functools.partial(
        grads.accumulated, microbatches=settings.microbatches if settings.stage == 1 else 1
    )
    if settings.zero in (0, 3):
        return grads.averaged(parts(grad), data), ADAMW
    outside = (
        zero.reduce_scattered(parts(grad), data, specs)
        if settings.zero == 1
        else parts(zero.reduce_scattered(grad, data, specs))
    )
    return outside, zero.sharded(ADAMW, data, specs)


# Beside the program


class Beside(NamedTuple):
    """A traced step beside its compiled program.

    Attributes:
        operations: of products, traced and compiled.
        sent: bytes by axes, traced and compiled.
        arguments: bytes, traced and compiled.
        peak: bytes on a device at the fullest moment, traced and compiled.
    """

    operations: tuple[int, int]
    sent: tuple[dict, dict]
    arguments: tuple[int, int]
    peak: tuple[int, int]

    @property
    def equal(self) -> dict[str, bool]:
        """Which of what must be equal is."""
        return {name: a == b for name, (a, b) in self._asdict().items() if name != "peak"}

    @property
    def off(self) -> float:
        """How far the traced peak is from the compiled one, of that."""
        return self.peak[0] / self.peak[1] - 1


def beside(traced: plan.Trace, compiled: jax.stages.Compiled, world: Mesh) -> Beside:
    """The trace and the program of one step."""
    memory: Any = compiled.memory_analysis()
    sent: dict[tuple[str, ...], int] = {}
    for entry in certificate.read(compiled, world):
        sent[entry.axes] = sent.get(entry.axes, 0) + entry.bytes
    sent.pop((), None)
    held = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    return Beside(
        operations=(sum(traced.operations.values()), program_operations(compiled.as_text() or "")),
        sent=(traced.sent, sent),
        arguments=(traced.arguments, memory.argument_size_in_bytes),
        peak=(traced.peak, held),
    )


def program_operations(text: str) -> int:
    """Operations of the products of a compiled program, loops counted out."""
    program = hlo.module(text)
    costs = Costs(program, hardware.H100, 1)

    def inside(name, times):
        for line in program[name]:
            if line.opcode in ("while", "call", "conditional"):
                yield from (
                    each
                    for called, often in line.called
                    for each in inside(called, times * max(often, 1))
                )
            else:
                yield times * costs.operations(line)

    return sum(inside(program.entry, 1))


def read(case: Case, options: dict | None = None) -> Beside:
    """The case, traced and compiled on as many virtual devices."""
    options = QUICKLY if options is None else options
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.enable_x64(False),
    ):
        world = mesh.make(**case.layout.axes, devices=jax.devices()[: case.layout.devices])
        train, shapes = prepared(case, world)
        return beside(
            plan.trace(train, shapes, world, platform="cpu"),
            train.lower(*shapes).compile(options),
            world,
        )


def row(case: Case, found: Beside) -> dict[str, object]:
    """One line of the table."""
    told = {
        name: "equal" if same else "{} for {}".format(*getattr(found, name))
        for name, same in found.equal.items()
    }
    return {
        "family": case.family,
        "model": case.model,
        "layout": str(case.layout),
        **told,
        "peak kB": f"{found.peak[1] / 1e3:.1f}",
        "traced kB": f"{found.peak[0] / 1e3:.1f}",
        "off": f"{found.off:+.1%}",
    }


def summary(found: Sequence[tuple[Case, Beside]]) -> list[str]:
    """A line for each family, and one for what is equal."""
    lines = []
    for family in dict.fromkeys(case.family for case, _ in found):
        off = sorted(abs(each.off) for case, each in found if case.family == family)
        lines.append(
            f"{family}: {len(off)} layouts, peak off by {statistics.median(off):.1%} in the "
            f"median, {off[-1]:.1%} at worst"
        )
    same = {
        name: sum(each.equal[name] for _, each in found)
        for name in ("operations", "sent", "arguments")
    }
    return [
        *lines,
        f"of {len(found)}, equal: " + ", ".join(f"{name} {count}" for name, count in same.items()),
    ]


def main():
    arguments = parse()
    measure.virtual_devices(8)
    cases = drawn(arguments.count, arguments.seed)
    if arguments.picks:
        cases = [cases[int(pick)] for pick in arguments.picks.split(",")]
    found = []
    for case in cases:
        found.append((case, read(case)))
        print(
            f"{len(found)} of {len(cases)}: {' | '.join(map(str, row(*found[-1]).values()))}",
            flush=True,
        )
    print(f"\n{measure.table([row(*each) for each in found])}\n", *summary(found), sep="\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="layouts (60)")
    parser.add_argument("--seed", type=int, default=0, help="which are drawn (0)")
    parser.add_argument("--picks", help="only these of them, by number from 0: 3,17")
    return parser.parse_args()


if __name__ == "__main__":
    main()
