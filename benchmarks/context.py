"""Attention over split tokens against one device: time, memory, bytes and work, of value and
gradients.

    python benchmarks/context.py [--quick] [--devices 4] [--tokens 2048 4096]
    python benchmarks/context.py --target v5e:2x4 [--tokens 16384]
        # compiled for devices that are not there

The devices are virtual and share the machine's cores, so times say how much work is done, and not
how fast it would be on devices of their own. Programs for a target are compiled by its own
compiler, and their time is estimated (`compiled.timeline`). See benchmarks/README.md for the
columns.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import measure
import numpy as np
from jax.sharding import PartitionSpec as P

from parallax import context, mesh
from parallax.compiled import targets
from parallax.models import documents

HEADS, GROUPS, WIDTH = 8, 2, 64
PLAIN = 8192  # tokens; beyond them T x T scores of all heads take gigabytes


def rivals(n: int, tiles: context.Kernel):
    """Each way's function inside the mesh, the devices and the order that it needs, and the share
    of needed work it computes."""
    on_one = functools.partial(context.blockwise, kernel=tiles)

    def blocks(order):
        return (
            context.block_pairs(order, n).blocks
            / context.chunk_table(order, n).shape[1] ** 2
            / n
            * 2
        )

    def ring(order):
        return functools.partial(context.attention, axis="context", order=order, kernel=tiles)

    return {
        "jax.nn": (functools.partial(jax.nn.dot_product_attention, is_causal=True), 1, None, 2.0),
        "one device": (on_one, 1, None, 2.0),
        "zigzag": (ring(context.zigzag), n, context.zigzag, blocks(context.zigzag)),
        "contiguous": (ring(context.contiguous), n, context.contiguous, blocks(context.contiguous)),
        "ulysses": (context.ulysses(on_one, "context"), n, context.zigzag, 2.0),
        "gathered": (context.gathered(on_one, "context"), n, context.zigzag, 2.0),
    }


def foretold(name: str, n: int, tokens: int, size: int = 4) -> float:
    """Bytes that a device receives, forward and backward, for numbers of `size` bytes."""
    each = tokens // n * WIDTH * size
    if name in ("zigzag", "contiguous"):
        return (
            (n - 1) * (4 + 2 * 4 / size) * GROUPS * each
        )  # keys and values twice, and their gradients in float32
    if name == "gathered":
        return (
            (n * 2 + 2) * GROUPS * each
        )  # results: gathered whole, and one share of what is scattered
    if name == "ulysses":
        copies = next(
            c
            for c in range(1, HEADS // GROUPS + 1)
            if HEADS // GROUPS % c == 0 and c * GROUPS % n == 0
        )
        return 2 * (2 * HEADS + 2 * GROUPS * copies) * each
    return 0.0


SPEC = P(None, "context")


def value_and_gradients(attend, over):
    """The function to compile, of the queries, keys and values of one sequence."""

    def body(q, k, v):
        out, transposed = jax.vjp(attend, q, k, v)
        return out, transposed(out)

    return jax.jit(mesh.spmd(body, mesh=over, in_specs=SPEC, out_specs=SPEC))


def program(attend, n: int, order, tokens: int):
    """The compiled value and gradients of one sequence, and its arrays."""
    over = mesh.make(context=n, devices=jax.devices()[:n])

    def normal(i, heads):
        return jax.random.normal(jax.random.key(i), (1, tokens, heads, WIDTH))

    arrays = normal(0, HEADS), normal(1, GROUPS), normal(2, GROUPS)
    placed = mesh.place(
        arrays if order is None else [context.split(x, n, order=order) for x in arrays], SPEC, over
    )
    return value_and_gradients(attend, over).lower(*placed).compile(), placed


def compiled_for(name: str, tokens: int, block: int) -> str:
    """A table of the programs that a target's compiler makes, in bfloat16: nothing runs."""
    there, lines = targets.target(name), []
    n = len(there.devices)
    for way, (attend, over, _, work) in rivals(n, context.tiled(block)).items():
        if way == "jax.nn":
            continue
        world = mesh.make(context=over, devices=there.devices[:over])
        split = mesh.shardings(SPEC, world)
        arrays = [
            jax.ShapeDtypeStruct((1, tokens, h, WIDTH), jnp.bfloat16, sharding=split)
            for h in (HEADS, GROUPS, GROUPS)
        ]
        found = targets.compile(value_and_gradients(attend, world), *arrays, target=there)
        sent, times = sum(entry.bytes for entry in found.certificate()), found.timeline()
        lines.append(
            {
                "attention": way,
                "work (predicted)": f"{work:.3f}",
                "estimated ms": measure.milliseconds(times.seconds),
                "of them waiting": measure.milliseconds(times.exposed),
                "waiting, links at half": measure.milliseconds(times.at_speed[0.5] - times.compute),
                "temporary MB": f"{found.memory['temporaries'] / measure.MB:.1f}",
                "predicted MB moved": f"{foretold(way, over, tokens, size=2) / measure.MB:.2f}",
                "MB moved": f"{sent / measure.MB:.2f}",
                "conditionals": str(found.text.count(" conditional(")),
            }
        )
        print(f"{way}: compiled", flush=True)
    sizes = (
        f"1 sequence of {tokens:,} tokens, {HEADS} heads of {WIDTH}, {GROUPS} of keys, bfloat16, "
        f"tiles of {block}"
    )
    return f"{there.name}, {sizes}: value and gradients, compiled.\n\n{measure.table(lines)}"


def main():
    arguments = parse()
    if arguments.target:
        jax.config.update("jax_platforms", "cpu")
        print(
            *(
                compiled_for(arguments.target, tokens, arguments.block)
                for tokens in arguments.tokens
            ),
            sep="\n\n",
        )
        return
    n = arguments.devices
    measure.virtual_devices(n)
    lines = []
    for tokens in arguments.tokens:
        ways = rivals(n, context.tiled(arguments.block))
        if tokens > PLAIN:
            del ways["jax.nn"]
        made = {
            name: program(attend, over, order, tokens)
            for name, (attend, over, order, _) in ways.items()
        }
        runs = {
            name: functools.partial(compiled, *arrays) for name, (compiled, arrays) in made.items()
        }
        check(
            {
                name: (jax.block_until_ready(run())[0], *ways[name][1:3])
                for name, run in runs.items()
            }
        )
        times = measure.medians(measure.interleaved(runs, rounds=arguments.rounds))
        for name, (compiled, _) in made.items():
            sent = sum(each.bytes for each in measure.collectives(compiled).values())
            lines.append(
                {
                    "T": f"{tokens:,}",
                    "attention": name,
                    "work (predicted)": f"{ways[name][3]:.3f}",
                    "ms": measure.milliseconds(times[name]),
                    "time to one device": f"{times[name] / times['one device']:.2f}",
                    "temporary MB": f"{measure.temporary(compiled) / measure.MB:.1f}",
                    "predicted MB moved": f"{foretold(name, n, tokens) / measure.MB:.2f}",
                    "MB moved": f"{sent / measure.MB:.2f}",
                }
            )
    print(
        f"{n} devices of one process, 1 sequence, {HEADS} heads of {WIDTH}, {GROUPS} of keys, "
        f"float32, tiles of {arguments.block}: value and gradients.\n"
    )
    print(measure.table(lines))
    print(
        "\nMasked by the cuts of documents, of the pairs that are computed: "
        + ", ".join(map(masked, arguments.tokens))
    )


def masked(tokens: int) -> str:
    """The share of pairs of a sequence that cross a cut between documents, of 8 and of 64 with cuts
    drawn evenly."""
    shares = []
    for count in (8, 64):
        cuts = np.random.default_rng(0).integers(1, tokens, (100, count - 1))
        numbers = np.stack(
            [np.searchsorted(np.sort(row), np.arange(tokens), side="right") for row in cuts]
        )
        shares.append(f"{1 - documents.visible_share(numbers):.0%} of {count} documents")
    return f"T = {tokens:,}: {' and '.join(shares)}"


def check(results):
    """Raise where a way's result is another than one device's."""
    expected, *_ = results["one device"]
    for name, (out, n, order) in results.items():
        whole = out if order is None else context.unsplit(out, n, order=order)
        error = float(jnp.max(jnp.abs(jax.device_get(whole) - jax.device_get(expected))))
        if not error < 1e-4:
            raise AssertionError(f"{name}: the result differs by {error} from one device's.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few tokens, to see that it runs")
    parser.add_argument(
        "--target", help="compile for this one, such as v5e:2x4 or '8 x h100', and run nothing"
    )
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--block", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.block = [256], 32
    return arguments


if __name__ == "__main__":
    main()
