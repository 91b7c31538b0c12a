"""Checks of arguments before anything is computed, with clear error messages."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten_with_path

from parallax._typing import PyTree


def whole_numbers(where: str, **numbers: Any) -> tuple[int, ...]:
    """Returns the values of the keyword arguments `numbers` as Python's integers, in the order
    given. `where` begins the error message.

    NumPy's integers are accepted; 1.0 is not.

    Raises:
        ValueError: one of the values is no integer; the message has the name of the argument.
    """
    integers = []
    for name, value in numbers.items():
        try:
            # `int` would accept 1.5 and '7' too.
            integers.append(operator.index(value))
        except TypeError as error:
            raise ValueError(
                f"{where} needs a whole number as {name}; got {value!r}. Give an int."
            ) from error
    return tuple(integers)


def check_not_deleted(where: str, tree: PyTree) -> None:
    """Raises `ValueError` if a leaf of `tree` is None or a deleted array.

    A step that donates its state deletes the arrays of that state. The message names the leaf.
    """
    # Without `is_leaf`, JAX would skip None.
    for path, leaf in tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)[0]:
        if leaf is None:
            raise ValueError(
                f"{where}: {keystr(path) or 'the array'} is None, where an array was needed. If "
                "the tree was filtered or partitioned, join it with eqx.combine first."
            )
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise ValueError(
                f"{where}: {keystr(path) or 'the array'} of shape {leaf.shape} was deleted: a step "
                "that donates its state deletes the state's arrays. Use the state that the step "
                "returned."
            )


def check_tokens(where: str, ids: Any, vocabulary: int, *, weights: Any = None) -> None:
    """Raises `ValueError` unless `ids` are windows of tokens: whole numbers, `[batch, window]`.

    Ids outside the vocabulary are refused too, if their values are known. Inside a compiled program
    the values are not known: ids outside the vocabulary are then accepted, and the model's
    embedding of them is nan.

    Args:
        where: the beginning of the error message.
        ids: the tokens.
        vocabulary: the number of tokens that exist.
        weights: the weights of the tokens' losses, one for each token of a window but the first. An
            id outside the vocabulary is accepted if its weight and the weights of all later ids of
            the window are 0: a token affects only its own loss and the losses of later tokens.
    """
    if not isinstance(ids, np.ndarray | jax.Array):
        raise ValueError(
            f"{where} needs an array of tokens, [batch, tokens]; got a {type(ids).__name__}. Use "
            "jnp.asarray."
        )
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"{where} needs whole numbers, [batch, tokens]; got {ids.dtype}{list(ids.shape)}. "
            "Pass the ids that a tokenizer gives."
        )
    if not (_known(ids) and _known(weights)):
        return
    # The check uses NumPy: JAX would compile a program for each shape.
    ids = np.asarray(ids)
    outside = (ids < 0) | (ids >= vocabulary)
    if weights is not None and outside.any():
        has_weight = np.asarray(weights) != 0
        # The first token has no loss and so no weight. It affects the losses of all other tokens,
        # so the weight of the second token stands for the weight of the first.
        has_weight = np.concatenate([has_weight[:, :1], has_weight], axis=1)
        # For each token: whether this token or any later one has a weight other than 0.
        is_needed = np.maximum.accumulate(has_weight[:, ::-1], axis=1)[:, ::-1]
        outside &= is_needed
    if outside.any():
        place = tuple(map(int, np.argwhere(outside)[0]))
        raise ValueError(
            f"{where} needs tokens from 0 to {vocabulary - 1}; got {ids[place]} at {list(place)}. "
            "Encode the text with the model's tokenizer. Each token is an input for the "
            "later tokens of its sequence. So a loss accepts an id outside this range, such as "
            "-100, only if its weight and the weights of all later tokens are 0."
        )


def _known(array: Any) -> bool:
    """Returns whether the values of an array can be read here.

    Values of a program that is being traced, and values on other processes, cannot be read. For
    None (no array) the result is True.
    """
    return not isinstance(array, Tracer) and getattr(array, "is_fully_addressable", True)
