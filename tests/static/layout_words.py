"""A layout's words are read in one function, `layout.words.rows`: found in the syntax tree of every file of the package, the
examples and the benchmarks.

A word is a field of `Layout` that stands for an algorithm, and `stage` where it is asked whether there is more than one. Sizes
are numbers and may be counted with.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from parallax.layout import words
from parallax.layout.nearest import KNOWN

ROOT = Path(__file__).resolve().parents[2]
WORDS = set(KNOWN)
READER = ROOT / "parallax" / "layout" / "words.py"
FILES = [path for folder in ("parallax", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
FLAGS = {"settings", "arguments", "task", "compute", "self"}
SPELT = {
    "gathers",
    "attention",
    "products",
    "one_f_one_b",
    "gpipe",
    "zero_bubble",
    "bfloat16",
    "float16",
}  # words that mean nothing else
VOCABULARIES = [{value for value in known if isinstance(value, str)} for known in KNOWN.values()]


def of_layout(node):
    """Whether an expression is a layout, by its name."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name == "layout" or name.endswith("_layout")


def of_flags(node):
    """Whether what it reads is no layout's: a command line's, from which a layout is made, or a record's own field."""
    return isinstance(getattr(node, "value", None), ast.Name) and node.value.id in FLAGS


def read(node):
    """The word that an expression reads of something, by attribute, by key, or by `getattr`."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.ctx, ast.Load):
        return node.slice.value
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and isinstance(node.args[1], ast.Constant):
        return node.args[1].value
    return None


def deciding(tree):
    """The expressions on which a choice depends: compared, looked up by, matched, or asked for their truth."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(comparators=[ast.Constant(value=None)]):
                pass  # whether there is one
            case ast.Compare():
                yield from (node.left, *node.comparators)
            case ast.Subscript():
                yield node.slice
            case ast.Call(func=ast.Attribute(attr="get" | "index" | "pop" | "setdefault" | "__getitem__"), args=[key, *_]):
                yield key
            case ast.Match():
                yield node.subject
            case ast.If() | ast.IfExp() | ast.While() | ast.Assert():
                yield node.test
            case ast.BoolOp():
                yield from node.values
            case ast.UnaryOp(op=ast.Not()):
                yield node.operand
            case ast.comprehension():
                yield from node.ifs
            case ast.Call(func=ast.Name(id="bool" | "int")):
                yield from node.args


def functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]


def bound(function):
    """The names that a function gives to a word that it reads, such as `remat, n = layout.remat, 3`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=False)
                words = ((at.id, value) for at, value in pairs if isinstance(at, ast.Name) and read(value) in {*WORDS, "stage"})
                yield from (name for name, value in words if not of_flags(value))


def findings(tree):
    """The lines that read a word of a layout, or choose by one."""
    for node in ast.walk(tree):
        base = getattr(node, "value", None)
        if read(node) in WORDS and isinstance(node, ast.Attribute) and of_layout(base):
            yield node.lineno, f"reads layout.{node.attr}"
        if isinstance(node, ast.Call) and any(map(of_layout, node.args)) and getattr(node.func, "id", "") in ("vars", "getattr"):
            yield node.lineno, "takes a layout apart"
        keys = {key.value for key in getattr(node, "keys", ()) if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Dict) and any(len(keys & known) > 1 for known in VOCABULARIES):
            yield node.lineno, f"has a table by {sorted(keys, key=str)}"
        if (
            isinstance(node, ast.MatchValue)
            and isinstance(node.value, ast.Constant)
            and node.value.value in set().union(*VOCABULARIES)
        ):
            yield node.lineno, f"matches {node.value.value!r}"
        for side in (node.left, *node.comparators) if isinstance(node, ast.Compare) else ():
            if any(isinstance(each, ast.Constant) and each.value in SPELT for each in (side, *getattr(side, "elts", ()))):
                yield node.lineno, f"compares with {ast.unparse(side)}"
    for node in deciding(tree):
        if read(node) in {*WORDS, "stage"} and not of_flags(node) and (read(node) in WORDS or of_layout(node.value)):
            yield node.lineno, f"chooses by {ast.unparse(node)}"
    for function in functions(tree):
        names = set(bound(function))
        for node in deciding(function):
            if isinstance(node, ast.Name) and node.id in names:
                yield node.lineno, f"chooses by {node.id}, which is a layout's word"


def check_no_other_file_reads_a_layouts_words() -> Iterator[str]:
    """All but the one function that does."""
    for path in FILES:
        if path != READER:
            for line, problem in sorted(findings(ast.parse(path.read_text(encoding="utf-8")))):
                yield f"{path.relative_to(ROOT)}:{line} {problem}"


def check_one_function_does() -> Iterator[str]:
    """`words.rows` reads every word, and nothing else of its file does."""
    tree = ast.parse(READER.read_text(encoding="utf-8"))
    (reader,) = (node for node in tree.body if getattr(node, "name", "") == "rows")
    lines = {line for line, problem in findings(tree) if "has a table" not in problem}
    inside = set(range(reader.lineno, reader.end_lineno + 1))
    handed_over = [ast.unparse(node) for node in ast.walk(tree) if getattr(node, "lineno", 0) in lines - inside]
    if not lines & inside or "rows(vars(layout))" not in handed_over or len(lines - inside) != 1:
        yield f"{READER.relative_to(ROOT)} reads words in lines {sorted(lines - inside)}, outside `rows`"
    if unread := WORDS - {read(node) for node in ast.walk(reader)}:
        yield f"`rows` does not read {sorted(unread)}"


def check_every_word_has_a_row() -> Iterator[str]:
    """The tables of `words.py` know what a layout takes."""
    known = {
        "remat": list(words.REMAT),
        "precision": list(words.PRECISION),
        "schedule": list(words.ORDERS),
    }
    for name, table in known.items():
        if set(table) != set(KNOWN[name]):
            yield f"words.py has rows for {sorted(map(str, table))} of {name}, and a layout takes {KNOWN[name]}"
    counts = {"zero": words.ZERO, "sequence": words.TOKENS, "split_sends": words.SENDS}
    for name, table in counts.items():
        if len(table) != len(KNOWN[name]):
            yield f"words.py has {len(table)} rows for {name}, and a layout takes {KNOWN[name]}"
    for table in (words.REMAT, words.PRECISION):
        if [row.says for row in table.values()] != list(table):
            yield "a row of words.py says another word than its own"


# This check, tried: lines that read a word, and lines that only count with a size.
READING = [
    "x = 1 if layout.zero == 3 else 2",
    "x = {'products': 1, 'block': 2}.get(layout.remat, 0)",
    "x = TABLE[plan.layout.precision]",
    "x = [1, 2][layout.sequence]",
    "if layout.sequence: pass",
    "x = not layout.zero",
    "def f(layout):\n    remat, n = layout.remat, 3\n    return remat in ONES",
    "def f(remat):\n    return remat == 'products'",
    "match layout.schedule:\n    case 'gpipe': pass",
    "x = 2 if layout.stage > 1 else 1",
    "x = vars(layout)['zero']",
    "x = getattr(layout, 'zero') + 1",
    "x = dataclasses.asdict(layout)['remat'] == other",
    "x = [a for a in b if run.layout.sequence]",
    "x = any(each.zero == 3 for each in layouts)",
]
COUNTING = [
    "n = layers // (layout.stage * layout.chunks)",
    "layout = Layout(zero=zero, remat=remat)",
    "x = zero.reduce_scattered(grad)",
]


def check_what_reads_a_word_is_found() -> Iterator[str]:
    """`findings` finds a word that is read, and lets sizes be counted with."""
    for line in READING:
        if not list(findings(ast.parse(line))):
            yield f"{line!r} reads a word, and is not found"
    for line in COUNTING:
        if list(findings(ast.parse(line))):
            yield f"{line!r} counts with a size, and is taken for a word that is read"
