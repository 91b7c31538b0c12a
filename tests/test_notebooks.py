"""The notebooks are the lessons' pages, cell by cell; `test_docs.py` runs these pages as a notebook runs, in one namespace."""

import json
import re
import runpy
from pathlib import Path

import pytest
import test_docs

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))
LESSONS = NOTEBOOKS["LESSONS"]


def read(lesson):
    return json.loads((ROOT / "docs" / "notebooks" / f"{lesson}.ipynb").read_text(encoding="utf-8"))


def test_the_core_has_lessons():
    assert set(LESSONS) == {"why-a-ring", "tensor", "pipeline", "zero", "context"}
    assert {path.stem for path in (ROOT / "docs" / "notebooks").iterdir()} == set(LESSONS)


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_notebook_is_its_page(lesson):
    """Made anew it is the same. Its code and its outputs are those of the page, which the tests of pages run."""
    page = ROOT / "docs" / f"{lesson}.md"
    text = (ROOT / "docs" / "notebooks" / f"{lesson}.ipynb").read_text(encoding="utf-8")
    assert text == NOTEBOOKS["of_page"](page), "python docs/notebooks.py writes it"
    assert page in test_docs.PAGES
    blocks = test_docs.blocks(page)
    code = [cell for cell in read(lesson)["cells"] if cell["cell_type"] == "code"]
    assert ["".join(cell["source"]) + "\n" for cell in code] == [b.text for b in blocks if b.language == "python"]
    shown = [output["text"] for cell in code for output in cell["outputs"]]
    expected = [b.text for b in blocks if b.language == "text" and b.previous == "python"]
    assert ["".join(lines) for lines in shown] == expected
    assert len(text) < 100_000


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_has_a_picture_and_its_links_lead_somewhere(lesson):
    """The pictures are those of docs/pictures.py, and each page links to its notebook."""
    page = (ROOT / "docs" / f"{lesson}.md").read_text(encoding="utf-8")
    assert f"](notebooks/{lesson}.ipynb)" in page
    prose = "\n".join("".join(cell["source"]) for cell in read(lesson)["cells"] if cell["cell_type"] == "markdown")
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"\w+:|#", link)]
    assert any(link.startswith("../pictures/") for link in links)
    for link in links:
        assert (ROOT / "docs" / "notebooks" / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_notebook_has_the_parts_of_its_format(lesson):
    """Those that version 4.5 of the format requires."""
    book = read(lesson)
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    for cell in book["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == {"id", "cell_type", "metadata", "source"} | code
        assert cell["source"], "no cell is empty"
