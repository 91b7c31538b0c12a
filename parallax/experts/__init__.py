"""Experts: a mixture of experts split over an axis that splits the batch too, equal to one device.

A router sends each token to k of E experts. Each device of the axis holds some of them, so tokens
travel there and results back: by a gather and a scatter, or by an all-to-all (`dispatch`). What is
dropped is counted; by default nothing is.
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
