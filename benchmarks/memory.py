"""What a GPT-2 train step holds on each device, from the compiled program, beside what theory says.
Nothing is executed.

    python benchmarks/memory.py [--quick]
    python benchmarks/memory.py --train 3     # trains instead, and measures the process's memory

ZeRO's stages, what a block keeps for the backward pass under each choice of remat with and without
sequence parallelism, and the head's loss. All is in float32, under AdamW. See benchmarks/README.md
for the columns.
"""

import argparse
import math
import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import loss
import measure
import optax
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import corpus
from parallax import data, mesh, step
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.plan.recomputed import recomputed

SHIPPED = Path(__file__).resolve().parent.parent / "examples" / "data"
FLOAT = 4  # bytes


class Task(NamedTuple):
    """What is compiled."""

    config: gpt2.Config
    replicas: int
    stages: tuple[int, ...]  # of ZeRO
    short: int  # tokens of a window in which the activations weigh nothing
    splits: tuple[dict, ...]  # the layouts whose activations are read
    remat: tuple[str, ...]
    sequences: tuple[
        int, int
    ]  # a device's, at which activations are read: their difference is what one adds


SPLITS = ({}, {"tensor": 4}, {"tensor": 4, "sequence": True})
TINY = gpt2.Config(layers=2, heads=4, width=64, context=64, vocabulary=500)
USUAL = Task(
    gpt2.SMALL,
    8,
    (0, 1, 2, 3),
    16,
    SPLITS,
    ("none", "gathers", "attention", "products", "block"),
    (4, 8),
)
QUICK = Task(TINY, 2, (1,), 4, SPLITS[2:], ("block",), (4, 8))
# Of the machine code, not of the program: how memory is assigned does not depend on it.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def main():
    arguments = parse()
    measure.virtual_devices(8)
    if arguments.train:
        return train(arguments.train, arguments.batch, arguments.remat)
    task = QUICK if arguments.quick else USUAL
    config = task.config
    print(
        f"GPT-2 of {config.layers} layers, width {config.width}: {config.parameters / 1e6:.1f} M "
        f"parameters and {config.rows - config.vocabulary} rows of padding, float32, AdamW, "
        f"windows of {config.context} tokens. MB are 10^6 bytes on each device.\n"
    )
    print(f"ZeRO over data {task.replicas}: two microbatches of one sequence, remat 'block'\n")
    print(measure.table([stage(task, zero) for zero in task.stages]), "\n")
    print("What a further sequence on a device adds to the step's temporaries\n")
    print(measure.table([activations(task, layout) for layout in layouts(task)]), "\n")
    print(f"The head's loss and its gradients, 8 x {config.context} tokens on one device\n")
    print(measure.table(heads(config, 8)))


def compiled(
    config: gpt2.Config, layout: Layout, batch: int, tokens: int
) -> tuple[step.State, jax.stages.Compiled]:
    """The state's shapes and the compiled train step of `batch` sequences of `tokens`."""
    mesh_ = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    prepared = decoder.train_step(
        gpt2.FAMILY, config, optax.adamw(3e-4), layout, mesh_, batch=batch, key=jax.random.key(0)
    )
    windows = jax.ShapeDtypeStruct(
        (batch, tokens + 1), jnp.int32, sharding=mesh.shardings(P("data"), mesh_)
    )
    return prepared.shapes, prepared.train.lower(prepared.shapes, windows).compile(QUICKLY)


def held(tree) -> int:
    """The bytes of `tree`'s blocks on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def weights(config: gpt2.Config) -> tuple[int, int]:
    """Bytes of the blocks' parameters, and of the rest with its padding."""
    blocks = config.layers * (12 * config.width**2 + 13 * config.width)
    return FLOAT * blocks, FLOAT * (
        (config.rows + config.context) * config.width + 2 * config.width
    )


def stage(task: Task, zero: int) -> dict[str, object]:
    """One line of the first table."""
    config, n = task.config, task.replicas
    layout = Layout(data=n, zero=zero, microbatches=2, remat="block")
    state, short = compiled(config, layout, 2 * n, task.short)
    _, whole = compiled(config, layout, 2 * n, config.context)
    blocks, rest = weights(config)
    both = blocks + rest
    # The sum, and beside it the gradient of one microbatch. ZeRO-3 scatters the blocks' layer by
    # layer, the rest at the end.
    gradients = 2 * (blocks / n + rest) if zero == 3 else both + both / layout.gradient_shards
    memory = whole.memory_analysis()
    return {
        "zero": zero,
        "parameters (theory)": pair(held(state.model), both / layout.parameter_shards),
        "optimizer (theory)": pair(held(state.optimizer), 2 * both / layout.optimizer_shards),
        "arguments": megabytes(memory.argument_size_in_bytes),
        "gradients (theory)": megabytes(gradients),
        f"temporaries, {task.short} tokens": megabytes(measure.temporary(short)),
        f"temporaries, {config.context} tokens": megabytes(memory.temp_size_in_bytes),
        "all": megabytes(memory.argument_size_in_bytes + memory.temp_size_in_bytes),
    }


def layouts(task: Task) -> list[Layout]:
    """Each way to split a layer, with each remat that it admits."""
    found = []
    for sizes in task.splits:
        found += [
            Layout(**sizes, remat=remat)
            for remat in task.remat
            if Layout.admits(**sizes, remat=remat)
        ]
    return found


def kept(config: gpt2.Config, layout: Layout, tokens: int) -> float:
    """Bytes that the layers keep of one sequence, by Korthikanti et al. (arXiv 2205.05198), in
    float32 and without dropout.

    In [T, D] elements a layer: two norms' inputs, the inputs of the column-parallel products (2, of
    all tokens), q, k, v, what attention gives, and the feed-forward's hidden units twice (12, over
    the tensor axis); and the softmax, [H, T, T].
    """
    t, T, own, again = layout.tensor, tokens, layout.token_shards, recomputed(layout)
    if (
        again.keeps == "products"
    ):  # the input, qkv, attention's output, up; nothing needs the output of down
        elements = 1 / own + 3 / t + 1 + 4 / t
    elif again.keeps == "inputs":
        elements = 1 / own
    else:
        elements = 2 / own + 2 / (1 if again.keeps_gathered else own) + 12 / t
    softmax = again.keeps_scores * config.heads * T * T / t
    return FLOAT * config.layers * (elements * T * config.width + softmax)


def activations(task: Task, layout: Layout) -> dict[str, object]:
    """One line of the second table."""
    config, (few, many) = task.config, task.sequences
    low, high = (
        measure.temporary(compiled(config, layout, batch, config.context)[1])
        for batch in (few, many)
    )
    where = f"tensor {layout.tensor}" if layout.tensor > 1 else "one device"
    return {
        "over": where + (", sequence" if layout.sequence else ""),
        "remat": layout.remat,
        "kept MB a sequence (theory)": megabytes(kept(config, layout, config.context)),
        "compiled MB a sequence": megabytes((high - low) / (many - few)),
        f"temporaries of {many}": megabytes(high),
    }


def heads(config: gpt2.Config, batch: int) -> list[dict[str, object]]:
    """The third table."""
    B, T, V, D = batch, config.context, config.rows, config.width
    x, table = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((B, T, D), (V, D)))
    targets = jax.ShapeDtypeStruct((B, T), jnp.int32)
    theory = {"plain logits": 2 * B * T * V, "blocks of 512 tokens": 512 * V + V * D + B * T * D}
    rivals = {"plain logits": loss.plain, "blocks of 512 tokens": loss.blocked(512)}
    return [
        {
            "loss": name,
            "theory MB": megabytes(FLOAT * theory[name]),
            "temporaries MB": megabytes(
                measure.temporary(
                    jax.jit(jax.value_and_grad(rival, argnums=(0, 1)))
                    .lower(x, table, targets)
                    .compile(QUICKLY)
                )
            ),
        }
        for name, rival in rivals.items()
    ]


def train(steps: int, batch: int, remat: str):
    """Train GPT-2 small over data 2 x stage 2 x tensor 2 with ZeRO-1 on real text, and print what
    the process needed."""
    layout = Layout(data=2, stage=2, tensor=2, zero=1, microbatches=batch // 2, remat=remat)
    mesh_ = mesh.make(**layout.axes)
    tokens = corpus.encode_file(
        SHIPPED / "state_of_the_union.txt", corpus.gpt2_tokenizer(SHIPPED / "gpt2.tiktoken")
    )
    prepared = decoder.train_step(
        gpt2.FAMILY,
        gpt2.SMALL,
        optax.adamw(3e-4),
        layout,
        mesh_,
        batch=batch,
        key=jax.random.key(0),
    )
    shape = (batch, gpt2.SMALL.context + 1)
    placed = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=mesh.shardings(P("data"), mesh_))
    program = prepared.train.lower(prepared.shapes, placed).compile()
    memory, before = program.memory_analysis(), peak()
    print(
        f"{layout}\n{batch} x {gpt2.SMALL.context} tokens a step. Compiled, a device: arguments "
        f"{megabytes(memory.argument_size_in_bytes)} MB, temporaries "
        f"{megabytes(memory.temp_size_in_bytes)} MB; eight devices: "
        f"{8 * (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / 1e9:.2f} GB. The "
        f"process so far: {before:.2f} GB",
        flush=True,
    )
    state = jax.block_until_ready(prepared.init())
    print(f"The state is made; the process's peak: {peak():.2f} GB", flush=True)
    for i in range(steps):
        start = time.perf_counter()
        windows = data.batch(tokens, seed=0, step=i, size=batch, length=gpt2.SMALL.context)
        state, info = jax.block_until_ready(program(state, mesh.place(windows, P("data"), mesh_)))
        print(
            f"step {i}: loss {info.loss:.4f}, {time.perf_counter() - start:.0f} s, peak "
            f"{peak():.2f} GB",
            flush=True,
        )


def peak() -> float:
    """The most memory that this process has had, in 10^9 bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9


def megabytes(count: float) -> str:
    """Bytes in 10^6."""
    return f"{count / measure.MB:.1f}"


def pair(measured: float, theory: float) -> str:
    """Both, in 10^6 bytes."""
    return f"{measured / measure.MB:.1f} ({theory / measure.MB:.1f})"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model in some seconds, to see that it works"
    )
    parser.add_argument(
        "--train", type=int, metavar="STEPS", help="train GPT-2 small on eight devices instead"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=8,
        help="sequences in a step of --train (8); half of them microbatches",
    )
    parser.add_argument("--remat", default="products", help="that of --train (products)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
