"""Gives the sizes of one layer of a GPT-2, or of a Llama without experts. `plan` has formulas
(closed forms) for the bytes and operations of a train step of these decoders. `known` refuses all
other decoders.

Legend: D width, K head width.
"""

from typing import Any, NamedTuple

from parallax.models import gpt2, llama
from parallax.models.family import Family

Config = gpt2.Config | llama.Config


class Layer(NamedTuple):
    """The sizes of a layer.

    Attributes:
        width: the layer's width.
        queries: heads x head width, the width of all queries of a token together.
        keys: heads of keys x head width, the width of all keys of a token together. The values have
            the same width.
        hidden: the width of the feed-forward.
        inputs: how many matrices read the feed-forward's input. There are 2 if the feed-forward is
            gated, and 1 if it is not.
    """

    width: int
    queries: int
    keys: int
    hidden: int
    inputs: int

    @property
    def last(self) -> int:
        """The number of elements of the layer's last matrix, which goes from the feed-forward's
        width back to the layer's width."""
        return self.width * self.hidden

    @property
    def weights(self) -> int:
        """The number of elements of all matrices of the layer."""
        return 2 * self.width * (self.queries + self.keys) + (self.inputs + 1) * self.last

    @property
    def column_parallel(self) -> int:
        """The number of elements per token in the results of the column-parallel matmuls. These
        results are the queries, the keys, the values, and one array of width `hidden` for each
        input matrix of the feed-forward."""
        return self.queries + 2 * self.keys + self.inputs * self.hidden


class Ends(NamedTuple):
    """The paths of the arrays that the two ends of a decoder read.

    Attributes:
        embedding: the arrays of the embedding.
        head: the arrays of the head, the last norm among them. The array of a tied head is also in
            `embedding`.
    """

    embedding: frozenset[str]
    head: frozenset[str]


def known(config: Any) -> None:
    """Raises `ValueError` unless the closed forms hold for the model: a GPT-2, or a Llama without
    experts."""
    if isinstance(config, gpt2.Config) or (isinstance(config, llama.Config) and not config.experts):
        return
    kind = type(config)
    has_experts = " with experts" if isinstance(config, llama.Config) else ""
    raise ValueError(
        "plan has formulas only for a gpt2.Config, or a llama.Config without experts; got a "
        f"{kind.__qualname__} of {kind.__module__}{has_experts}. Use plan.traced(family, config, "
        "layout, hardware, batch=...) for another decoder, and plan.trace for any step."
    )


def family_of(config: Config) -> Family:
    """Returns the family of the model with these sizes."""
    return gpt2.FAMILY if isinstance(config, gpt2.Config) else llama.FAMILY


def layer_of(config: Config) -> Layer:
    """Returns the sizes of a layer of the model."""
    D = config.width
    if isinstance(config, gpt2.Config):
        return Layer(D, queries=D, keys=D, hidden=4 * D, inputs=1)  # not gated
    K = config.head_width
    # `groups` is the number of heads of keys. A SwiGLU is gated, so it has two input matrices.
    return Layer(
        D, queries=config.heads * K, keys=config.groups * K, hidden=config.hidden, inputs=2
    )


def ends_of(config: Config) -> Ends:
    """Returns the paths of the arrays of the embedding and of the head."""
    if isinstance(config, gpt2.Config):
        return Ends(frozenset({"wte", "wpe"}), frozenset({"norm.weight", "norm.bias", "wte"}))
    rows = "table" if config.tied else "head"
    return Ends(frozenset({"table"}), frozenset({"norm.weight", rows}))
