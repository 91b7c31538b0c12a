"""Mutants drawn by a seed: every small change of an operator, a number or a name in the package, of
which some are taken.

A change is taken by the hash of the seed, the function's name, the operator and the text of its
statement, so that only code that changes is drawn anew, and a file that moves draws the same.
"""

import ast
import contextlib
import functools
import hashlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mutant import Definition, Mutant, definitions, place, span

LEFT_OUT = re.compile(r"parallax/(draw/|commands/|__main__)")
AXES = {"data": "tensor", "stage": "data", "tensor": "stage"}
SWAPPED = {
    ast.Add: ("+", "-", "+ and -"),
    ast.Sub: ("-", "+", "+ and -"),
    ast.Mult: ("*", "/", "* and /"),
    ast.Div: ("/", "*", "* and /"),
    ast.FloorDiv: ("//", "*", "* and /"),
    ast.Lt: ("<", "<=", "< and <="),
    ast.LtE: ("<=", "<", "< and <="),
    ast.Gt: (">", ">=", "< and <="),
    ast.GtE: (">=", ">", "< and <="),
    ast.And: ("and", "or", "and / or"),
    ast.Or: ("or", "and", "and / or"),
}
EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}


class Change(NamedTuple):
    """One change in a function.

    Attributes:
        operator: its kind, such as "+ and -".
        begin: the offset in the file of the bytes that are replaced.
        end: the offset after them.
        by: what takes their place.
        around: the nodes that hold it, the smallest first, the last one the statement.
    """

    operator: str
    begin: int
    end: int
    by: bytes
    around: list[tuple[int, int]]


def drawn(root: Path, count: int, seed: int) -> list[Mutant]:
    """`count` changes of the package under `root`: of each kind of operator in turn the one with
    the lowest hash.

    No two of them are in one function.
    """
    if not count:
        return []
    kinds: dict[str, list] = {}
    for ranked in sorted(_ranked(root, seed), key=lambda ranked: ranked[0]):
        kinds.setdefault(ranked[-1].operator, []).append(ranked[1:])
    found = {}
    for kind in itertools.cycle(sorted(kinds)):
        if len(found) == count or not any(kinds.values()):
            return list(found.values())
        while kinds[kind]:
            each, source, change = kinds[kind].pop(0)
            mutant = (
                None if (each.name, each.path) in found else _mutant(root, each, source, change)
            )
            if mutant:
                found[each.name, each.path] = mutant
                break
    raise AssertionError("itertools.cycle ended")


def _ranked(root: Path, seed: int) -> Iterator[tuple[str, Definition, bytes, Change]]:
    for each in (each for named in definitions(root).values() for each in named):
        if not isinstance(each.node, ast.FunctionDef) or LEFT_OUT.match(each.path.as_posix()):
            continue
        source, times = (root / each.path).read_bytes(), {}
        for change in changes(source, each.node):
            begin, end = change.around[-1]
            text = b"\0".join(
                [
                    str(seed).encode(),
                    each.name.encode(),
                    change.operator.encode(),
                    source[begin:end],
                ]
            )
            times[text] = times.get(text, 0) + 1  # a statement may have several changes of one kind
            yield hashlib.sha256(text + str(times[text]).encode()).hexdigest(), each, source, change


def _mutant(root: Path, each: Definition, source: bytes, change: Change) -> Mutant | None:
    """The change with the smallest text around it that stands in one place; None where the whole
    statement does not."""
    for begin, end in change.around:
        text, by = (
            source[begin:end],
            source[begin : change.begin] + change.by + source[change.end : end],
        )
        mutant = Mutant(each.name, text.decode(), by.decode(), " ".join(covering(root, each.path)))
        try:
            if place(mutant, root).begin == begin:
                return mutant
        except ValueError:
            continue
    return None


def changes(source: bytes, function: ast.FunctionDef) -> Iterator[Change]:
    """Every change in the body of a function that returns no text, but for messages and
    annotations."""
    if ast.unparse(function.returns or ast.Constant(None)) == "str" or function.name in (
        "__str__",
        "__repr__",
    ):
        return
    for statement in function.body[ast.get_docstring(function) is not None :]:
        yield from _in(source, statement, [])


def _in(source: bytes, node: ast.AST, around: list[tuple[int, int]]) -> Iterator[Change]:
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arguments):
        return
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
        yield from (change for child in node.body[1:] for change in _in(source, child, []))
        return
    if isinstance(node, ast.expr):
        around = [span(source, node), *around]
    elif isinstance(node, ast.stmt):
        begin, end = span(source, node)
        body = getattr(node, "body", None)
        around = [
            (begin, span(source, body[0])[0] if body else end)
        ]  # of a loop or a condition, its first line
    yield from _of(source, node, around)
    if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
        return  # a number below 0
    skipped = {id(node.annotation)} if isinstance(node, ast.AnnAssign) else set()
    for child in ast.iter_child_nodes(node):
        if id(child) not in skipped:
            yield from _in(source, child, around)


def _of(source: bytes, node: ast.AST, around: list[tuple[int, int]]) -> Iterator[Change]:
    """The changes of one node."""
    match node:
        case ast.BinOp(left, op, right) if (
            type(op) in SWAPPED and not _joins(left) and not _joins(right)
        ):
            yield _between(source, left, op, right, around)
        case ast.Compare(left, [op], [right]) if type(op) in SWAPPED:
            yield _between(source, left, op, right, around)
        case ast.BoolOp(op, [left, right, *_]):
            yield _between(source, left, op, right, around)
        case ast.UnaryOp(ast.USub(), ast.Constant(int(value))):
            yield Change("+ 1", *span(source, node), str(1 - value).encode(), around)
        case ast.Constant(value) if type(value) is int:
            yield Change("+ 1", *span(source, node), str(value + 1).encode(), around)
        case ast.Constant(str(value)) if value in AXES:
            yield Change("axis", *span(source, node), f'"{AXES[value]}"'.encode(), around)
        case ast.Slice(_, ast.Name() | ast.Attribute() | ast.BinOp() as upper, _):
            _, end = span(source, upper)
            yield Change("+ 1", end, end, b" + 1", around)
        case ast.Call(ast.Name(name) | ast.Attribute(_, name)) if name in EXTREMES:
            _, end = span(source, node.func)
            yield Change("min / max", end - len(name), end, EXTREMES[name].encode(), around)
        case ast.AugAssign() | ast.Expr(ast.Call()):
            yield Change("dropped", *span(source, node), b"pass", around)


def _between(source: bytes, left: ast.AST, op: ast.AST, right: ast.AST, around: list) -> Change:
    """The operator between two operands, changed to its counterpart."""
    old, new, kind = SWAPPED[type(op)]
    end = span(source, left)[1]
    begin = source.index(old.encode(), end, span(source, right)[0])
    return Change(kind, begin, begin + len(old), new.encode(), around)


def _joins(node: ast.AST) -> bool:
    """Whether `+` of it puts texts or lists one after another."""
    text = isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return text or isinstance(node, ast.List | ast.ListComp | ast.Tuple)


# Which tests a change is put to: those of the modules that import its own


def covering(root: Path, path: Path) -> list[str]:
    """The test files of the name of the file `path` or its package, and those that import it, by
    way of as few others as may be.

    Those of its name come first, then those that import the least beside it, and last those of the
    names of its users.
    """
    imports, name = _imports(root), path.with_suffix("").as_posix()
    reached, tests = {name}, []
    while not tests:
        users = {user for user, used in imports.items() if used & reached}
        tests = [user for user in users if user.startswith("tests/test_")]
        if users <= reached:
            break
        reached |= users
    named = [f"tests/test_{part}" for part in (path.stem, path.parent.name)]
    tests += [test for test in named if test in imports and test not in tests]
    other = lambda test: [not test.startswith(name) for name in named]
    tests.sort(key=lambda test: (other(test), len(imports[test]), test))
    users = sorted(
        f"tests/test_{Path(user).name}" for user, used in imports.items() if name in used
    )
    tests += [test for test in users if test in imports and test not in tests]
    return [f"{test.removeprefix('tests/')}.py" for test in tests]


@functools.cache
def _imports(root: Path) -> dict[str, set[str]]:
    """The files of `parallax` and `tests` (without suffix) that each of them imports."""
    files = [*(root / "parallax").rglob("*.py"), *(root / "tests").glob("*.py")]
    names = {path.relative_to(root).with_suffix("").as_posix() for path in files}
    return {
        name: _imported(ast.parse((root / f"{name}.py").read_bytes()), names) - {name}
        for name in names
    }


def _imported(tree: ast.AST, names: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            base = node.module.replace(".", "/")
            inside = [f"{base}/{alias.name}" for alias in node.names]
            found |= {base, f"{base}/__init__", *inside, *(f"{name}/__init__" for name in inside)}
        elif isinstance(node, ast.Import):
            found |= {alias.name.replace(".", "/") for alias in node.names}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "from parallax" in node.value
        ):
            with contextlib.suppress(
                SyntaxError
            ):  # a program that a test runs in a process of its own
                found |= _imported(ast.parse(node.value), names)
    # The package itself imports everything: only what is asked of a module by name counts.
    return (found & names) - {"parallax/__init__"}
