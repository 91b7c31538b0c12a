"""The command line: plans how a model is split over devices, compiles a step for machines that are
not here, and finds the first wrong value of a step that is split over devices.

Each command imports what it needs when it runs, so that `--help` is fast.
"""

import argparse
import sys
from collections.abc import Sequence

from parallax import __version__
from parallax.commands.check import add_checks
from parallax.commands.compile import add_compile
from parallax.commands.options import Help
from parallax.commands.plan import add_plan

DESCRIPTION = """\
Plan how to split a model over devices, compile the step for machines that you do
not have, and find the first value that differs from one device.

examples:
  parallax plan --model xl --devices 64 --hardware a100
  parallax plan --layout data=8,microbatches=8 --hardware h100 --islands 4
  parallax plan path/to/file.py:function --mesh data=256
  parallax compile --layout data=8 --target v5e:2x4
  parallax compare --layout data=2,stage=2,tensor=2
  parallax bisect --layout data=2,tensor=2

`parallax COMMAND --help` lists the options of a command.
`python -m parallax` is the same program.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that `arguments` name, and prints its result. By default `arguments` are the
    arguments of the process. Returns the exit status: 0, or 2 if the request is wrong; in that case
    the error is printed on stderr.
    """
    options = parser().parse_args(arguments)
    try:
        print(options.run(options))
    # A `ValueError` is about a value that does not fit, an `ImportError` about an optional package
    # that is not installed.
    except (ImportError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line. The parsed options have an attribute `run`: the
    function of the command."""
    top = argparse.ArgumentParser(prog="parallax", description=DESCRIPTION, formatter_class=Help)
    top.add_argument("--version", action="version", version=f"parallax {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for add in (add_plan, add_compile, add_checks):
        add(commands)
    return top


if __name__ == "__main__":
    sys.exit(main())
