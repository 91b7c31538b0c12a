"""What a caller gives, held against what is needed before anything is computed, so that the refusal
is a sentence."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten_with_path

from parallax._typing import PyTree


def whole_numbers(where: str, **numbers: Any) -> tuple[int, ...]:
    """Returns the `numbers` as Python's integers; `where` begins the message.

    NumPy's integers are whole numbers, and 1.0 is not.

    Raises:
        ValueError: one of them is something else.
    """
    integers = []
    for name, value in numbers.items():
        try:
            # `int` would take 1.5 and '7' too.
            integers.append(operator.index(value))
        except TypeError as error:
            raise ValueError(
                f"{where} needs a whole number as {name}; got {value!r}. Give an int."
            ) from error
    return tuple(integers)


def check_not_deleted(where: str, tree: PyTree) -> None:
    """Refuses a `tree` with a leaf that is None, or an array that is deleted, as after a step that
    donates its state.

    Raises:
        ValueError: there is one; the message names its leaf.
    """
    # JAX flattens None away, and with it the leaf that is missing.
    for path, leaf in tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]:
        if leaf is None:
            raise ValueError(
                f"{where}: {keystr(path) or 'the array'} is None, where an array was needed. If "
                "the tree was filtered or partitioned, join it with eqx.combine first."
            )
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError(
                f"{where}: {keystr(path) or 'the array'} of shape {leaf.shape} was deleted: a step "
                "that donates its state takes its arrays with it. Use what the step returned."
            )


def check_tokens(where: str, ids: Any, vocabulary: int, *, weights: Any = None) -> None:
    """Refuses windows of tokens, `[batch, window]`, that are none, and ids outside the vocabulary
    where these are known.

    Inside a compiled program they are not: there the ids are taken, and the embedding gives nan.
    With `weights`, of each token after the first, an id is taken if it and all after it in its
    sequence have a weight of 0.

    Raises:
        ValueError: the ids are not whole numbers in two dims, or one is outside.
    """
    if not isinstance(ids, np.ndarray | jax.Array):
        raise ValueError(
            f"{where} needs an array of tokens, [batch, tokens]; got a {type(ids).__name__}. Use "
            "jnp.asarray."
        )
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"{where} needs whole numbers, [batch, tokens]; got {ids.dtype}{list(ids.shape)}. "
            "Encode a text."
        )
    if not (_known(ids) and _known(weights)):
        return
    # In NumPy: on a device this check would be a compiled program for each shape.
    ids = np.asarray(ids)
    outside = (ids < 0) | (ids >= vocabulary)
    if weights is not None and outside.any():
        counts = np.asarray(weights) != 0
        # From the end on: whether any token from here on counts.
        counts = np.maximum.accumulate(
            np.concatenate([counts[:, :1], counts], axis=1)[:, ::-1], axis=1
        )[:, ::-1]
        outside &= counts
    if outside.any():
        place = tuple(map(int, np.argwhere(outside)[0]))
        raise ValueError(
            f"{where} needs tokens from 0 to {vocabulary - 1}; got {ids[place]} at {list(place)}. "
            "Encode the text with the model's tokenizer; what is to be ignored, such as -100, "
            "needs weights of 0, there and after it in its sequence."
        )


def _known(array: Any) -> bool:
    """Returns whether the values can be read here: they are not those of a program that is being
    traced, or of other processes."""
    return not isinstance(array, Tracer) and getattr(array, "is_fully_addressable", True)
