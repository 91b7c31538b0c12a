"""The loss of a head with the logits all at once, and a block of tokens at a time: memory and time,
value and gradients.

    python benchmarks/loss.py [--quick | --full] [--dtype float64]

Both run on one device, in turn. See benchmarks/README.md for the columns.
"""

import argparse
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import measure

from parallax import cross_entropy, tensor

SIZES = {  # batch, tokens, vocabulary, width
    "quick": (2, 64, 509, 64),
    "usual": (4, 512, 12565, 768),
    "full": (8, 1024, 50257, 768),
}


class Task(NamedTuple):
    """The head's input [B, T, D], its table [V, D], and its targets [B, T]."""

    x: jax.Array
    table: jax.Array
    targets: jax.Array


def plain(x, table, targets):
    """The mean loss, by way of all logits."""
    return jnp.mean(tensor.cross_entropy(x @ table.T, targets, ()))


def blocked(block_tokens: int):
    """The mean loss, by way of those of `block_tokens` tokens at a time."""
    return functools.partial(cross_entropy.mean, axis=(), block_tokens=block_tokens)


def main():
    arguments = parse()
    measure.virtual_devices(1)
    jax.config.update("jax_enable_x64", arguments.dtype == "float64")
    B, T, V, D = SIZES[arguments.size]
    task = make_task(B, T, V, D, jnp.dtype(arguments.dtype))
    rivals = {"plain": plain} | {
        f"blocks of {tokens}": blocked(tokens) for tokens in arguments.blocks
    }
    programs = {
        name: jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*task).compile()
        for name, loss in rivals.items()
    }
    expected = programs["plain"](*task)
    distances = {name: distance(program(*task), expected) for name, program in programs.items()}
    del expected
    product, operations = measure.matrix_product()
    runs = {name: functools.partial(program, *task) for name, program in programs.items()}
    seconds = measure.interleaved(runs | {"matrix": product}, rounds=arguments.rounds)

    size = task.x.dtype.itemsize
    rate = operations / min(seconds.pop("matrix")) * 4 / size  # the product is in float32
    held = {"plain": 2 * B * T * V * size}  # logits and softmax
    held |= {f"blocks of {t}": (t * V + V * D + B * T * D) * size for t in arguments.blocks}
    print(
        f"{B} x {T} tokens, vocabulary {V}, width {D}, {arguments.dtype}: value and gradients. "
        f"Three products are {6 * B * T * V * D / 1e9:.0f} GFLOP; at the machine's matrix rate, "
        f"{rate / 1e9:.0f} GFLOP/s, they take {6e3 * B * T * V * D / rate:.0f} ms.\n"
    )
    times, lines = measure.medians(seconds), []
    least = measure.temporary(programs["plain"])
    for name, program in programs.items():
        temporary = measure.temporary(program)
        lines.append(
            {
                "loss": name,
                "predicted MB": f"{held[name] / measure.MB:.1f}",
                "temporary MB": f"{temporary / measure.MB:.1f}",
                "to plain": f"{temporary / least:.3f}",
                "ms": measure.milliseconds(times[name]),
                "time to plain": f"{times[name] / times['plain']:.2f}",
                "of matrix rate": f"{6 * B * T * V * D / times[name] / rate:.0%}",
                "gradients differ by": f"{distances[name]:.1e}",
            }
        )
    print(measure.table(lines))


def make_task(B: int, T: int, V: int, D: int, dtype: jnp.dtype) -> Task:
    """Like a norm's output and a fresh embedding."""
    keys = jax.random.split(jax.random.key(0), 3)
    return Task(
        jax.random.normal(keys[0], (B, T, D), dtype),
        0.02 * jax.random.normal(keys[1], (V, D), dtype),
        jax.random.randint(keys[2], (B, T), 0, V),
    )


def distance(result, expected) -> float:
    """The largest difference of gradients, to the largest number in the expected one."""
    pairs = zip(result[1], expected[1], strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--quick",
        dest="size",
        action="store_const",
        const="quick",
        help="some seconds, to see that it works",
    )
    which.add_argument(
        "--full",
        dest="size",
        action="store_const",
        const="full",
        help="GPT-2's 8 x 1024 tokens and 50,257 words",
    )
    parser.set_defaults(size="usual")
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[256, 512, 1024], help="tokens in a block"
    )
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
