"""Mistakes that run in silence: in a rule set, in a traced program, in live arrays. Each with a line, a sentence and a cure.

    print(lint.report(lint.rules(model, rule, mesh)))
    print(lint.report(lint.program(train, state, batch)))
    print(lint.report(lint.arrays(state)))

A finding is worth a look; no finding is no proof.
"""

from parallax.lint.finding import Finding, report
from parallax.lint.live_arrays import arrays, fingerprint
from parallax.lint.programs import program
from parallax.lint.rule_sets import device_bytes, rules

__all__ = ["Finding", "arrays", "device_bytes", "fingerprint", "program", "report", "rules"]
