"""The notebooks are the lessons' pages, cell by cell; `test_docs.py` runs these pages as a notebook
runs."""

import json
import re
import runpy
from collections.abc import Iterator

from doc_pages import PAGES, ROOT, blocks

FOLDER = ROOT / "docs" / "notebooks"
MAKER = runpy.run_path(str(ROOT / "tools" / "notebooks.py"))
LESSONS = MAKER["LESSONS"]


def read(lesson: str) -> dict:
    """A notebook."""
    return json.loads((FOLDER / f"{lesson}.ipynb").read_text(encoding="utf-8"))


def check_the_core_has_lessons() -> Iterator[str]:
    """And each has a notebook."""
    if set(LESSONS) != {"why-a-ring", "tensor", "pipeline", "zero", "context"}:
        yield f"tools/notebooks.py has the lessons {sorted(LESSONS)}"
    if odd := set(LESSONS) ^ {path.stem for path in FOLDER.iterdir()}:
        yield f"lessons without a notebook, or notebooks without a lesson: {sorted(odd)}"


def check_a_notebook_is_its_page() -> Iterator[str]:
    """Made anew it is the same. Its code and its outputs are those of the page, which the tests of
    pages run."""
    for lesson in LESSONS:
        page = ROOT / "docs" / f"{lesson}.md"
        text = (FOLDER / f"{lesson}.ipynb").read_text(encoding="utf-8")
        if text != MAKER["of_page"](page):
            yield f"{lesson}.ipynb is not its page: python tools/notebooks.py writes it"
        if page not in PAGES:
            yield f"{page.name} has no program, so no test runs it"
        found = blocks(page)
        code = [cell for cell in read(lesson)["cells"] if cell["cell_type"] == "code"]
        shows = [cell for cell in code if cell["source"][0].startswith(MAKER["SHOW"])]
        if not shows:
            yield f"{lesson}.ipynb shows no picture that its code draws"
        code = [cell for cell in code if cell not in shows]
        programs = ["".join(cell["source"]) + "\n" for cell in code]
        if programs != [block.text for block in found if block.language == "python"]:
            yield f"{lesson}.ipynb has other programs than {page.name}"
        printed = ["".join(output["text"]) for cell in code for output in cell["outputs"]]
        if printed != [
            block.text for block in found if block.language == "text" and block.previous == "python"
        ]:
            yield f"{lesson}.ipynb has other outputs than {page.name}"
        if len(text) >= 100_000:
            yield f"{lesson}.ipynb has {len(text)} bytes; needed fewer than 100,000"


def check_a_lesson_has_a_picture_and_its_links_lead_somewhere() -> Iterator[str]:
    """The pictures are those of tools/pictures.py, and each page links to its notebook."""
    for lesson in LESSONS:
        page = (ROOT / "docs" / f"{lesson}.md").read_text(encoding="utf-8")
        if f"](notebooks/{lesson}.ipynb)" not in page:
            yield f"{lesson}.md does not link to its notebook"
        cells = [cell for cell in read(lesson)["cells"] if cell["cell_type"] == "markdown"]
        prose = "\n".join("".join(cell["source"]) for cell in cells)
        links = [
            link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"\w+:|#", link)
        ]
        if not any(link.startswith("../pictures/") for link in links):
            yield f"{lesson}.ipynb has no picture"
        for link in links:
            if not (FOLDER / link.partition("#")[0]).exists():
                yield f"{lesson}.ipynb links to {link}, which is not there"


def check_a_notebook_has_the_parts_of_its_format() -> Iterator[str]:
    """Those that version 4.5 of the format requires."""
    for lesson in LESSONS:
        book = read(lesson)
        if (book["nbformat"], book["nbformat_minor"]) != (4, 5):
            yield f"{lesson}.ipynb is not of format 4.5"
        if len({cell["id"] for cell in book["cells"]}) != len(book["cells"]):
            yield f"{lesson}.ipynb has two cells of one id"
        for cell in book["cells"]:
            code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
            if (
                cell.keys() != {"id", "cell_type", "metadata", "source"} | code
                or not cell["source"]
            ):
                yield f"{lesson}.ipynb: a cell is empty, or has the parts {sorted(cell)}"
