"""Reads and writes models of any family in Hugging Face's folders. A folder has `config.json`,
safetensors, and other files such as those of a tokenizer.

A family has one `Format`, a record of tables. The tables say which setting of the model each field
of `config.json` gives, which values of each field the code supports, and which leaf of the model
each tensor stores. The code that reads, checks and writes is the same for all families. A field or
a tensor that is not in the tables is refused with an error that names the file.
"""

from parallax.models.files.fields import Fields, Number, Part
from parallax.models.files.format import Format, load, save
from parallax.models.files.origin import Origin
from parallax.models.files.tensors import FLOATS, MEANT, Leaf

__all__ = [
    "FLOATS",
    "MEANT",
    "Fields",
    "Format",
    "Leaf",
    "Number",
    "Origin",
    "Part",
    "load",
    "save",
]
