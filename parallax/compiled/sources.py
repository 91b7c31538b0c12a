"""Which line of a user's program an instruction comes from, by the tables that a compiled program's text carries."""

import re
from collections.abc import Callable

FILE = re.compile(r'^(\d+) "(.*)"$')
LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)")
FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?")
NAMED = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
OF_COLLECTIVES = "/parallax/collectives/"


def read(text: str) -> Callable[[str], str]:
    """A function from an instruction's attributes to "file:line", empty where the text does not say.

    The frame is the innermost one outside of the package's collectives: who sends, not how.
    """
    files: dict[str, str] = {}
    lines: dict[str, str] = {}
    frames: dict[str, tuple[str, str]] = {}
    table = ""
    for line in text.splitlines():
        table = (
            line if line in ("FileNames", "FileLocations", "StackFrames") else table if line else ""
        )
        if table == "FileNames" and (found := FILE.match(line)):
            files[found[1]] = found[2]
        elif table == "FileLocations" and (found := LOCATION.match(line)):
            lines[found[1]] = f"{files[found[2]]}:{found[3]}"
        elif table == "StackFrames" and (found := FRAME.match(line)):
            # A parent is written one higher than its number, so that 1 is none.
            frames[found[1]] = lines[found[2]], str(int(found[3] or 1) - 1)
    known: dict[str, str] = {}

    def line_of(attributes: str) -> str:
        found = re.search(r"stack_frame_id=(\d+)", attributes)
        if not found:
            named = NAMED.search(attributes)
            return f"{named[1]}:{named[2]}" if named else ""
        if found[1] not in known:
            known[found[1]] = _outside(found[1], frames)
        return known[found[1]]

    return line_of


def _outside(frame: str, frames: dict[str, tuple[str, str]]) -> str:
    first, _ = frames.get(frame, ("", ""))
    while frame in frames:
        line, frame = frames[frame]
        if OF_COLLECTIVES not in line.replace("\\", "/"):
            return line
    return first
