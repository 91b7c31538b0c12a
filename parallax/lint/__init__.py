"""Mistakes that run in silence: in a rule set, in a traced program, in live arrays. Each with a line, a sentence and a cure.

    print(lint.report(lint.rules(model, rule, mesh)))
    print(lint.report(lint.program(train, state, batch)))
    print(lint.report(lint.arrays(state)))

What it finds is worth a look; that it finds nothing proves nothing.
"""

from parallax.lint.arrays import arrays, fingerprint
from parallax.lint.finding import Finding, report
from parallax.lint.program import program
from parallax.lint.rules import device_bytes, rules

__all__ = ["Finding", "arrays", "device_bytes", "fingerprint", "program", "report", "rules"]
