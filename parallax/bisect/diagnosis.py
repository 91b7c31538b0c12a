"""Guesses the kind of mistake from a wrong value and the right one.

Each guess is a function that looks for one kind of mistake. Its first two arguments are the right
and the wrong value, arrays in float64 of the same shape. The function returns a text that describes
the mistake, or "" if a mistake of this kind does not explain the wrong value.
"""

import itertools
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from parallax.bisect.records import gaps, largest_finite

FEW = 0.02  # a smaller share of the numbers may be zero by chance
MANY = 5  # the largest number of blocks whose orders are all tried: 5! = 120
# The number of binary digits that a number of each type keeps.
DIGITS = {
    np.dtype(dtype).name: jnp.finfo(dtype).nmant + 1
    for dtype in (jnp.float32, jnp.float16, jnp.bfloat16)
}
NEAR = 1e-6  # the error that a guess may leave, as a share of the largest number


@np.errstate(invalid="ignore")  # of inf and nan in the values
def diagnose(
    right: np.ndarray,
    wrong: np.ndarray,
    sizes: Mapping[str, int],
    microbatches: int,
    differs: Sequence[str] = (),
) -> str:
    """Returns a text that names the kind of mistake, such as "summed 4 times: the size of data" if
    the mesh axis "data" has 4 devices. The text is the first guess that explains the wrong value,
    or "no known kind".

    Args:
        right: the right value.
        wrong: the wrong value, which may have another shape.
        sizes: the sizes of the mesh's axes in the wrong run.
        microbatches: the number of microbatches of the wrong run.
        differs: the axes along which devices hold different copies of the wrong value.
    """
    if right.shape != wrong.shape:
        return f"another shape: {list(wrong.shape)} instead of {list(right.shape)}"
    # NumPy returns numbers, and no arrays, for sums and products of arrays without a dim; so each
    # value gets at least one dim.
    right, wrong = (np.atleast_1d(x.astype(np.float64)) for x in (right, wrong))
    if np.isnan(wrong).any() and not np.isnan(right).any():
        return f"not a number, or not computed, at {np.isnan(wrong).mean():.0%} of the places"
    if differs:
        return (
            f"not summed over {differs[0]!r}, or computed from weights that differ there: the "
            "devices along this axis have different copies of the value"
        )
    if not np.any(wrong):
        return "zero: not summed, masked, or never sent"
    counts = {**sizes, "microbatches": microbatches}
    guesses = (
        _rounded(right, wrong),
        _multiple(right, wrong, counts),
        _permuted(right, wrong, counts),
        _other_zeros(right, wrong),
        _wrong_in_one_block(right, wrong),
    )
    return next(filter(None, guesses), "no known kind")


def _largest(x: np.ndarray) -> float:
    """Returns the largest absolute value of the elements; 0 for an empty array."""
    return float(np.max(np.abs(x), initial=0))


def _near(wrong: np.ndarray, guess: np.ndarray) -> bool:
    """Returns whether a guess equals the wrong value, up to rounding."""
    return _largest(gaps(guess, wrong)) <= NEAR * largest_finite(guess)


def _rounded(right: np.ndarray, wrong: np.ndarray) -> str:
    """Returns a text such as "rounded to bfloat16" if the wrong numbers seem to be the right ones,
    rounded to a shorter type; else "". A type fits if the largest relative error of the wrong
    numbers is at most the type's rounding error, and more than 1/16 of this rounding error."""
    errors = gaps(right, wrong) / np.maximum(np.abs(right), 1e-300)  # no division by 0
    # If all relative errors are about equal, the wrong value is a multiple of the right one, and
    # was not rounded. A multiple of 0 or of an infinite number has no error.
    counted = np.isfinite(right) & (right != 0)
    if float(np.min(errors, initial=np.inf, where=counted)) > _largest(errors) / 4:
        return ""
    for name, digits in DIGITS.items():
        # Rounding to so many binary digits changes a number by at most 2^-digits of it. The largest
        # of many such changes is not far below this bound.
        if 2.0 ** -(digits + 4) < _largest(errors) <= 2.0**-digits:
            return f"rounded to {name}"
    return ""


def _multiple(right: np.ndarray, wrong: np.ndarray, counts: Mapping[str, int]) -> str:
    """Returns a text if the wrong value is a multiple of the right one, else "". The text has the
    factor, and the axes whose size is the factor or its inverse. `counts` has the sizes of the axes
    and the number of microbatches.
    """
    # The factor f that makes `wrong - f * right` smallest (least squares).
    finite = np.isfinite(right) & np.isfinite(wrong)
    squares = float(np.vdot(right[finite], right[finite]))
    factor = float(np.vdot(right[finite], wrong[finite])) / squares if squares else 0.0
    if not factor or not _near(wrong, factor * right):
        return ""
    if abs(factor + 1) < NEAR:
        return "the sign is wrong"
    for text, value in (
        (f"summed {factor:.0f} times", factor),
        (f"divided by {1 / factor:.0f}, a mean instead of a sum", 1 / factor),
    ):
        whole = round(value)
        if whole > 1 and abs(value - whole) < NEAR * whole:
            axes = _axes_of_size(whole, counts)
            return text + (f": the size of {' or '.join(axes[:3])}" if axes else "")
    return f"{factor:.6g} times the right value"


def _axes_of_size(size: int, counts: Mapping[str, int]) -> list[str]:
    """Returns the names of the axes, or of products of two or three axes, that have this size, such
    as "data" or "data x tensor". Axes of one device are left out."""
    names = [name for name, count in counts.items() if count > 1]
    products = (axes for k in (1, 2, 3) for axes in itertools.combinations(names, k))
    return [" x ".join(axes) for axes in products if np.prod([counts[a] for a in axes]) == size]


def _permuted(right: np.ndarray, wrong: np.ndarray, counts: Mapping[str, int]) -> str:
    """Returns a text with the order, if the wrong value has the blocks of the right one in another
    order. The value is cut into as many blocks as an axis has devices, or as there are
    microbatches."""
    sizes = sorted({n for n in counts.values() if 1 < n <= MANY})
    for dim, count in itertools.product(range(right.ndim), sizes):
        if right.shape[dim] % count:  # no equal blocks
            continue
        blocks = np.split(right, count, axis=dim)
        # The first permutation is the right order itself, so it is left out.
        for order in itertools.islice(itertools.permutations(range(count)), 1, None):
            if _near(wrong, np.concatenate([blocks[i] for i in order], axis=dim)):
                return f"{count} blocks of dim {dim} in another order: {list(order)}"
    return ""


def _other_zeros(right: np.ndarray, wrong: np.ndarray) -> str:
    """Returns a text if the two values have zeros in different places, such as those of two dropout
    masks; else "". The text says that the runs used different random keys, and gives the share of
    places in which exactly one of the values is 0."""
    # A share below FEW may be chance. Two random masks never differ in nearly all places.
    share = float(((right == 0) != (wrong == 0)).mean())
    if not (FEW < share < 1 - FEW and (right == 0).any() and (wrong == 0).any()):
        return ""
    return f"another random key: {share:.0%} of the numbers are zero in only one of the two runs"


def _wrong_in_one_block(right: np.ndarray, wrong: np.ndarray) -> str:
    """Returns a text with the smallest box of indices that contains all wrong numbers, or "" if
    this box is the whole value. The text calls the box "missing" if the wrong value is 0 everywhere
    in the box, else "wrong"."""
    # The index of each wrong number, in an array of shape [wrong numbers, dims].
    # A negated condition, since it is also true for nan.
    off = np.argwhere(~(gaps(right, wrong) <= NEAR * largest_finite(right)))
    if not off.size:
        return ""
    starts, stops = off.min(axis=0), off.max(axis=0) + 1
    if np.prod(stops - starts) == right.size:  # the box is the whole value
        return ""
    box = [slice(start, stop) for start, stop in zip(starts, stops, strict=True)]
    text = ", ".join(f"{part.start}:{part.stop}" for part in box)
    return f"{'wrong' if np.any(wrong[tuple(box)]) else 'missing'} in the block [{text}] alone"
