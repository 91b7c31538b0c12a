"""A mixture of experts that is split over an axis, with the same results as on one device.

A router sends each token to k of E experts. Each device of the axis has some of the experts, and
some of the batch. So tokens are sent to their experts, and results are sent back: by a gather and a
scatter, or by an all-to-all (`dispatch`). A *choice* is a token and one of its experts. By default
no choice is dropped. Dropped choices are counted.
"""

from parallax.experts.dispatch import BytesSent, Dispatch, exchanged, gathered, ragged
from parallax.experts.grouped_rows import ExpertCompute, grouped
from parallax.experts.layers import comms
from parallax.experts.mixture import Gated, Mixture, moe
from parallax.experts.router import Router, Routing, Statistics, rebalanced, statistics, top_k

__all__ = [
    "BytesSent",
    "Dispatch",
    "ExpertCompute",
    "Gated",
    "Mixture",
    "Router",
    "Routing",
    "Statistics",
    "comms",
    "exchanged",
    "gathered",
    "grouped",
    "moe",
    "ragged",
    "rebalanced",
    "statistics",
    "top_k",
]
