"""What the pages say of the repository is so: links, files, tests, messages and programs that they
name are there."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from doc_pages import DOCS, ROOT, blocks

MODULES = sorted(
    path for path in (ROOT / "parallax").rglob("*.py") if not path.name.startswith("__")
)
WRITTEN = sorted(
    [
        *DOCS,
        *ROOT.glob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
# Where links lead outside. A link to another host is added here after somebody has opened it.
HOSTS = {"docs.jax.dev", "docs.nvidia.com", "github.com", "jobset.sigs.k8s.io"}


def prose(page: Path) -> str:
    """A page without its code."""
    text = re.sub(
        r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return re.sub(r"`[^`\n]*`", "`", text)


def anchors(page: Path) -> set[str]:
    """The ids of a page's headings, as Python-Markdown makes them."""
    text = re.sub(
        r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles
    }


def shown(page: Path) -> str:
    """A page's path from the root."""
    return page.relative_to(ROOT).as_posix()


def check_links_lead_somewhere() -> Iterator[str]:
    """To a file, a heading, or a host that somebody has opened."""
    for page in WRITTEN:
        text = prose(page)
        named = re.findall(r"^\[([^]]+)\]: (\S+)$", text, re.MULTILINE)
        used = {
            name or words for words, name in re.findall(r"(?<!!)\[([^]\n]+)\]\[([^]\n]*)\]", text)
        }
        if odd := used ^ {name for name, _ in named}:
            yield f"{shown(page)}: links by name that are not defined, or not used: {sorted(odd)}"
        for link in re.findall(r"\]\(([^)\s]+)\)", text) + [link for _, link in named]:
            if problem := wrong_link(page, link):
                yield f"{shown(page)} links to {link}: {problem}"


def wrong_link(page: Path, link: str) -> str:
    """What is wrong with a link, or nothing."""
    if re.match(r"\w+:", link):
        return "" if urlsplit(link).hostname in HOSTS else "open it, and name its host in HOSTS"
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
        return "no such file"
    if page in DOCS and not target.resolve().is_relative_to(ROOT / "docs"):
        return "the file is no part of the site"
    if anchor and anchor not in anchors(target):
        return f"{target.name} has the headings {sorted(anchors(target))}"
    return ""


def check_files_that_pages_name_are_there() -> Iterator[str]:
    """Paths of the repository, wherever a page names them."""
    for page in WRITTEN:
        text = page.read_text(encoding="utf-8")
        for name in re.findall(
            r"(?<![\w/.])((?:benchmarks|docs|examples|parallax|tests)/[\w./-]+\.\w+)", text
        ):
            if not any((folder / name).exists() for folder in (ROOT, page.parent)):
                yield f"{shown(page)} names {name}, which is not there"


def check_messages_that_no_line_raises_stand_in_the_source() -> Iterator[str]:
    """Those of errors.md that no program of the page raises."""
    quoted = [
        block
        for block in blocks(ROOT / "docs" / "errors.md")
        if block.language == "text" and block.previous != "python"
    ]
    source = "\n".join(texts(ast.parse(path.read_text(encoding="utf-8"))) for path in MODULES)
    if len(quoted) <= 4:
        yield (
            "errors.md quotes fewer than five messages that it does not raise: does `blocks` "
            "still read it?"
        )
    for block in quoted:
        for piece in filter(None, (" ".join(piece.split()) for piece in block.text.split("..."))):
            if piece not in source:
                yield (
                    f"errors.md, line {block.line}: no message of parallax/ has the words {piece!r}"
                )


def check_sections_of_errors_have_the_words_of_their_message() -> Iterator[str]:
    """So that a reader finds a message by its first words; `...` stands for what differs."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    sections = re.findall(r"^### (.*)\n((?:(?!##).*\n)*)", page, re.MULTILINE)
    for title, text in sections:
        shown_words = " ".join(
            "".join(re.findall(r"^```(?:text|console)\n(.*?)^```", text, re.M | re.S)).split()
        )
        for piece in filter(None, map(str.strip, title.split("..."))) if shown_words else ():
            if piece.strip(" ,;:.") not in shown_words.replace("`", ""):
                yield f"errors.md: no message under {title!r} has the words {piece!r}"


def texts(tree: ast.AST) -> str:
    """All strings of a module; a f-string with a space for what it fills in."""
    joined = [n for n in ast.walk(tree) if isinstance(n, ast.JoinedStr)]
    plain = [
        n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]
    filled = [
        "".join(v.value if isinstance(v, ast.Constant) else "\0" for v in n.values) for n in joined
    ]
    return "\n".join(" ".join(text.split()) for text in [*plain, *filled])


def check_every_promise_names_a_test_a_figure_and_a_limit() -> Iterator[str]:
    """On the page on reliability; each test that it names is there."""
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    tables = re.findall(
        r"^\| promise \| test \| figure \| limit \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", page, re.MULTILINE
    )
    rows = [
        [cell.strip() for cell in row.strip("| ").split(" | ")]
        for table in tables
        for row in table.splitlines()
    ]
    if len(tables) != 4 or len(rows) <= 40:
        yield (
            f"reliability.md has {len(tables)} tables of promises with {len(rows)} rows; needed 4 "
            "with more than 40"
        )
    for row in rows:
        complete = len(row) == 4 and min(len(row[0]), len(row[2])) > 5 and row[3]
        if not complete or not re.fullmatch(r"`test_\w+\.py::test_\w+`", row[1]):
            yield f"reliability.md: a promise needs a test, a figure and a limit; got {row}"
    for file, name in re.findall(r"`(test_\w+\.py)::(test_\w+)`", page):
        if name not in functions(ROOT / "tests" / file):
            yield f"reliability.md names {file}::{name}, which is not there"


def functions(path: Path) -> set[str]:
    """The names of the functions of a Python file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def check_lines_of_code_fit_the_column() -> Iterator[str]:
    """At most 88 characters, which a page has at 1,280 pixels, but for what a command prints."""
    for page in [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for block in blocks(page):
            for number, line in enumerate(block.text.splitlines(), start=block.line + 1):
                if len(line) > 88 and block.language != "console":
                    yield f"{shown(page)}:{number} has {len(line)} characters of code; needed 88"


def check_every_page_is_in_the_navigation() -> Iterator[str]:
    """Of the site."""
    settings = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    named = set(re.findall(r"[\w/-]+\.md", str(settings["project"]["nav"])))
    if odd := named ^ {page.relative_to(ROOT / "docs").as_posix() for page in DOCS}:
        yield f"pages that are not there, or not in the navigation of zensical.toml: {sorted(odd)}"


def check_every_module_is_in_the_api() -> Iterator[str]:
    """Once, on a page of docs/api."""
    pages = "".join(
        page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")
    )
    on_pages = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    inner = {
        "commands": set(),
        "optimizers": {"wrappers", "elementwise"},
        "lint": {"finding", "programs", "rule_sets"},
    }
    public = [path for path in MODULES if path.stem in inner.get(path.parent.name, {path.stem})]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in public}
    if odd := (set(on_pages) - {"parallax.lint", "parallax.bisect"}) ^ names:
        yield f"modules that are not there, or not on a page of docs/api: {sorted(odd)}"
    if len(on_pages) != len(set(on_pages)):
        yield "a module stands twice in docs/api"


def check_every_program_is_in_the_gallery() -> Iterator[str]:
    """Each program of examples/ has a row, and its text."""
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    programs = {
        path.name
        for path in (ROOT / "examples").glob("*.py")
        if 'if __name__ == "__main__":' in path.read_text()
    }
    rows = set(re.findall(r"^\| \[?`(\w+\.py)`", page, re.MULTILINE))
    shown_whole = {f"{name}.py" for name in re.findall(r'--8<-- "examples/(\w+)\.py"', page)}
    if odd := (rows ^ programs) | (shown_whole ^ (programs - {"gpt2.py"})):
        yield f"gallery.md and examples/ differ in {sorted(odd)}"
