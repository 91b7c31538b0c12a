"""Islands: groups of devices that train separately and exchange their changes once in many steps.

`local` takes the train step of one island and returns the step of all islands, as in DiLoCo.
"""

from parallax.islands.fragments import (
    ALL_AT_ONCE,
    Fragment,
    Fragments,
    Stream,
    by_layers,
    by_path,
    whole_model,
)
from parallax.islands.rounds import local, outer_nesterov
from parallax.islands.state import (
    SentChanges,
    State,
    StateInit,
    axis_names,
    init,
    joint_model,
    number_of_islands,
    shapes_for_islands,
    state_init,
    with_number_of_islands,
)

__all__ = [
    "ALL_AT_ONCE",
    "Fragment",
    "Fragments",
    "SentChanges",
    "State",
    "StateInit",
    "Stream",
    "axis_names",
    "by_layers",
    "by_path",
    "init",
    "joint_model",
    "local",
    "number_of_islands",
    "outer_nesterov",
    "shapes_for_islands",
    "state_init",
    "whole_model",
    "with_number_of_islands",
]
