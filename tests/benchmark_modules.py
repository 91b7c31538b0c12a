"""The programs of benchmarks/ as modules, for the tests of their parts."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


def load(name: str) -> ModuleType:
    """A benchmark, imported: `load("papers")`. It finds its neighbours, and what it adds to the
    path is taken back."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(FOLDER))
        patched.setattr(sys, "path", list(sys.path))
        sys.modules[name] = module  # for the records that it defines
        spec.loader.exec_module(module)
    return module
