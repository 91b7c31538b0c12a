"""Documents packed into one window: a token sees only tokens of its own document, and the loss
leaves out the first token of each further document.

    compute = decoder.Compute(documents=documents.ends_with(tokenizer.end))  # whatever the layout
    numbers = documents.ends_with(0)(windows)
    loss = gpt2.loss(model, documents.with_segments(Batch(windows), numbers))

The ends of documents are read from the tokens, so only windows have to be stored, sent and split.
Positions count from the window's first token. A model with rotary positions computes for each
document the same as for the document alone; a model that learns its positions does not.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Int, Shaped

from parallax.models.family import Batch, check_weights
from parallax.pipeline.traced import trace
from parallax.trees import is_array

Documents = Callable[[Int[Array, "batch window"]], Int[Array, "batch window"]]


def ends_with(token: int) -> Documents:
    """Returns a function from windows to the number of each token's document: 0 for the first
    document of a window, then 1, and so on. Each document ends with `token`.
    """

    def numbered(windows):
        """Returns, for each place of a window, how often `token` stands before it: [batch,
        window].
        """
        ends = (windows == token).astype(jnp.int32)
        # `- ends`: the token that ends a document still belongs to that document.
        return jnp.cumsum(ends, axis=1) - ends

    return numbered


def with_segments(batch: Batch, numbers: Shaped[Array, "..."]) -> Batch:
    """Returns `batch` with `segments` and `weights` that keep its documents apart. `numbers` has
    the number of each token's document.

    A token does not see inputs of other documents. A target has a weight of 0 if the token before
    it, its input, is of another document. The loss is then a weighted mean: see
    `cross_entropy.normalized`.

    Raises:
        ValueError: the numbers are not whole, or their shape is not that of the windows; or the
            weights have another shape than `Batch` says.
    """
    check_weights(batch)
    if numbers.shape != batch.windows.shape or not jnp.issubdtype(numbers.dtype, jnp.integer):
        raise ValueError(
            "documents: each token needs the number of its document, so the numbers must be whole "
            f"and of the windows' shape {list(batch.windows.shape)}; got {numbers.dtype}"
            f"{list(numbers.shape)}."
        )
    same = numbers[:, 1:] == numbers[:, :-1]  # whether a target is of its input's document
    weights = batch.weights
    if weights is None:
        weights = jnp.ones(same.shape, jnp.result_type(float))
    # The last token of a window is a target only, so `segments`, those of the inputs, leave it out.
    return batch._replace(
        weights=jnp.where(same, weights, jnp.zeros_like(weights)), segments=numbers[:, :-1]
    )


def requires_segments(stage: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `stage` with a check. The check raises `ValueError` if the traced `stage` does not
    read `Batch.segments`. `stage` is the second of the functions that `Family.stages` returns: it
    runs the layers of a decoder.
    """

    def wrapped(*arguments):
        """Returns `stage(*arguments)`, after a trace that shows which arguments `stage` reads."""
        arrays, static = eqx.partition(arguments, is_array)

        def array_results(*arrays):
            """Returns the arrays in the result of `stage`, called with `arrays` and `static`."""
            return eqx.filter(stage(*eqx.combine(arrays, static)), is_array)

        # A tree like the arguments, with True for each array that the traced program reads.
        is_read = trace(array_results, *arrays).used
        # The third argument of a stage, `(model, x, batch, position)`, is the batch. It may be a
        # plain tuple, which has no field `segments`, so it is made a `Batch` here. A batch without
        # segments has no leaf there, so the list is empty, and the batch is refused too.
        if not jax.tree.leaves(Batch(*is_read[2]).segments) == [True]:
            raise ValueError(
                "documents: the layers do not read Batch.segments, so tokens would see "
                "tokens of other documents. Attend by comms.wrap_attention(attend)(q, k, v, "
                "segments=...), as models.decoder_parts does, or leave Compute(documents=...) out."
            )
        return stage(*arguments)

    return wrapped


def visible_share(numbers: Shaped[ArrayLike, "batch tokens"]) -> float:
    """Returns the share of the causal attention scores that documents leave unmasked, as a mean
    over the rows of the batch. A causal score belongs to a pair of tokens: a token, and the same or
    an earlier token. The score is unmasked if both tokens are of one document.

    `numbers` has the number of each token's document. The tokens of a document are contiguous.
    """
    sizes_by_row = [np.unique(row, return_counts=True)[1] for row in np.asarray(numbers)]
    tokens = np.shape(numbers)[1]
    # n tokens have n (n + 1) / 2 causal scores; the 2 cancels.
    shares = [np.sum(sizes * (sizes + 1)) / (tokens * (tokens + 1)) for sizes in sizes_by_row]
    return float(np.mean(shares))
