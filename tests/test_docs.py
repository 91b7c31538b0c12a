"""What the documentation shows is so: its programs run, print and raise what stands beside them; its links lead somewhere.

A page is run as a reader would type it: all of its ```python blocks, one after another, in one namespace. A ```text block right
after one holds what it prints, or, where it begins with an error's name, what it raises; `...` stands for anything.
"""

import ast
import contextlib
import io
import itertools
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [page for page in DOCS if "```python" in page.read_text(encoding="utf-8")]
# These compile whole layers and steps, and take 4 s each on two cores; the others take 2.
SLOW = {
    "bisect.md",
    "context.md",
    "experts.md",
    "islands.md",
    "llama.md",
    "many-processes.md",
    "pipeline.md",
    "precision-and-memory.md",
    "sequence.md",
    "tensor.md",
    "zero.md",
}
MODULES = sorted(path for path in (ROOT / "parallax").rglob("*.py") if not path.name.startswith("__"))


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line on which the text begins."""

    language: str
    text: str
    line: int
    previous: str = ""  # the language of the block that ends two lines before this one's fence, or less


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, those inside lists and notes too."""
    found: list[Block] = []
    ended = -9
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
        line = text[: match.start(3)].count("\n")
        body = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        found.append(Block(match[2], body, line, found[-1].language if line - ended <= 3 else ""))
        ended = line + match[3].count("\n")
    return found


def shows(shown: str, got: str) -> bool:
    """Whether `got` is what a page shows, `...` standing for anything, and any white space for any other."""
    pieces = [re.escape(" ".join(piece.split())) for piece in shown.split("...")]
    return re.fullmatch(r"\s*" + r".*".join(pieces) + r"\s*", " ".join(got.split()), re.DOTALL) is not None


def run(page: Path) -> None:
    """Run a page, and compare what it shows. The programs' lines keep the page's numbers."""
    found = blocks(page)
    names: dict = {"__name__": "__main__"}
    for block, after in itertools.pairwise([*found, Block("", "", 0)]):
        if block.language != "python":
            continue
        code = compile("\n" * block.line + block.text, str(page), "exec")
        shown = after.text if after.language == "text" and after.previous == "python" else None
        printed, where = io.StringIO(), f"{page.name}, line {block.line}"
        error = shown and re.match(r"(\w*Error|Refused|Mixes|Misused|CannotRun|OverBudget): ", shown)
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, names)
        except Exception as raised:
            if not error:
                raise
            got = f"{type(raised).__name__}: {raised}"
            assert shows(shown, got), f"{where} raises\n{got}\nand the page shows\n{shown}"
            continue
        assert not error, f"{where} raises nothing, and the page shows\n{shown}"
        if shown is not None:
            assert shows(shown, printed.getvalue()), f"{where} prints\n{printed.getvalue()}\nand the page shows\n{shown}"


def in_a_process(*pages: Path, folder: Path) -> None:
    """Run pages in one new process, as a reader's: eight virtual devices, JAX's defaults."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, *map(str, pages)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr[-6000:]


@pytest.mark.slow
def test_what_pages_show_is_so(tmp_path):
    quick = [page for page in PAGES if page.name not in SLOW]
    assert len(quick) >= 8
    in_a_process(*quick, folder=tmp_path)


@pytest.mark.slow
def test_what_the_longer_pages_show_is_so(tmp_path):
    in_a_process(*(page for page in PAGES if page.name in SLOW), folder=tmp_path)


def test_what_the_readme_shows_is_so():
    """The first program is run by `test_readme.py`; fragments follow on examples/pipeline.py, of which they speak."""
    found = [block.text for block in blocks(ROOT / "README.md") if block.language == "python"]
    programs = [text for text in found if text.startswith(("import", "from"))]
    for program in programs[1:]:
        subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=300)
    for fragment in set(found) - set(programs):
        exec(fragment, runpy.run_path(str(ROOT / "examples" / "pipeline.py")))


def test_messages_that_no_line_raises_stand_in_the_source():
    quoted = [b for b in blocks(ROOT / "docs" / "errors.md") if b.language == "text" and b.previous != "python"]
    texts = "\n".join(_texts(ast.parse(path.read_text(encoding="utf-8"))) for path in MODULES)
    assert len(quoted) > 4
    for block in quoted:
        for piece in filter(None, (" ".join(piece.split()) for piece in block.text.split("..."))):
            assert piece in texts, f"errors.md, line {block.line}: no message of parallax/ has the words {piece!r}"


def _texts(tree: ast.AST) -> str:
    """All strings of a module; a f-string with a space for what it fills in."""
    joined = [n for n in ast.walk(tree) if isinstance(n, ast.JoinedStr)]
    plain = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    filled = ["".join(v.value if isinstance(v, ast.Constant) else "\0" for v in n.values) for n in joined]
    return "\n".join(" ".join(text.split()) for text in [*plain, *filled])


WRITTEN = sorted([*DOCS, *ROOT.glob("*.md"), *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
# Where links lead outside. A link to another host is added here after somebody has opened it.
HOSTS = {"docs.jax.dev", "docs.nvidia.com", "github.com", "jobset.sigs.k8s.io"}


def prose(page: Path) -> str:
    """A page without its code."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "`", text)


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = prose(page)
    named = re.findall(r"^\[([^]]+)\]: (\S+)$", text, re.MULTILINE)
    used = {name or shown for shown, name in re.findall(r"(?<!!)\[([^]\n]+)\]\[([^]\n]*)\]", text)}
    assert used == {name for name, _ in named}
    for link in re.findall(r"\]\(([^)\s]+)\)", text) + [link for _, link in named]:
        if re.match(r"\w+:", link):
            host = urlsplit(link).hostname
            assert host in HOSTS, f"{page.name} links to {link}: open it, and name its host in HOSTS"
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}, which is not there"
        if page in DOCS:
            assert target.resolve().is_relative_to(ROOT / "docs"), f"{page.name} links to {link}, which is no part of the site"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}; {target.name} has {sorted(anchors(target))}"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_pages_name_are_there(page):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"(?<![\w/.])((?:benchmarks|docs|examples|parallax|tests)/[\w./-]+\.\w+)", text)
    folders = (ROOT, page.parent)
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


def anchors(page: Path) -> set[str]:
    """The ids of a page's headings, as Python-Markdown makes them."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_every_promise_names_a_test_a_figure_and_a_limit():
    """On the page on reliability; each test that it names is there."""
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| promise \| test \| figure \| limit \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", page, re.MULTILINE)
    rows = [[cell.strip() for cell in row.strip("| ").split(" | ")] for table in tables for row in table.splitlines()]
    assert len(tables) == 4
    assert len(rows) > 40
    for row in rows:
        assert len(row) == 4, row
        promise, test, figure, limit = row
        assert re.fullmatch(r"`test_\w+\.py::test_\w+`", test), row
        assert min(len(promise), len(figure)) > 5, row
        assert limit, row
    for file, name in re.findall(r"`(test_\w+\.py)::(test_\w+)`", page):
        path = ROOT / "tests" / file
        functions = {
            node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"reliability.md names {file}::{name}, which is not there"


def test_every_page_is_in_the_navigation():
    settings = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    named = re.findall(r"[\w/-]+\.md", str(settings["project"]["nav"]))
    assert sorted(named) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in DOCS)


def test_every_room_is_in_the_api():
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    inner = {"elementwise": {"shards"}, "lint": {"live_arrays", "finding", "programs", "rule_sets"}}
    rooms = [path for path in MODULES if path.stem in inner.get(path.parent.name, {path.stem})]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in rooms}
    assert len(shown) == len(set(shown))
    assert set(shown) - {"parallax.lint", "parallax.bisect"} == names


def test_every_program_is_in_the_gallery():
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    programs = {path.name for path in (ROOT / "examples").glob("*.py") if 'if __name__ == "__main__":' in path.read_text()}
    assert set(re.findall(r"^\| \[?`(\w+\.py)`", page, re.MULTILINE)) == programs
    assert {f"{name}.py" for name in re.findall(r'--8<-- "examples/(\w+)\.py"', page)} == programs - {"gpt2.py"}


@pytest.mark.slow
def test_pictures_are_those_that_the_script_draws(tmp_path):
    command = [sys.executable, str(ROOT / "docs" / "pictures.py"), str(tmp_path)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=300, capture_output=True)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: ".".join(path.relative_to(ROOT).with_suffix("").parts))
def test_every_public_name_has_a_docstring(path):
    module = ast.parse(path.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.ClassDef
    forms = [node for node in ast.walk(module) if isinstance(node, kinds) and "overload" in map(ast.unparse, node.decorator_list)]
    public = [node for node in module.body if isinstance(node, kinds) and not node.name.startswith("_") and node not in forms]
    methods = [n for c in public if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, kinds)]
    named = [*public, *(method for method in methods if not method.name.startswith("_"))]
    assert [node.name for node in named if not ast.get_docstring(node)] == []
    assert ast.get_docstring(module)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        run(Path(each))
        print("ran", each, flush=True)
