"""A small fault: a text in one function of the package, and what stands there instead.

A mutant names its function without the module, and the text that it replaces. Both survive a file
that moves. Where the function or the text is gone, or the text stands in two places, `place` says
so.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault.

    Attributes:
        name: of a function, a method or a class, as its module knows it: `pin_bits`,
            `Checkpoints.save`.
        replaces: a text that stands once in the functions of this name, in the whole package.
        by: the text that takes its place.
        tests: the files or tests of `tests/` that should catch it, as pytest takes them.
        long: these tests are marked `long`.
        bits: it changes nothing but last bits; the tests marked `bits` catch it, with a user's
            compile flags.
    """

    name: str
    replaces: str
    by: str
    tests: str
    long: bool = False
    bits: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """The fault alone."""
        return self.name, self.replaces, self.by


class Definition(NamedTuple):
    """A function, a method or a class in the package.

    Attributes:
        name: as its module knows it.
        path: of the file, from the root of the repository.
        node: its syntax tree.
        begin: the offset of its first byte in the file.
        source: its bytes.
    """

    name: str
    path: Path
    node: ast.AST
    begin: int
    source: bytes


class Place(NamedTuple):
    """Where a mutant applies: the file, from the root of the repository, and the offset of the byte
    where its text begins."""

    path: Path
    begin: int
    end: int

    @property
    def module(self) -> str:
        """The file's module: `parallax.collectives.ring`."""
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def definitions(root: Path) -> dict[str, list[Definition]]:
    """All definitions of the package under `root`, by name."""
    found: dict[str, list[Definition]] = {}
    for path in sorted((root / "parallax").rglob("*.py")):
        source = path.read_bytes()
        for name, node in _named(ast.parse(source)):
            begin, end = span(source, node)
            found.setdefault(name, []).append(
                Definition(name, path.relative_to(root), node, begin, source[begin:end])
            )
    return found


def _named(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _named(node, f"{prefix}{node.name}.")


def span(source: bytes, node: ast.AST) -> tuple[int, int]:
    """The offsets of a node's first byte, its decorators' included, and of the byte after its
    last."""
    lines = _line_starts(source)
    first = min([node, *getattr(node, "decorator_list", ())], key=lambda node: node.lineno)
    return lines[first.lineno - 1] + first.col_offset, lines[
        node.end_lineno - 1
    ] + node.end_col_offset


@functools.lru_cache(maxsize=4)
def _line_starts(source: bytes) -> list[int]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def place(mutant: Mutant, root: Path) -> Place:
    """Where the mutant applies. Raises `ValueError` where its text stands nowhere, or more than
    once."""
    named = definitions(root).get(mutant.name, [])
    if not named:
        raise ValueError(
            f"{mutant.name}: the package has no function, method or class of this name. Correct or "
            "drop the mutant."
        )
    pattern = _laid_out_anyhow(mutant.replaces)
    found = [
        Place(each.path, each.begin + match.start(), each.begin + match.end())
        for each in named
        for match in pattern.finditer(each.source)
    ]
    if len(found) != 1:
        where = ", ".join(place.module for place in found) or "none"
        raise ValueError(
            f"{mutant.name}: needs {mutant.replaces!r} once in the functions of this name; it is "
            f"there {len(found)} times ({where}). Choose the text anew."
        )
    return found[0]


@functools.cache
def _laid_out_anyhow(text: str) -> re.Pattern[bytes]:
    """Matches `text` however a formatter breaks its lines: spaces, and a comma before a bracket
    closes."""
    pattern = r"\s+".join(re.escape(word) for word in text.split())
    pattern = re.sub(r"\\([(\[{])", r"\\\1\\s*", pattern)
    pattern = re.sub(r"\\([)\]}])", r",?\\s*\\\1", pattern)
    before, after = (" *" if text[:1] == " " else ""), (r"\s" if text[-1:].isspace() else "")
    return re.compile((before + pattern + after).encode())


def mutated(mutant: Mutant, root: Path) -> tuple[Place, bytes]:
    """Where the mutant applies, and the bytes of that file with the fault in it. Raises as `place`
    does."""
    found = place(mutant, root)
    source = (root / found.path).read_bytes()
    return found, source[: found.begin] + mutant.by.encode() + source[found.end :]
