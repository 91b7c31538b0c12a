"""What kind of mistake a wrong value looks like, from the value and the right one."""

import itertools
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

FEW = 0.02  # of the numbers: fewer may be zero by chance
MANY = 5  # blocks have too many orders beyond this
DIGITS = {
    np.dtype(dtype).name: jnp.finfo(dtype).nmant + 1
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16)
}  # of two
NEAR = 1e-6  # of the largest number: how well a guess must explain the wrong value


def looks(
    right: np.ndarray,
    wrong: np.ndarray,
    sizes: Mapping[str, int],
    parts: int,
    differs: Mapping[str, float],
) -> str:
    """A sentence without a subject, such as "summed 4 times: axis 'data' has 4 devices".

    Args:
        right: the value.
        wrong: another one of its shape.
        sizes: of the mesh's axes, in the run that is wrong.
        parts: its microbatches.
        differs: the axes along which its copies differ.
    """
    if right.shape != wrong.shape:
        return f"another shape: {list(wrong.shape)} instead of {list(right.shape)}"
    if np.isnan(wrong).any() and not np.isnan(right).any():
        return f"not a number, or not computed, at {np.isnan(wrong).mean():.0%} of the places"
    if differs:
        return f"not summed, or not the same weights: the devices along {next(iter(differs))!r} have different copies"
    if not np.any(wrong):
        return "zero: not summed, masked, or never sent"
    counts = {**sizes, "microbatches": parts}
    guesses = (
        _digits(right, wrong),
        _factor(right, wrong, counts),
        _order(right, wrong, counts),
        _key(right, wrong),
        _part(right, wrong),
    )
    return next((guess for guess in guesses if guess), "no known kind")


def _near(wrong: np.ndarray, guess: np.ndarray) -> bool:
    return float(np.max(np.abs(wrong - guess), initial=0)) <= NEAR * float(
        np.max(np.abs(guess), initial=0)
    )


def _digits(right: np.ndarray, wrong: np.ndarray) -> str:
    """Whether each number is off by what one rounding to a shorter type makes of it."""
    parts = np.abs(wrong - right) / np.maximum(np.abs(right), 1e-300)
    largest = float(np.max(parts, initial=0))
    if float(np.min(parts, initial=np.inf)) > largest / 4:  # all are off alike: a factor
        return ""
    return next(
        (
            f"rounded to {name}"
            for name, n in DIGITS.items()
            if 2.0 ** -(n + 4) < largest <= 2.0**-n
        ),
        "",
    )


def _factor(right: np.ndarray, wrong: np.ndarray, counts: Mapping[str, int]) -> str:
    """Whether the wrong value is a multiple of the right one."""
    energy = float(np.vdot(right, right))
    factor = float(np.vdot(right, wrong)) / energy if energy else 0.0
    if not factor or not _near(wrong, factor * right):
        return ""
    if abs(factor + 1) < NEAR:
        return "the sign is wrong"
    named = {name: n for name, n in counts.items() if n > 1}
    products = {
        names: int(np.prod([named[n] for n in names]))
        for k in (1, 2, 3)
        for names in itertools.combinations(named, k)
    }
    for words, value in (
        ("summed {} times", factor),
        ("divided by {}, a mean instead of a sum", 1 / factor),
    ):
        whole = round(value)
        if whole > 1 and abs(value - whole) < NEAR * whole:
            why = [" x ".join(names) for names, n in products.items() if n == whole]
            return words.format(whole) + (f": the size of {' or '.join(why[:3])}" if why else "")
    return f"{factor:.6g} times the right value"


def _order(right: np.ndarray, wrong: np.ndarray, counts: Mapping[str, int]) -> str:
    """Whether the wrong value has the blocks of the right one in another order, along a dim."""
    for dim, count in itertools.product(
        range(right.ndim), sorted({n for n in counts.values() if 1 < n <= MANY})
    ):
        if right.shape[dim] % count == 0:
            blocks = np.split(right, count, axis=dim)
            for order in itertools.permutations(range(count)):
                if order != tuple(range(count)) and _near(
                    wrong, np.concatenate([blocks[i] for i in order], axis=dim)
                ):
                    return f"{count} blocks of dim {dim} in another order: {list(order)}"
    return ""


def _key(right: np.ndarray, wrong: np.ndarray) -> str:
    """Whether other numbers are zero, as by another dropout mask."""
    share = float(((right == 0) != (wrong == 0)).mean())
    if not (FEW < share < 1 - FEW and (right == 0).any() and (wrong == 0).any()):
        return ""
    return f"another random key: {share:.0%} of the numbers are zero in one of the two alone"


def _part(right: np.ndarray, wrong: np.ndarray) -> str:
    """Whether a box of the value is wrong and the rest is right."""
    off = np.abs(wrong - right) > NEAR * float(np.max(np.abs(right), initial=0))
    if not off.any() or off.all():
        return ""
    box = []
    for dim in range(off.ndim):
        places = np.flatnonzero(off.any(axis=tuple(i for i in range(off.ndim) if i != dim)))
        box.append((int(places[0]), int(places[-1]) + 1))
    size = int(np.prod([stop - start for start, stop in box]))
    if size == off.size:
        return ""
    said = ", ".join(f"{start}:{stop}" for start, stop in box)
    inside = wrong[tuple(slice(*each) for each in box)]
    return f"{'missing' if not np.any(inside) else 'wrong'} in the block [{said}] alone"
