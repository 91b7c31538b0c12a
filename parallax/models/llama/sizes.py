"""The sizes of a Llama, and of published models.

Sources: the files `config.json` that were published with the weights of Llama 3.1 and 3.2.
"""

import dataclasses
import math

from parallax.models import checked_numbers
from parallax.models.files.origin import Origin


@dataclasses.dataclass(frozen=True)
class Scaling:
    """How Llama 3.1 stretches rotary positions to longer contexts. Rotary positions rotate pairs of
    numbers by angles. The angles of slow pairs are divided by `factor`; fast pairs stay unchanged.

    Args:
        factor: the number by which the angles of slow pairs are divided.
        low: a pair is slow if a full turn takes more than `original` / `low` positions.
        high: a pair is fast if a full turn takes fewer than `original` / `high` positions. For
            pairs between slow and fast, the angles are interpolated.
        original: the context that the model was first trained with.

    Raises:
        ValueError: an argument is not a positive number, `original` is below 1, or `high` is not
            above `low`.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    def __post_init__(self):
        """Checks the fields, and stores them as `int` and `float`."""
        check = checked_numbers.Checked("llama.Scaling", self)
        check.real("factor", "low", "high", bound=checked_numbers.POSITIVE)
        check.whole("original")
        if self.low >= self.high:
            raise ValueError(
                f"llama.Scaling needs high > low; got low={self.low}, high={self.high}."
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a Llama.

    The embedding and the head have `rows` rows: the vocabulary rounded up to a multiple of
    `vocabulary_multiple`, so that the devices can have equal numbers of rows. The rows after the
    vocabulary have probability 0, and get no gradient.

    Args:
        layers: L, the number of blocks.
        heads: H, the number of heads of queries in each layer.
        groups: G, the number of heads of keys and values. H / G neighbouring heads of queries share
            one head of keys and one of values.
        width: D, the width of the residual stream.
        hidden: F, the number of hidden units of the feed-forward.
        context: the largest number of tokens in a window.
        vocabulary: the number of tokens in the vocabulary.
        vocabulary_multiple: a divisor of the number of rows of the embedding and the head.
        head_width: K, the width of a head. 0 means D / H. The field then stores D / H, so
            `dataclasses.replace(config, width=...)` does not change K.
        theta: the base of the rotary positions. The slowest pair of numbers in a head makes a full
            turn in about 2 pi theta positions.
        scaling: how rotary positions are stretched to longer contexts; None: not at all.
        epsilon: the number that the norms add to the mean of squares.
        tied: whether the head is the embedding transposed.
        bias: whether queries, keys and values have a bias, as in Qwen 2.
        head_norms: whether each head of queries and keys is normalised, as in Qwen 3.
        experts: E, the number of experts of F hidden units that each layer has in place of the
            feed-forward, as in Mixtral; 0: the layers have a feed-forward.
        chosen: k, the number of experts to which a token goes. The router's weights of these
            experts are divided by their sum.
        shared: the number of hidden units of one more expert, to which all tokens go; 0: there is
            no such expert.
        balance: the weight of the auxiliary loss `experts.Statistics.balance`. This loss evens out
            the load of the experts.
        z: the weight of the auxiliary loss `experts.Statistics.z`. This loss keeps the router's
            logits small.
        origin: files and `config.json` fields that a loaded model does not use, kept for `save`.

    Raises:
        ValueError: an integer argument is not a whole number in its range: 0 to 2^31 - 1 for
            `head_width`, `experts` and `shared`, 1 to 2^20 for `vocabulary_multiple`, and 1 to
            2^31 - 1 for all others. Also raised if `groups` does not divide `heads`; if
            `head_width` is 0 and `heads` does not divide `width`; if K is odd; if `theta` is not
            above 0; if `epsilon`, `balance` or `z` is below 0; if E > 0 and `chosen` > E; or if
            E = 0 and `shared`, `balance` or `z` is not 0.
    """

    layers: int = 12
    heads: int = 12
    groups: int = 4
    width: int = 768
    hidden: int = 2048
    context: int = 1024
    vocabulary: int = 50257
    vocabulary_multiple: int = 128
    head_width: int = 0
    theta: float = 10_000.0
    scaling: Scaling | None = None
    epsilon: float = 1e-5
    tied: bool = False
    bias: bool = False
    head_norms: bool = False
    experts: int = 0
    chosen: int = 2
    shared: int = 0
    balance: float = 0.0
    z: float = 0.0
    origin: Origin = dataclasses.field(default=Origin(), repr=False)

    def __post_init__(self):
        """Checks the fields, and stores their numbers as `int` and `float`. If `head_width` is 0,
        D / H is stored in its place.
        """
        check = checked_numbers.Checked("llama.Config", self)
        check.whole("layers", "heads", "groups", "width", "hidden", "context", "vocabulary")
        check.whole("vocabulary_multiple", most=checked_numbers.LARGEST_MULTIPLE)
        if self.head_width == 0:  # the default: D / H
            check.divides("width", "heads")
            object.__setattr__(self, "head_width", self.width // self.heads)
        check.divides("heads", "groups")
        check.whole("head_width")
        if self.head_width % 2:
            raise ValueError(
                "llama.Config needs an even head_width, since rotary positions rotate pairs of "
                f"numbers in a head; got {self.head_width}."
            )
        check.real("epsilon", "balance", "z", bound=checked_numbers.NOT_NEGATIVE)
        check.real("theta", bound=checked_numbers.POSITIVE)
        check.whole("experts", "shared", least=0)
        check.whole("chosen")
        for field in ("shared", "balance", "z"):
            if getattr(self, field) and not self.experts:
                raise ValueError(
                    f"llama.Config: {field}={getattr(self, field)} needs layers with experts; got "
                    f"experts=0. Use experts=8, for example, or {field}=0."
                )
        if self.experts and self.chosen > self.experts:
            raise ValueError(
                "llama.Config: chosen, the number of experts for a token, must be at most "
                f"experts={self.experts}; got chosen={self.chosen}. Use chosen={self.experts}."
            )

    @property
    def rows(self) -> int:
        """The number of rows of the embedding and of the head: the vocabulary with its padding."""
        return -(-self.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that the layout's numbers of devices must divide, for `Layout.check`."""
        sizes = {
            "layers": self.layers,
            "heads": self.heads,
            # The tensor axis splits the hidden units, also those of a shared expert. Without one,
            # `shared` is 0, and gcd(n, 0) is n.
            "hidden": math.gcd(self.hidden, self.shared),
        }
        if self.experts:
            sizes["experts"] = self.experts
        # `rows`: of the embedding and the head, with their padding.
        return sizes | {"rows": self.rows, "tokens": self.context}

    @property
    def parameters(self) -> int:
        """The number of parameters, padding left out."""
        D, K = self.width, self.head_width
        qkv_heads = self.heads + 2 * self.groups  # heads of queries, keys and values
        attention = D * K * (qkv_heads + self.heads)  # and `out`, [H, K, D]
        attention += self.bias * qkv_heads * K + self.head_norms * 2 * K
        feed_forward = 3 * D * self.hidden  # the SwiGLU's three matrices
        if self.experts:
            # The router, and three matrices for each expert, of `hidden` units, and for one more
            # expert, of `shared` units.
            feed_forward = D * self.experts + 3 * D * (self.experts * self.hidden + self.shared)
        of_layers = self.layers * (attention + feed_forward + 2 * D)  # 2 D: the two norms
        # The embedding, and the head if it is not tied; the layers; the last norm.
        return (2 - self.tied) * self.vocabulary * D + of_layers + D


SMALL = Config()  # layers and width of the smallest GPT-2, and a vocabulary for its tokenizer
_LLAMA_3 = Config(
    heads=32,
    groups=8,
    width=2048,
    context=131_072,
    vocabulary=128_256,
    head_width=128,
    theta=500_000.0,
)
B1 = dataclasses.replace(
    _LLAMA_3, layers=16, hidden=8192, head_width=64, tied=True, scaling=Scaling(32.0)
)
B3 = dataclasses.replace(
    _LLAMA_3, layers=28, heads=24, width=3072, hidden=8192, tied=True, scaling=Scaling(32.0)
)
B8 = dataclasses.replace(_LLAMA_3, layers=32, width=4096, hidden=14336, scaling=Scaling(8.0))
B70 = dataclasses.replace(
    _LLAMA_3, layers=80, heads=64, width=8192, hidden=28672, scaling=Scaling(8.0)
)
