"""The package's plan: a file imports only from what comes before it in this list, and what is light stays light."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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


@pytest.mark.parametrize("name", GRAPH)
def test_no_import_goes_up(name):
    place = ORDER.index(name.split(".")[1])
    above = {target for target in GRAPH[name] if ORDER.index(target.split(".")[1]) > place}
    assert not above, f"{name} imports {sorted(above)}, which come after it in the plan"


def test_no_imports_go_round():
    inside = {name: GRAPH[name] - PACKAGES for name in GRAPH if name not in PACKAGES}  # a package only hands on
    graphlib.TopologicalSorter(inside).prepare()


def test_no_file_bears_the_name_of_what_its_package_hands_on():
    """Importing such a file would put it in the place of the function."""
    for package in PACKAGES - {"parallax"}:
        for node in ast.walk(ast.parse(FILES[package].read_text())):
            if isinstance(node, ast.ImportFrom) and node.module != package:
                handed_on = {f"{package}.{alias.asname or alias.name}" for alias in node.names}
                assert not handed_on & set(FILES), package


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


def test_what_is_light_stays_light():
    done = subprocess.run([sys.executable, "-c", LIGHT], check=False, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
