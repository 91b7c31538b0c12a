"""Draws sentences from docstrings and pages, for a reader who judges each by itself: python
tools/sentences.py --seed 1."""

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Print the sentences, with the places they are from."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--number", type=int, default=200)
    arguments = parser.parse_args()
    found = sorted(set(sentences()))
    print(f"{len(found):,} sentences; {arguments.number} drawn with seed {arguments.seed}")
    for place, sentence in random.Random(arguments.seed).sample(found, arguments.number):
        print(f"{place}: {sentence}")


def sentences() -> Iterator[tuple[str, str]]:
    """The sentences of all docstrings of the package and the examples, and of all pages, each with
    its file."""
    for path in [*(ROOT / "parallax").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                text := ast.get_docstring(node)
            ):
                yield from of_text(str(path.relative_to(ROOT)), text)
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        yield from of_text(
            str(path.relative_to(ROOT)),
            re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL),
        )


def of_text(place: str, text: str) -> Iterator[tuple[str, str]]:
    """Sentences of six words or more; lines of code, tables and headings are none."""
    for paragraph in re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\w+: ", text):
        lines = [line for line in paragraph.splitlines() if not re.match(r"\s{4,}\S|[|#]", line)]
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z`])", " ".join(" ".join(lines).split())):
            if len(sentence.split()) >= 6:
                yield place, sentence


if __name__ == "__main__":
    main()
