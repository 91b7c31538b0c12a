"""What the documentation shows is so: its programs run, print and raise what stands beside them
(`doc_pages.py`)."""

import os
import runpy
import subprocess
import sys

import pytest
from doc_pages import PAGES, ROOT, blocks

# These compile whole layers and steps, and take 4 s each on two cores; the others take 2.
LONGER = {
    "bisect.md",
    "context.md",
    "experts.md",
    "islands.md",
    "llama.md",
    "many-processes.md",
    "pipeline.md",
    "precision-and-memory.md",
    "same-bits.md",
    "sequence.md",
    "tensor.md",
    "zero.md",
}


def in_a_process(*pages, folder):
    """Run pages in one new process, as a reader's: eight virtual devices, JAX's defaults."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    # A page that begins a job comes first: JAX lets no job begin once a device was used.
    begins = "\njob = processes.initialize("
    ordered = sorted(pages, key=lambda page: begins not in page.read_text("utf-8"))
    command = [sys.executable, ROOT / "tests" / "doc_pages.py", *map(str, ordered)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.programs
def test_what_pages_show_is_so(tmp_path):
    quick = [page for page in PAGES if page.name not in LONGER]
    assert len(quick) >= 8
    in_a_process(*quick, folder=tmp_path)


@pytest.mark.programs
def test_what_the_longer_pages_show_is_so(tmp_path):
    in_a_process(*(page for page in PAGES if page.name in LONGER), folder=tmp_path)


@pytest.mark.programs
def test_what_the_readme_shows_is_so():
    """The first program is run by `test_readme.py`; fragments follow on examples/pipeline.py, of
    which they speak."""
    found = [block.text for block in blocks(ROOT / "README.md") if block.language == "python"]
    programs = [text for text in found if text.startswith(("import", "from"))]
    for program in programs[1:]:
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=True,
            timeout=300,
        )
    for fragment in set(found) - set(programs):
        exec(fragment, runpy.run_path(str(ROOT / "examples" / "pipeline.py")))


@pytest.mark.programs
def test_pictures_are_those_that_the_script_draws(tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "pictures.py"), str(tmp_path)]
    subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        timeout=300,
        capture_output=True,
    )
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
