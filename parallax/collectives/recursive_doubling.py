"""Recursive doubling with the whole vector: the fewest hops an all-reduce can have, for messages that cost nothing but hops.

n devices, p the greatest power of two not above n, S the bytes of the array on one device:

| function | bytes a device sends, at most | hops | transpose |
|---|---|---|---|
| `all_reduce` | log2 p S, and 2 S more unless n = p | log2 p, and 2 more unless n = p | the cotangent as it is, free |

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH (2005).
"""

from typing import TypeVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from parallax._typing import PyTree
from parallax.collectives import types
from parallax.collectives.axis import Algorithm, refused
from parallax.collectives.cost import Message, Round, devices, priced
from parallax.collectives.execute import pin_bits
from parallax.collectives.from_table import all_reduce
from parallax.collectives.permute import send
from parallax.collectives.types import AxisName

Tree = TypeVar("Tree", bound=PyTree)


def _hops(n: int) -> list[list[tuple[int, int]]]:
    """Who sends to whom, hop by hop: those beyond a power of two to the front, the exchanges, and back."""
    count = n.bit_length() - 1
    folded = [(i, i - 2**count) for i in range(2**count, n)]
    exchanges = [[(i, i ^ 2**k) for i in range(2**count)] for k in range(count)]
    return [folded, *exchanges, [(j, i) for i, j in folded]] if folded else exchanges


def _messages(size, n, itemsize):
    hops, folded = _hops(devices(n)), devices(n) & (devices(n) - 1)
    added = [True] * (len(hops) - 1) + [not folded]
    sent = size * itemsize
    steps = [(pairs[0][1] - pairs[0][0],) for pairs in hops]
    return [
        Round(1, (Message(sent, step),), sent * adds)
        for step, adds in zip(steps, added, strict=False)
    ]


@priced(_messages, "doubling.all_reduce")
def _all_reduce(x: Tree, axis_name: AxisName) -> Tree:
    """The sum over devices, on every device, the same bits: `A {U_X} -> A`. The twin of `lax.psum`, for small arrays.

    In hop k device i exchanges its sum with device i ^ 2^k: log2 n hops of all of `x`. Both add the same two numbers, and
    a + b is b + a to the last bit, so all devices end with the same bits. Unless n is a power of two, the n - p devices beyond
    the last one first add theirs into the devices at the front, and are told the result in the end: 2 hops more. (Without
    folding, as in `halving`, it takes a hop less, but each device would add in an order of its own.) Its transpose costs nothing.
    It is no `Route`: a sum that both keep and send is counted more than once.
    """
    return all_reduce(x, axis_name, _total)


def _total(x: Shaped[Array, "*dims"], axis_name: AxisName) -> Shaped[Array, "*dims"]:
    n = types.axis_size(axis_name)
    x = pin_bits(x)  # the sums after it are the same, however often they are computed
    hops = _hops(n)
    if n & (n - 1):
        folded, *hops, told = hops
        x = x + send(x, axis_name, folded)
    for pairs in hops:
        x = _as_sent(x) + send(x, axis_name, pairs)
    if n & (n - 1):
        x = jnp.where(types.axis_index(axis_name) < told[0][1], x, send(x, axis_name, told))
    return x


def _as_sent(x):
    """`x` in no more precision than its type has: XLA may keep the sum of 16-bit floats in 32 bits, and sends 16."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    kind = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)


doubling = Algorithm(
    "doubling",
    _all_reduce,
    reduce_scatter=refused("doubling", "reduce_scatter", "halving"),
    all_gather=refused("doubling", "all_gather", "halving"),
)
