"""Recursive doubling with the whole array in each message: an all-reduce in few hops.

Recursive doubling suits small arrays, whose time depends only on the number of hops. Legend: n is
the number of devices, p the greatest power of two not above n, and S the bytes of the array on one
device. `A {U_X} -> A`: before, each device on axis X has one term of a sum; after, each has the
sum.

| function | bytes a device sends, at most | hops | transpose sends |
|---|---|---|---|
| `all_reduce` | S log2 p, and 2 S more unless n = p | log2 p, and 2 more unless n = p | nothing |

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH
(2005).
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
from parallax.collectives.from_table import all_reduce_leaves
from parallax.collectives.permute import send
from parallax.collectives.types import AxisName

Tree = TypeVar("Tree", bound=PyTree)


def _hops_of(n: int) -> list[list[tuple[int, int]]]:
    """Returns the pairs (sender, receiver) of each hop.

    Let n be the number of devices, and p the greatest power of two not above n. In hop k each of
    the first p devices exchanges sums with the device whose number differs in bit k. Unless n = p,
    there are two more hops. In the first hop, each device p + i sends its term to device i; in the
    last hop, device i sends the result to device p + i.
    """
    count = n.bit_length() - 1  # p = 2**count is the greatest power of two not above n
    folded = [(i, i - 2**count) for i in range(2**count, n)]
    exchanges = [[(i, i ^ 2**k) for i in range(2**count)] for k in range(count)]
    return [folded, *exchanges, [(j, i) for i, j in folded]] if folded else exchanges


def _messages(size, n, itemsize):
    """Returns the rounds of `_all_reduce`, for `cost`: each message carries all `size` numbers.

    `n` is a number of devices, or a tuple with the number on each of several axes; `devices(n)` is
    the number of all devices. `itemsize` is the bytes of one number.
    """
    hops, nbytes = _hops_of(devices(n)), size * itemsize
    # Not 0 unless n is a power of two. If not 0, the first hop folds the terms of the devices p,
    # p + 1, ... into the first devices.
    is_folded = devices(n) & (devices(n) - 1)
    rounds = []
    for number, pairs in enumerate(hops):
        # Unless n is a power of two, the last hop only hands out the result, and adds nothing.
        adds = not (is_folded and number == len(hops) - 1)
        # All pairs of a hop are equally far apart, so the first pair gives the distance. A step
        # has one dim, since the devices of several axes count as one row.
        step = (pairs[0][1] - pairs[0][0],)
        # One round of one message; `reduced` is the bytes that its receiver adds.
        rounds.append(Round(times=1, messages=(Message(nbytes, step),), reduced=nbytes * adds))
    return rounds


@priced(_messages, "doubling.all_reduce")
def _all_reduce(x: Tree, axis_name: AxisName) -> Tree:
    """Returns the sum over devices, on every device: `A {U_X} -> A`. It suits small arrays.

    n is the number of devices, and p the greatest power of two not above n. The first p devices
    exchange partial sums, arrays like `x`, in log2 p hops. In hop k the partner of device i is
    device i XOR 2**k. Partners add the same two sums, and a + b equals b + a to the last bit, so
    all devices end with the same bits. Unless n = p, there are 2 more hops. In the first hop, each
    device p + i sends its term to device i; in the last hop, device i sends the result back.
    The transpose sends nothing: the cotangent of the sum is already the same on all devices. No
    table of messages (`Route`) describes this algorithm: in a table a device sends each block away,
    but here both partners keep their sum.
    """
    return all_reduce_leaves(x, axis_name, _total)


def _total(x: Shaped[Array, "*dims"], axis_name: AxisName) -> Shaped[Array, "*dims"]:
    """Returns the sum of one array over the devices, on every device."""
    n = types.axis_size(axis_name)
    # XLA may compute a sum more than once. `pin_bits` fixes this device's term, so each time the
    # sum has the same bits.
    x = pin_bits(x)
    hops, return_pairs = _hops_of(n), []
    # If n is no power of two, the first hop adds the last devices' terms to the first devices (the
    # other devices receive zeros), and the last hop sends the result back.
    if n & (n - 1):
        fold_pairs, *hops, return_pairs = hops
        x = x + send(x, axis_name, fold_pairs)
    for pairs in hops:
        # `_as_sent` is `x` as the partner receives it, so that both add the same two numbers.
        x = _as_sent(x) + send(x, axis_name, pairs)
    if return_pairs:
        # The last hop gives the result to the devices p, p + 1, ...; the first receiver is p. A
        # `ppermute` gives zeros to all other devices, so these keep their own sum, as sent.
        first_folded = return_pairs[0][1]
        is_exchanging = types.axis_index(axis_name) < first_folded
        x = jnp.where(is_exchanging, _as_sent(x), send(x, axis_name, return_pairs))
    return x


def _as_sent(x):
    """Returns `x` rounded to the precision of its type, as the device to which `x` is sent receives
    it.

    XLA may keep a sum of 16-bit floats in 32 bits, and send only 16 of these bits. Then the sender
    would add the 32-bit number and the receiver the 16-bit number, so replicas would differ. XLA
    removes a cast from a type to the same type, but does not remove a `reduce_precision`.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    kind = jnp.finfo(x.dtype)
    # `reduce_precision` knows only types with infinities, and may round the smallest numbers to 0.
    # Floats of 8 bits, such as float8_e4m3fn, have larger numbers instead of infinities.
    if kind.bits < 16:
        return pin_bits(x)
    return lax.reduce_precision(x, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)


doubling = Algorithm(
    "doubling",
    _all_reduce,
    reduce_scatter=refused("doubling", "reduce_scatter", "halving"),
    all_gather=refused("doubling", "all_gather", "halving"),
)
