"""Runs a step so that its results have the same bits on every mesh of CPUs.

Sums of floating-point numbers depend on their order, and a kernel for 8 rows rounds differently
from one for 64 rows. So one step on two meshes gives two results. `spmd` removes both causes. The
step is written for a fixed number of *cells* along each axis. A cell is a logical device: the step
runs as if each cell were a device. A device of the real mesh has one cell or several. Every kernel
has the shapes of one cell, and every sum is a binary tree over the cells, whatever the mesh is.

The step is traced once, as the program of one cell. `walk.py` runs the program in two kinds of
parts. A *segment* has equations that do not communicate; it is compiled apart from the rest, and
runs for one cell after another. A collective works on all cells of the device together. `stacks.py`
has the class `Stack`, for the values of all cells of a device, and the code of the collectives.
`steps.py` makes the program's list of equations.
"""

from parallax.same_bits.by_cells import spmd

__all__ = ["spmd"]
