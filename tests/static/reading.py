"""How the package reads: the most that it may have of each thing that slows a reader down."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator

from imports import FILES

# A local name that does not say what it holds.
EMPTY_NAMES = {
    *("own", "each", "found", "made", "of", "does", "there", "here", "come", "held", "kept"),
    *("over", "rest", "also", "beside", "other"),
}
LAMBDA = 60  # characters; what is longer has a name
BODY = 40  # lines of code of a function, without comments and docstrings
PARAMETERS = 8  # of a public function
MOST = {
    "lambdas over 60 characters": 2,
    "functions over 40 lines": 8,
    "public functions with more than 8 parameters": 1,
    "local names that say nothing": 110,
    "public names of several files": 98,
}


def check_what_slows_a_reader_down_gets_less() -> Iterator[str]:
    """Each count is at most its figure. Lower the figure when you lower the count."""
    places = defaultdict(list)
    files_of_name = defaultdict(set)
    for module, path in FILES.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        for kind, line in _in_file(tree, text):
            places[kind].append(f"{module}:{line}")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                files_of_name[node.name].add(module)
    counts = Counter({kind: len(found) for kind, found in places.items()})
    counts["public names of several files"] = sum(
        len(files) > 1 for files in files_of_name.values()
    )
    for kind, most in MOST.items():
        if counts[kind] > most:
            where = ", ".join(places[kind][-5:])
            yield f"{counts[kind]} {kind}, more than {most}; among them {where}"


def _in_file(tree: ast.AST, text: str) -> Iterator[tuple[str, int]]:
    """Each kind of `MOST` that the file has, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda):
            source = ast.get_source_segment(text, node) or ""
            if len(" ".join(source.split())) > LAMBDA:
                yield "lambdas over 60 characters", node.lineno
        elif isinstance(node, ast.FunctionDef):
            if len(_lines_of_code(node)) > BODY:
                yield "functions over 40 lines", node.lineno
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if len(parameters) > PARAMETERS and not node.name.startswith("_"):
                yield "public functions with more than 8 parameters", node.lineno
            for _ in _local_names(node) & EMPTY_NAMES:
                yield "local names that say nothing", node.lineno


def _lines_of_code(function: ast.FunctionDef) -> set[int]:
    """The lines of a function's body on which an expression or a statement stands, without
    docstrings, also of its nested functions."""
    lines: set[int] = set()
    texts: set[int] = set()
    for node in (inner for statement in function.body for inner in ast.walk(statement)):
        if hasattr(node, "lineno"):
            lines |= {node.lineno, node.end_lineno}
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            texts |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines - texts


def _local_names(function: ast.FunctionDef) -> set[str]:
    """The names that a function binds, its parameters among them."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names
