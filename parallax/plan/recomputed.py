"""The parts of a layer that its backward pass keeps, and those that it computes or gathers again,
under a layout's `remat`."""

from typing import Literal, NamedTuple

from parallax.layout import Layout


class Recomputed(NamedTuple):
    """What happens to a layer between its forward and its backward pass.

    Attributes:
        keeps: everything, only the results of matmuls with weights, or only the layer's input.
        keeps_gathered: whether what was gathered over devices is kept whole.
        keeps_scores: whether attention's weights are kept.
        gathers: all-gathers of a layer that the backward pass makes again.
        sums: sums over devices that it makes again.
        matmuls: whether it makes the matmuls with weights again.
        scores: the share of attention's matmuls that it makes again; a half where their result is
            kept, and only the scores are not.
        passes: the share of a layer's results, between matmuls, that it makes again.
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
        """Returns the share of the matmuls with weights that it makes again, in a stage of so many
        layers.

        The last of a layer, a share `last` of its matmuls, is not needed: it makes what the next
        layer or stage has.
        """
        return self.matmuls * (1 - last / (layers if self.whole_stage else 1))


def recomputed(layout: Layout) -> Recomputed:
    """Returns the operations that a layout's `remat` computes again."""
    word = layout.remat
    keeps = "products" if word == "products" else "inputs" if word == "block" else "everything"
    # With ZeRO-3 a layer that keeps everything else gathers its weights again.
    gathers_again = keeps == "everything" and (word == "gathers" or layout.zero == 3)
    attention_again = word == "attention" and not gathers_again
    whole_stage = word == "stage"
    if whole_stage or keeps != "everything":
        scores, passes = 1.0, 1.0
    elif attention_again:
        scores, passes = 0.5, 0.5
    else:  # ZeRO-3 keeps what attention makes, whatever `remat` says of it
        scores, passes = 0.0, 0.0
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
    """Returns the number of layers in the body of the loop over layers: two where the gathers of
    one overlap the other."""
    return 2 if layout.zero == 3 else 1
