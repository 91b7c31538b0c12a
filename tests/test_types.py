"""A user's type checker knows every public name, and finds nothing in the programs of README and
docs. It needs pyright.

The strict mode reports a type that is unknown, or known in part. JAX leaves such types in nearly
every program, `jax.jit` among them, so programs are read in the standard mode, and the names of
this package in the strict one.
"""

import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import parallax

ROOT = Path(__file__).resolve().parent.parent
# The programs of errors.md are wrong on purpose.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "errors.md"),
]
# A page defines a name anew, reads what a loop has assigned, and knows of a result that may be None
# that it is not.
STYLE = {
    "reportRedeclaration": False,
    "reportPossiblyUnboundVariable": False,
    "reportOptionalMemberAccess": False,
}
# An Equinox module of truth values, where its fields are declared as arrays.
TREES = "trainable = Normed("
NEEDS_PYRIGHT = pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None, reason="needs pyright, of the group `lint`"
)


def checked(folder, mode, **rules):
    """What pyright says of the files of a user's project: lines of file, line and message."""
    settings = {
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": mode,
        "pythonVersion": "3.11",
        **rules,
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    run = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    found = json.loads(run.stdout)
    assert found["summary"]["filesAnalyzed"] == len(list(folder.glob("*.py")))
    lines = (
        (Path(each["file"]), each["range"]["start"]["line"], each["message"])
        for each in found["generalDiagnostics"]
    )
    return [
        f"{file.name}: {file.read_text().splitlines()[line].strip()}: {message}"
        for file, line, message in lines
    ]


def public(module):
    """The public functions, classes and tables of a module, by name."""
    own = getattr(module, "__all__", None)
    names = own or [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    ]
    return {name: getattr(module, name) for name in names if not name.startswith("_")}


def fields(kind):
    """The public fields, properties and methods that a class of this package defines."""
    of = [each for each in kind.__mro__ if each.__module__.startswith("parallax")]
    return sorted(
        {
            name
            for each in of
            for name in [*vars(each), *inspect.get_annotations(each)]
            if not name.startswith("_")
        }
    )


def modules():
    """What users import: the names of `parallax`, and the modules of packages that are named after
    their modules alone."""
    for name in parallax.__all__:
        module = importlib.import_module(f"parallax.{name}")
        inner = (
            [] if public(module) else [each.name for each in pkgutil.iter_modules(module.__path__)]
        )
        yield from ([f"{name}.{each}" for each in inner] or [name])


def every_name():
    """A program that reads every public name, and every field of an object of every public
    class."""
    lines, reads = [], []
    for path in modules():
        package, _, last = f"parallax.{path}".rpartition(".")
        lines.append(f"from {package} import {last}")
        for name, value in public(importlib.import_module(f"parallax.{path}")).items():
            reads.append(f"print({last}.{name})")
            if inspect.isclass(value) and fields(value):
                reads += [f"def read_{last}_{name}(x: {last}.{name}) -> None:"]
                reads += [f"    print(x.{field})" for field in fields(value)]
    return "\n".join([*lines, *reads, ""])


@pytest.mark.programs
@NEEDS_PYRIGHT
@pytest.mark.long
def test_every_public_name_has_a_known_type(tmp_path):
    program = every_name()
    assert program.count("print(") > 500
    (tmp_path / "names.py").write_text(program)
    assert checked(tmp_path, "strict") == []


@pytest.mark.programs
@NEEDS_PYRIGHT
@pytest.mark.long
def test_the_programs_of_the_pages_have_no_wrong_type(tmp_path):
    """Each page is one program, as `test_docs.py` runs it; README's fragments speak of
    examples/pipeline.py."""
    for page in PAGES:
        programs = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        whole = [text for text in programs if page.name != "README.md" or text.startswith("import")]
        if whole:
            (tmp_path / f"{page.stem.replace('-', '_')}_page.py").write_text("\n".join(whole))
    found = checked(tmp_path, "standard", **STYLE)
    assert [line for line in found if TREES not in line] == []


@pytest.mark.programs
@NEEDS_PYRIGHT
@pytest.mark.long
def test_a_wrong_type_and_an_unknown_one_are_found(tmp_path):
    (tmp_path / "wrong.py").write_text(
        "from parallax import grads\n\nprint(grads.averaged('loss', 'data'))\n"
    )
    (tmp_path / "unknown.py").write_text("import jax\n\nprint(jax.jit)\n")
    found = "\n".join(checked(tmp_path, "strict"))
    assert "cannot be assigned to parameter" in found
    assert 'Type of "jit" is partially unknown' in found
