"""Tells which arrays of a layer are kept for the backward pass, and which arrays the backward pass
computes or gathers again, under a layout's `remat`.

`remat` is "none", or it names the arrays that are computed again: "gathers" (gathered arrays),
"attention", "block" (a whole layer) or "stage" (a whole stage of a pipeline). One value,
"products", names instead the arrays that are kept, the results of matmuls with weights: all other
arrays are then computed again.
"""

from typing import Literal, NamedTuple

from parallax.layout import Layout


class Recomputed(NamedTuple):
    """The arrays that a layer keeps, and the operations that its backward pass runs again.

    Attributes:
        keeps: what a layer keeps. It is "everything", or only the results of the layer's matmuls
            with weights ("products"), or only the layer's input ("inputs").
        keeps_gathered: whether a layer keeps the whole arrays that it gathers over devices. This
            field matters only if `keeps` is "everything"; for any other `keeps` it is True.
        keeps_scores: whether attention's probabilities (the softmax of its scores) are kept.
        gathers: how many all-gathers over devices the backward pass of a layer runs again.
        sums: how many all-reduces over devices the backward pass of a layer runs again.
        matmuls: whether the backward pass runs the matmuls with weights again.
        scores: the share of attention's matmuls that the backward pass runs again. It is a half if
            attention's result is kept and its probabilities are not.
        passes: of the arrays between a layer's matmuls, the share that the backward pass computes
            again. This costs further passes over memory.
        whole_stage: whether a stage of a pipeline keeps only its input, and runs forward again.
    """

    keeps: Literal["everything", "products", "inputs"]
    keeps_gathered: bool
    keeps_scores: bool
    gathers: int
    sums: int
    matmuls: bool
    scores: float
    passes: float
    whole_stage: bool

    def products(self, layers: int, last: float) -> float:
        """Returns a share, from 0 to 1, of the work of a stage's matmuls with weights. The backward
        pass does this share of the work again. The stage has `layers` layers.

        No gradient of a layer needs the result of the layer's last matmul, which is only added to
        the residual stream. So this matmul does not run again. There is an exception: if the whole
        stage runs again, each layer but the last repeats this matmul for the layer after it. `last`
        is the last matmul's share of a layer's weights.
        """
        return self.matmuls * (1 - last / (layers if self.whole_stage else 1))


def recomputed(layout: Layout) -> Recomputed:
    """Returns the arrays that a layer keeps, and the operations that its backward pass runs again,
    under a layout's `remat`."""
    word = layout.remat
    # With remat `stage` a layer keeps everything while its stage runs again and then backward.
    keeps = "products" if word == "products" else "inputs" if word == "block" else "everything"
    # ZeRO-3 gathers a layer's weights again even if the layer keeps all other arrays.
    gathers_again = keeps == "everything" and (word == "gathers" or layout.zero == 3)
    # With ZeRO-3, remat `attention` recomputes nothing of attention: the layer is then wrapped in
    # `remat.gathers`, which keeps all arrays but gathered ones, also those inside attention's own
    # `jax.checkpoint`.
    attention_again = word == "attention" and not gathers_again
    whole_stage = word == "stage"
    if whole_stage or keeps != "everything":
        scores, passes = 1.0, 1.0
    elif attention_again:
        # Of attention's two matmuls the one for the scores runs again. Attention's arrays are taken
        # as half of those between matmuls.
        scores, passes = 0.5, 0.5
    else:
        scores, passes = 0.0, 0.0
    # A layer gathers before attention and before the feed-forward, and sums after each of them. No
    # gradient needs the result of its second sum. `gathers` and `sums` do not count those of a
    # stage that runs again: the functions that read `whole_stage` add them.
    return Recomputed(
        keeps=keeps,
        keeps_gathered=not gathers_again,
        keeps_scores=keeps == "everything" and not attention_again,
        gathers=2 if gathers_again or keeps != "everything" else 0,
        sums=0 if keeps == "everything" else 1,
        matmuls=word == "block" or whole_stage,
        scores=scores,
        passes=passes,
        whole_stage=whole_stage,
    )


def layers_in_body(layout: Layout) -> int:
    """Returns the number of layers in the body of the loop over layers. With ZeRO-3 there are two,
    so that the gathers of one layer overlap the computation of the other."""
    return 2 if layout.zero == 3 else 1
