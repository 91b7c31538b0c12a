"""The package's plan: a file imports only what comes before it in this list, and what is light stays light."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ORDER = (
    *(
        "typed",
        "given",
        "disk",
        "neighbours",
        "mesh",
        "collectives",
        "jaxprs",
        "bisect",
        "rules",
        "elementwise",
        "schedule",
        "grads",
        "precision",
        "remat",
        "tensor",
        "sequence",
        "context",
        "experts",
        "zero",
        "optimizers",
        "cross_entropy",
    ),
    *("pipeline", "step", "islands", "layout", "models", "compiled", "plan", "data", "run", "lint", "draw", "__main__"),
)


FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "parallax").rglob("*.py"))
}
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}


def imported(path):
    """The modules of the package that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "parallax":
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield full if full in FILES else node.module


GRAPH = {name: set(imported(path)) for name, path in FILES.items() if name != "parallax"}


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
loaded = lambda *names: [name for name in names if any(each == name or each.startswith(name + ".") for each in sys.modules)]
import parallax
assert not loaded("jax", "parallax.mesh"), loaded("jax", "parallax.mesh")
from parallax.run import launch, lock
assert not loaded("jax", "numpy"), "run.lock"
import parallax.collectives
assert not loaded("equinox", "optax", "parallax.mesh"), "collectives"
from parallax.plan import hardware
hardware.A100
assert not loaded("parallax.models", "parallax.plan.planned", "optax"), "hardware"
import parallax.step
assert not loaded("parallax.models", "parallax.layout"), "step"
import parallax.draw, parallax.lint
assert not loaded("parallax.plan.planned", "parallax.models", "matplotlib"), "draw"
"""


def check_what_is_light_stays_light() -> Iterator[str]:
    """Importing a part of the package brings no more along than it must."""
    done = subprocess.run([sys.executable, "-c", LIGHT], check=False, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        yield done.stderr
