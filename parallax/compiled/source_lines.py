"""Finds the source line of an instruction in the tables of a compiled program's text.

The text has three tables: of file names, of locations (a file and a line), and of stack frames (a
location and the frame that called it). An instruction has the number of its innermost frame.
"""

import re
from collections.abc import Callable

FILE = re.compile(r'^(\d+) "(.*)"$')
LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)")
FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
NAMED = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
OF_COLLECTIVES = "/parallax/collectives/"


def read(text: str) -> Callable[[str], str]:
    """Returns a function from an instruction's attributes to the text "file:line", or to "" if the
    program's text does not tell the line.

    The line is the innermost line of the stack that is outside of `parallax/collectives`: the line
    that calls a ring, and not the line of a hop inside the ring.
    """
    files: dict[str, str] = {}
    lines: dict[str, str] = {}
    frames: dict[str, tuple[str, str]] = {}
    table = ""  # the name of the table that contains the line
    for line in text.splitlines():
        # An empty line ends a table.
        if not line or line in ("FileNames", "FileLocations", "StackFrames"):
            table = line
        elif table == "FileNames" and (row := FILE.match(line)):
            files[row[1]] = row[2]
        elif table == "FileLocations" and (row := LOCATION.match(line)):
            lines[row[1]] = f"{files[row[2]]}:{row[3]}"
        elif table == "StackFrames" and (row := FRAME.match(line)):
            # A parent is written as its number plus one; 1 stands for a frame without a parent.
            frames[row[1]] = lines[row[2]], str(int(row[3] or 1) - 1)
    known: dict[str, str] = {}

    def line_of(attributes: str) -> str:
        """Returns the line of an instruction with these attributes, as "file.py:12", or ""."""
        frame = re.search(r"stack_frame_id=(\d+)", attributes)
        if frame is None:  # as in older versions of XLA, which write the line itself
            named = NAMED.search(attributes)
            return f"{named[1]}:{named[2]}" if named else ""
        if frame[1] not in known:
            known[frame[1]] = _outside(frame[1], frames)
        return known[frame[1]]

    return line_of


def _outside(frame: str, frames: dict[str, tuple[str, str]]) -> str:
    """Returns the innermost line of a stack that is outside of the package's collectives, as
    "file:line". If all lines are in the package's collectives, returns the innermost line. For an
    unknown frame, returns "".

    `frame` is the number of the innermost frame. `frames` has, for each frame, its line and the
    number of the frame that called it.
    """
    first, _ = frames.get(frame, ("", ""))
    while frame in frames:
        line, frame = frames[frame]
        if OF_COLLECTIVES not in line.replace("\\", "/"):
            return line
    return first
