"""Finds mistakes that raise no error, in traced programs and in rules that place arrays on a mesh.

    print(lint.report(lint.rules(model, rule, mesh)))
    print(lint.report(lint.program(train, state, batch)))

    lint.check(train, state, batch)  # raises an error for mistakes that change the numbers

Mistakes that the program does not show, such as copies of an array that differ, are found in live
arrays by `run.fingerprint.differing(state)`.

Each finding has the line of a mistake, its harm and its cure. A finding may be no mistake, and a
program without findings may have mistakes.
"""

from parallax.lint.finding import Finding, report
from parallax.lint.programs import check, program
from parallax.lint.rule_sets import device_bytes, rules

__all__ = [
    "Finding",
    "check",
    "device_bytes",
    "program",
    "report",
    "rules",
]
