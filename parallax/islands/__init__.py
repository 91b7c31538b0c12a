"""Islands: groups of devices that train by themselves and talk once in many steps. A function from step to step (DiLoCo)."""

from parallax.islands.fragments import (
    ALL_AT_ONCE,
    Fragment,
    Fragments,
    Stream,
    by_layers,
    by_path,
    whole,
)
from parallax.islands.rounds import local, nesterov
from parallax.islands.state import (
    Planned,
    Sent,
    State,
    count,
    init,
    model_of,
    names_of,
    of_others,
    planned,
    regrouped,
)

__all__ = [
    "ALL_AT_ONCE",
    "Fragment",
    "Fragments",
    "Planned",
    "Sent",
    "State",
    "Stream",
    "by_layers",
    "by_path",
    "count",
    "init",
    "local",
    "model_of",
    "names_of",
    "nesterov",
    "of_others",
    "planned",
    "regrouped",
    "whole",
]
