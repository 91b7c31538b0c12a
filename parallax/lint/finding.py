"""Describes a mistake that the lint finds: its place, its harm and its cure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One mistake, which raises no error when the program runs.

    Attributes:
        kind: the name of the mistake, such as "sum-in-a-loop".
        where: for a program, the caller's line, "file.py:12"; for a rule set, the dotted path of
            the leaf, or the rule.
        harm: what goes wrong, with the mesh axis and the sizes.
        cure: the advice.
    """

    kind: str
    where: str
    harm: str
    cure: str


def report(findings: Sequence[Finding]) -> str:
    """Returns the findings as text: three lines for each finding, and a last line with the number
    of findings. Without findings, the text is one line."""
    if not findings:
        return "lint: nothing found."
    lines = [
        f"{finding.where}: {finding.kind}\n    {finding.harm}\n    Cure: {finding.cure}"
        for finding in findings
    ]
    return "\n".join([*lines, f"lint: {len(findings)} found."])
