"""A mixture of experts: what runs the experts on one device, and what each way of bringing tokens
to them sends over many.

    python benchmarks/experts.py [--quick]

First table: one device, blocks of sorted rows beside `lax.ragged_dot` and all experts on all
tokens, value and gradients. Second table: eight devices, bytes by formula beside those in the
compiled program, for k choices of a token. An all-to-all pays where a token has fewer choices,
times the capacity, than there are devices. See benchmarks/README.md for the columns.
"""

import argparse
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import measure
from jax import lax
from jax.sharding import PartitionSpec as P

from parallax import experts, mesh
from parallax.collectives import ring
from parallax.collectives.types import varying
from parallax.compiled import certificate

SIZES = {
    "quick": (256, 32, 48, 4),
    "usual": (4096, 256, 512, 16),
}  # tokens, width, hidden width, experts of the first table
DEVICES, COUNT, TOKENS, WIDTH = 8, 16, 256, 64  # of the second: tokens on a device


def main():
    arguments = parse()
    measure.virtual_devices(DEVICES)
    products(*SIZES[arguments.size], rounds=arguments.rounds)
    dispatches(rounds=arguments.rounds)


def by_ragged_dot(w, x, source, ids, weights):
    """`Compute` by `lax.ragged_dot` over all pairs, sorted by expert; it knows one kind of
    expert."""
    order = jnp.argsort(ids, stable=True)
    sizes = jnp.bincount(ids, length=len(w.gate)).astype(jnp.int32)
    product = functools.partial(lax.ragged_dot, group_sizes=sizes)
    rows = x[source[order]]
    made = (
        product(jax.nn.silu(product(rows, w.gate)) * product(rows, w.up), w.down)
        * weights[order][:, None]
    )
    return jnp.zeros_like(x).at[source[order]].add(made)


def all_of_all(w, x, source, ids, weights):
    """`Compute` of every expert on every row, and a mask."""
    share = jnp.zeros((len(x), len(w.gate)), x.dtype).at[source, ids].add(weights)
    gate, up = (jnp.einsum("nd,edf->enf", x, matrix) for matrix in (w.gate, w.up))
    return jnp.einsum("enf,efd,ne->nd", jax.nn.silu(gate) * up, w.down, share)


def products(tokens: int, width: int, hidden: int, count: int, *, rounds: int, k: int = 2) -> None:
    w = experts.Mixture(
        jax.random.normal(jax.random.key(0), (width, count)), gated(count, width, hidden)
    )
    x = jax.random.normal(jax.random.key(2), (1, tokens, width))

    def loss(w, x, compute):
        y, _ = experts.moe(x, w, (), route=experts.top_k(k), compute=compute)
        return jnp.mean(y**2)

    rivals = {f"blocks of {size}": experts.grouped(size=size) for size in (64, 128, 256, 512)}
    rivals |= {"lax.ragged_dot": by_ragged_dot, "all experts on all": all_of_all}

    def compiled(compute):
        return (
            jax.jit(jax.value_and_grad(functools.partial(loss, compute=compute)))
            .lower(w, x)
            .compile()
        )

    programs = {name: compiled(compute) for name, compute in rivals.items()}
    expected = programs["all experts on all"](w, x)[1]
    apart = {name: distance(program(w, x)[1], expected) for name, program in programs.items()}
    product, operations = measure.matrix_product()
    runs = {name: functools.partial(program, w, x) for name, program in programs.items()}
    seconds = measure.interleaved(runs | {"matrix": product}, rounds=rounds)
    rate = operations / min(seconds.pop("matrix"))
    unit = (
        6 * width * hidden * tokens * k
    )  # three products of two operations, for each pair, once forward
    print(
        f"{tokens} tokens of width {width}, {k} of {count} experts of hidden width {hidden}, one "
        f"device, value and gradients. Three units of products are {3 * unit / 1e9:.2f} GFLOP, "
        f"{3e3 * unit / rate:.1f} ms at the matrix rate; blocks take four.\n"
    )
    units = {name: 4 if name.startswith("blocks") else 3 for name in programs}
    times, lines = measure.medians(seconds), []
    for name, program in programs.items():
        all_pairs = 1 if name != "all experts on all" else count / k
        lines.append(
            {
                "products": name,
                "GFLOP": f"{units[name] * unit * all_pairs / 1e9:.2f}",
                "ms": measure.milliseconds(times[name]),
                "to blocks of 128": f"{times[name] / times['blocks of 128']:.2f}",
                "of matrix rate": f"{3 * unit / times[name] / rate:.0%}",
                "temporary MB": f"{measure.temporary(program) / measure.MB:.1f}",
                "gradients differ by": f"{apart[name]:.0e}",
            }
        )
    print(measure.table(lines))


def dispatches(*, rounds: int) -> None:
    world = mesh.make(data=DEVICES)
    w = experts.Mixture(
        jax.random.normal(jax.random.key(0), (WIDTH, COUNT)), gated(COUNT, WIDTH, WIDTH)
    )
    x = jax.random.normal(jax.random.key(2), (DEVICES, TOKENS, WIDTH))
    specs = eqx.tree_at(
        lambda w: w.experts,
        jax.tree.map(lambda _: P(), w),
        jax.tree.map(lambda _: P("data"), w.experts),
    )
    ways = {
        "gathered": experts.gathered,
        "exchanged, 1": experts.exchanged(1.0),
        "exchanged, all": experts.exchanged(math.inf),
    }
    lines = []
    for k in (1, 2, 4, 8, 16):
        programs, dropped = {}, {}
        for name, dispatch in ways.items():

            def layer(w, x, k=k, dispatch=dispatch):
                y, told = experts.moe(x, w, ring("data"), route=experts.top_k(k), dispatch=dispatch)
                return y, varying(told.dropped, "data")[None]

            run = jax.jit(
                mesh.spmd(layer, mesh=world, in_specs=(specs, P("data")), out_specs=P("data"))
            )
            programs[name] = run.lower(w, x).compile()
            dropped[name] = float(jnp.mean(programs[name](w, x)[1]))
        seconds = measure.medians(
            measure.interleaved(
                {name: functools.partial(p, w, x) for name, p in programs.items()}, rounds=rounds
            )
        )
        gather = experts.gathered.sent(TOKENS, WIDTH, k=k, experts=COUNT, n=DEVICES, itemsize=4)
        for name, dispatch in ways.items():
            sent = dispatch.sent(TOKENS, WIDTH, k=k, experts=COUNT, n=DEVICES, itemsize=4)
            entries = certificate.read(programs[name], world)
            lines.append(
                {
                    "k": str(k),
                    "dispatch": name,
                    "out, formula": f"{sent.out:,}",
                    "in all, formula": f"{sum(sent):,}",
                    "in the program": f"{sum(entry.bytes for entry in entries):,}",
                    "to gathered": f"{sum(sent) / sum(gather):.2f}",
                    "dropped": f"{dropped[name] / (TOKENS * k):.1%}",
                    "ms": measure.milliseconds(seconds[name]),
                }
            )
    print(
        f"\n{DEVICES} devices, {TOKENS} tokens of width {WIDTH} on each, {COUNT} experts, one "
        "layer forward, float32: bytes that a device sends. A gather sends (n - 1) T D each way, "
        f"an all-to-all of capacity c sends c k (n - 1)/n T D: it pays where c k < n = {DEVICES}.\n"
    )
    print(measure.table(lines))


def gated(count: int, width: int, hidden: int) -> experts.Gated:
    return experts.Gated(count, width, hidden, key=jax.random.key(1))


def distance(tree, expected) -> float:
    """The largest difference, to the largest number of the same leaf."""
    apart = jax.tree.map(
        lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))), tree, expected
    )
    return max(jax.tree.leaves(apart))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick",
        dest="size",
        action="store_const",
        const="quick",
        default="usual",
        help="to see that it works",
    )
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
