"""How many devices each axis gets, and how a batch is cut: a frozen record, and the search for the nearest valid one."""

from parallax.layout.layouts import Layout
from parallax.layout.nearest import AXES, Order, Precision, Remat

__all__ = ["AXES", "Layout", "Order", "Precision", "Remat"]
