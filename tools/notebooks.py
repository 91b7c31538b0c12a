"""Makes a notebook of each lesson's page, in docs/notebooks: python tools/notebooks.py [FOLDER]."""

import json
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
LESSONS = ("why-a-ring", "tensor", "pipeline", "zero", "context")
LINK = "[This page as a notebook](notebooks/{lesson}.ipynb).\n"
ORIGIN = (
    "Made from [the page]({lesson}.md) of the documentation. It runs where "
    '`pip install -e ".[examples]"` was run in a clone.\n'
)
PICTURE = re.compile(r"draw\.\w+\(.*\"(\w+\.svg)\"\)")
SHOW = "from IPython.display import SVG"  # the first line of a cell that shows a picture
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def main() -> None:
    """Write the notebooks."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS / "notebooks"
    folder.mkdir(exist_ok=True)
    for lesson in LESSONS:
        (folder / f"{lesson}.ipynb").write_text(of_page(DOCS / f"{lesson}.md"), encoding="utf-8")
        print(f"{lesson}.ipynb")


def of_page(page: Path) -> str:
    """The notebook of a page: its programs are cells of code, and a text block after one is that
    cell's output.

    The page's link to the notebook becomes one to the page.
    """
    text = page.read_text(encoding="utf-8").replace(
        LINK.format(lesson=page.stem), ORIGIN.format(lesson=page.stem)
    )
    cells, prose, end = [], "", 0
    for match in BLOCK.finditer(text):
        language, body = match.groups()
        before = text[end : match.start()]
        if language == "python":
            cells += [written(prose + before), program(body)]
            prose = ""
        elif language == "text" and prose == "" and cells and not before.strip():
            cells[-1]["outputs"] = [
                {"name": "stdout", "output_type": "stream", "text": body.splitlines(keepends=True)}
            ]
        else:
            prose += before + match[0]
        end = match.end()
    cells.append(written(prose + text[end:]))
    cells = [cell for written_cell in cells for cell in (written_cell, *pictures_of(written_cell))]
    cells = [cell for cell in cells if cell["source"]]
    kept = [{"id": f"cell-{number}", **cell} for number, cell in enumerate(cells, 1)]
    notebook = {"cells": kept, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def written(text: str) -> dict[str, Any]:
    """A cell of prose. Its links lead where the page's do, from a folder further down."""
    moved = re.sub(r"(\]\()(?!\w+:|#)", r"\1../", text.strip("\n"))
    return {"cell_type": "markdown", "metadata": {}, "source": moved.splitlines(keepends=True)}


def pictures_of(cell: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells that show the pictures which a cell of code writes."""
    names = PICTURE.findall("".join(cell["source"])) if cell["cell_type"] == "code" else []
    return [program(f'{SHOW}\n\nSVG("{name}")') for name in names]


def program(text: str) -> dict[str, Any]:
    """A cell of code, not run."""
    source = text.rstrip("\n").splitlines(keepends=True)
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": source,
    }


if __name__ == "__main__":
    main()
