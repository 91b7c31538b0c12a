"""What a lint says: one mistake, where it is, what it costs and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One mistake that runs in silence.

    Attributes:
        kind: its name, such as "sum-in-a-loop".
        where: the caller's line, "file.py:12", of a program; the dotted path of the leaf, or the rule, of a rule set or arrays.
        harm: what is wrong, with the axis and the numbers.
        cure: what to do.
    """

    kind: str
    where: str
    harm: str
    cure: str


def report(findings: Sequence[Finding]) -> str:
    """The findings as text, three lines each, and how many there are; of none, one line that says so."""
    if not findings:
        return "lint: nothing found."
    lines = [
        f"{finding.where}: {finding.kind}\n    {finding.harm}\n    Cure: {finding.cure}"
        for finding in findings
    ]
    return "\n".join([*lines, f"lint: {len(findings)} found."])
