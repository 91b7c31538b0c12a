"""The documentation's pages as programs: their fenced blocks, and a page that is run as a reader
would type it.

All of a page's ```python blocks run one after another, in one namespace. A ```text block right
after one holds what it prints, or, where it begins with an error's name, what it raises; `...`
stands for anything.

    python tests/doc_pages.py docs/zero.md docs/tensor.md        runs pages in this process
"""

import contextlib
import io
import itertools
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [page for page in DOCS if "```python" in page.read_text(encoding="utf-8")]


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line on which the text begins."""

    language: str
    text: str
    line: int
    previous: str = ""  # the language of the block right before, which may be folded


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, those inside lists and notes too."""
    found: list[Block] = []
    end = 0
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
        line = text[: match.start(3)].count("\n")
        body = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        between = text[end : match.start()].strip()
        follows = found and between in ("", "</details>")
        found.append(Block(match[2], body, line, found[-1].language if follows else ""))
        end = match.end()
    return found


def shows(shown: str, got: str) -> bool:
    """Whether `got` is what a page shows, `...` standing for anything, and any white space for any
    other."""
    pieces = [re.escape(" ".join(piece.split())) for piece in shown.split("...")]
    return (
        re.fullmatch(r"\s*" + r".*".join(pieces) + r"\s*", " ".join(got.split()), re.DOTALL)
        is not None
    )


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
        error = shown and re.match(
            r"(\w*Error|Refused|UnfitOptimizer|Misused|CannotRun|OverBudget): ", shown
        )
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
            assert shows(shown, printed.getvalue()), (
                f"{where} prints\n{printed.getvalue()}\nand the page shows\n{shown}"
            )


if __name__ == "__main__":
    for each in sys.argv[1:]:
        run(Path(each))
        print("ran", each, flush=True)
