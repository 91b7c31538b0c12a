"""Finds the first value in which a split run differs from a run on one device.

`tap` gives a value of the model a name. `compare` records two runs, and compares their values name
by name. In a run that is not recorded, a tap adds nothing to the program.

    x = bisect.tap(x, "blocks.3.attention.out", P("batch"))  # in the model
    print(bisect.compare(one_device, split))
"""

from parallax.bisect.comparison import Comparison, Difference, compare, rounding
from parallax.bisect.records import Key, Record, Value, load, of_tree, record
from parallax.recording import at, is_on, job, numbered, only_if
from parallax.taps import AFTER, BATCH, tap, tap_tree

__all__ = [
    "AFTER",
    "BATCH",
    "Comparison",
    "Difference",
    "Key",
    "Record",
    "Value",
    "at",
    "compare",
    "is_on",
    "job",
    "load",
    "numbered",
    "of_tree",
    "only_if",
    "record",
    "rounding",
    "tap",
    "tap_tree",
]
