"""The package's plan: a file imports only what comes before it in this list, and what is light
stays light."""

import ast
import builtins
import graphlib
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ORDER = (
    *(
        "_typing",
        "trees",
        "argument_checks",
        "_files",
        "torus",
        "mesh",
        "collectives",
        "hardware",
        "jaxprs",
        "source_lines",
        "arithmetic",
        "recording",
        "taps",
        "rules",
        "schedule",
        "grads",
        "precision",
        "remat",
        "tensor",
        "sequence",
        "context",
        "experts",
        "shards",
        "optimizers",
        "zero",
        "cross_entropy",
    ),
    *("split_backward", "pipeline", "step", "islands", "same_bits", "validate", "layout", "models"),
    *("compiled", "plan", "data", "run", "lint", "bisect", "draw", "commands", "__main__"),
)


FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "parallax").rglob("*.py"))
}
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}


def imported(path):
    """The modules of the package that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "parallax"
        ):
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield full if full in FILES else node.module


GRAPH = {
    name: set(imported(path)) - {"parallax"} for name, path in FILES.items() if name != "parallax"
}


def place(name: str) -> int:
    """Where a module's package stands in the plan."""
    return ORDER.index(name.split(".")[1])


def check_no_import_goes_up() -> Iterator[str]:
    """A file imports only from what comes before it."""
    for name, targets in GRAPH.items():
        above = sorted(target for target in targets if place(target) > place(name))
        if above:
            yield f"{name} imports {above}, which come after it in the plan"


def check_no_imports_go_round() -> Iterator[str]:
    """No file imports itself by way of others; a package only hands on."""
    inside = {name: GRAPH[name] - PACKAGES for name in GRAPH if name not in PACKAGES}
    try:
        graphlib.TopologicalSorter(inside).prepare()
    except graphlib.CycleError as error:
        yield f"imports go round: {error.args[1]}"


def check_no_file_bears_the_name_of_what_its_package_hands_on() -> Iterator[str]:
    """Importing such a file would put it in the place of the function."""
    for package in PACKAGES - {"parallax"}:
        for node in ast.walk(ast.parse(FILES[package].read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module != package:
                handed_on = {f"{package}.{alias.asname or alias.name}" for alias in node.names}
                if same := sorted(handed_on & set(FILES)):
                    yield f"{package} hands on names that are files of it: {same}"


LIGHT = """
import sys
def loaded(*names):
    within = lambda name: any(f"{module}.".startswith(f"{name}.") for module in sys.modules)
    return [name for name in names if within(name)]
import parallax
assert not loaded("jax", "parallax.mesh"), loaded("jax", "parallax.mesh")
from parallax.run import job, lock, signals
assert not loaded("jax", "numpy"), "run.lock"
import parallax.collectives
assert not loaded("equinox", "optax", "parallax.mesh"), "collectives"
from parallax import hardware
hardware.A100
assert not loaded("parallax.models", "parallax.plan.closed_form", "optax"), "hardware"
import parallax.step
assert not loaded("parallax.models", "parallax.layout"), "step"
import parallax.draw, parallax.lint
assert not loaded("parallax.plan.closed_form", "parallax.models", "matplotlib"), "draw"
"""


def check_what_is_light_stays_light() -> Iterator[str]:
    """Importing a part of the package brings no more along than it must."""
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], check=False, cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        yield done.stderr


# Tokens of code, without comments and docstrings, that importing a module brings along: the most
# that it may. What somebody lifts out of the package is as small as this. A figure goes up only
# with the reason in the commit that raises it.
MOST = {
    "models.decoder": 79_650,
    "pipeline": 46_100,
    "tensor": 7_950,
    "grads": 13_500,
    "zero": 25_550,
    "step": 25_500,
}
LOADED = (
    "import sys, parallax.{0}; print(*(name for name in sys.modules if name.split('.')[0] == "
    "'parallax'))"
)
LAYOUT_TOKENS = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
)


def tokens_of_code(path: Path) -> int:
    """The tokens of a file without comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node)
    ]
    docstrings = {node.body[0].lineno for node in nodes}
    return sum(
        token.type not in (*LAYOUT_TOKENS, tokenize.ENDMARKER)
        and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def check_the_core_brings_little_along() -> Iterator[str]:
    """Importing a module of the core loads no more code than its figure."""
    for module, most in MOST.items():
        command = [sys.executable, "-c", LOADED.format(module)]
        loaded = subprocess.run(
            command, check=True, cwd=ROOT, capture_output=True, text=True
        ).stdout.split()
        sizes = {name: tokens_of_code(FILES[name]) for name in loaded}
        if sum(sizes.values()) > most:
            largest = sorted(sizes, key=sizes.__getitem__, reverse=True)
            files = ", ".join(f"{name} {sizes[name]}" for name in largest)
            yield (
                f"importing {module} brings {sum(sizes.values())} tokens of code along, more than "
                f"{most}: {files}"
            )


# The wings, each with the others that `import parallax.WING` may bring along.
WINGS = {
    "compiled": set(),
    "plan": set(),
    "data": set(),
    "run": set(),
    "lint": set(),
    "bisect": set(),
    "draw": {"compiled", "plan"},
}


def loaded_with(module: str) -> set[str]:
    """The modules that importing `module` loads, by the imports outside of functions."""
    loaded, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in loaded or name not in FILES:
            continue
        loaded.add(name)
        waiting.append(name.rpartition(".")[0])
        for node in ast.parse(FILES[name].read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
    return loaded


def check_a_wing_brings_no_other_along() -> Iterator[str]:
    """Importing a wing loads only the others that `WINGS` names."""
    for wing, allowed in WINGS.items():
        wings = {name.split(".")[1] for name in loaded_with(f"parallax.{wing}") if "." in name}
        if others := sorted((wings & set(WINGS)) - {wing} - allowed):
            yield f"import parallax.{wing} loads {others} too"


def bound_names(tree: ast.AST) -> set[str]:
    """All names that a module binds, in whatever scope."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.arg():
                names.add(node.arg)
            case ast.alias():
                names.add((node.asname or node.name).split(".")[0])
            case ast.ExceptHandler() | ast.MatchAs() | ast.MatchStar() if node.name:
                names.add(node.name)
            case ast.MatchMapping() if node.rest:
                names.add(node.rest)
    return names


def check_every_name_is_bound() -> Iterator[str]:
    """The linter's own rule is off in the package: it takes the dims in jaxtyping's strings for
    names."""
    known = {*dir(builtins), "__file__", "__name__", "__path__"}
    for name, path in FILES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bound = bound_names(tree) | known
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Name)
                and isinstance(node.ctx, ast.Load)
                and node.id not in bound
            ):
                yield f"{name}, line {node.lineno}: {node.id!r} is bound nowhere in the file"
