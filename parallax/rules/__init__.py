"""Rules, which say how each leaf of a tree is split over the mesh.

A rule is a function (path, leaf) -> `PartitionSpec`. It returns None to leave the leaf to another
rule. `match` gives one spec to all paths that match a glob. `first` returns the spec of the first
rule that gives one. `fsdp` takes the spec of another rule, and splits one more dim. `experts` is a
`match` for the weights of experts. Any function (path, leaf) -> `PartitionSpec` or None that you
write is a rule too. `specs` applies a rule to every leaf. It raises an error for specs with which
the program would not run, or would train a different model from the one that you wrote.
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
