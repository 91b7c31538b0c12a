"""Finds mistakes that run in silence, in rule sets, traced programs and live arrays.

    print(lint.report(lint.rules(model, rule, mesh)))
    print(lint.report(lint.program(train, state, batch)))
    print(lint.report(lint.arrays(state)))

    lint.check(train, state, batch)  # raises an error for what trains another model

Each finding has a line, a sentence and a cure. A finding may be no mistake, and a program without
findings may have some.
"""

from parallax.lint.finding import Finding, report
from parallax.lint.live_arrays import arrays, fingerprint
from parallax.lint.programs import check, program
from parallax.lint.rule_sets import device_bytes, rules

__all__ = [
    "Finding",
    "arrays",
    "check",
    "device_bytes",
    "fingerprint",
    "program",
    "report",
    "rules",
]
