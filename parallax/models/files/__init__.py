"""Models in Hugging Face's folders: `config.json`, safetensors, and what lies beside them, for any
family of models.

A family is one `Format`, a record of tables: which field of `config.json` is which size, which
values the code stands for, which tensor is which leaf. All that reads, checks, refuses and writes
is here, once. What comes from a file becomes a typed record at the border, or is refused in a
sentence that names the file and the field.
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
