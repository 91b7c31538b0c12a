"""Documents packed into one window: a token sees those of its own document, and the loss leaves out
what follows a cut.

    compute = decoder.Compute(documents=documents.ends_with(tokenizer.end))  # whatever the layout
    numbers = documents.ends_with(0)(windows)
    loss = gpt2.loss(model, documents.with_segments(Batch(windows), numbers))

The cuts are read from the tokens, so nothing but windows has to be stored, sent or split. Places in
the window stay: a model with rotary positions computes for each document what it would alone; one
that learns its positions sees them go on.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Int, Shaped

from parallax.models.family import Batch
from parallax.pipeline.traced import trace
from parallax.trees import is_array

Documents = Callable[[Int[Array, "batch window"]], Int[Array, "batch window"]]


def ends_with(token: int) -> Documents:
    """Returns a function from windows to the number of each token's document, where each document
    ends with `token`: 0 for the first one.
    """

    def numbered(windows):
        ends = (windows == token).astype(jnp.int32)
        return jnp.cumsum(ends, axis=1) - ends

    return numbered


def with_segments(batch: Batch, numbers: Shaped[Array, "..."]) -> Batch:
    """Returns `batch` with its documents apart, by the number of each token's: of inputs of another
    one none is seen, and a target of another one than its input has a weight of 0.

    The loss is then a weighted mean: see `cross_entropy.normalized`.

    Raises:
        ValueError: the numbers are not whole, or not one for each token of the windows.
    """
    if numbers.shape != batch.windows.shape or not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise ValueError(
            f"documents needs whole numbers of the windows' shape {list(batch.windows.shape)}, one "
            f"for each token; got {numbers.dtype}{list(numbers.shape)}."
        )
    same = numbers[:, 1:] == numbers[:, :-1]
    weights = batch.weights
    if weights is None:
        weights = jnp.ones(same.shape, jnp.result_type(float))
    return batch._replace(
        weights=jnp.where(same, weights, jnp.zeros_like(weights)), segments=numbers[:, :-1]
    )


def requires_segments(stage: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `stage`, one of `Family.stages`, refused when it is traced where it does not read the
    documents of its part.
    """

    def wrapped(*arguments):
        arrays, static = eqx.partition(arguments, is_array)

        def array_results(*arrays):
            return eqx.filter(stage(*eqx.combine(arrays, static)), is_array)

        used = trace(array_results, *arrays).used
        if not jax.tree.leaves(Batch(*used[2]).segments) == [True]:
            raise ValueError(
                "documents: the layers do not read Batch.segments, so that tokens would see those "
                "of other documents. Attend by comms.wrap_attention(attend)(q, k, v, "
                "segments=...), as models.decoder_parts does, or leave Compute(documents=...) out."
            )
        return stage(*arguments)

    return wrapped


def visible_share(numbers: Shaped[ArrayLike, "batch tokens"]) -> float:
    """Returns the share of all pairs of a token and one before it, or itself, that are of one
    document: attention masks the rest.

    `numbers` are those of the tokens' documents, each of which lies in one piece.
    """
    rows = [np.unique(row, return_counts=True)[1] for row in np.asarray(numbers)]
    tokens = np.shape(numbers)[1]
    return float(np.mean([np.sum(sizes * (sizes + 1)) / (tokens * (tokens + 1)) for sizes in rows]))
