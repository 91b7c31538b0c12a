"""Where every leaf of a tree lives: a rule is a function (path, leaf) -> `PartitionSpec`, or None
to leave it to another rule.

`match` gives one spec to all paths under a glob, `first` asks rules in order, `fsdp` splits one
more dim of what another rule gave, `experts` is for what tokens travel to. Any function of your own
is a rule too. `specs` asks a rule about every leaf and refuses what would not run, or would run and
train something else.
"""

from parallax._typing import Rule
from parallax.rules.applied import Audit, audit, explain, paths, specs
from parallax.rules.makers import experts, first, fsdp, match, matches_glob
from parallax.rules.optimizer import GatheredOptState, check_axes, optimizer_specs
from parallax.rules.placement import Refusal
from parallax.trees import is_inexact

__all__ = [
    "Audit",
    "GatheredOptState",
    "Refusal",
    "Rule",
    "audit",
    "check_axes",
    "experts",
    "explain",
    "first",
    "fsdp",
    "is_inexact",
    "match",
    "matches_glob",
    "optimizer_specs",
    "paths",
    "specs",
]
