"""The compiler flags of tests: quick ones, and those that users have (`conftest.py` says which
tests run with which)."""

import importlib.metadata
import os

# LLVM has less to do. Until it has them, the programs, which some tests read, are those that users
# get.
QUICK = [
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_extra_options=-unroll-full-max-count=1,-unroll-max-count=1,"
    "-vectorize-loops=false,-vectorize-slp=false,-fast-isel=true",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Kernels without MLIR take a third of the time. Lone operations are then no longer wrapped in
    # fusions; collectives and memory are the same. Later versions have no such flag.
    QUICK.append("--xla_cpu_use_fusion_emitters=false")

os.environ.setdefault(
    "PARALLAX_USERS_XLA_FLAGS", os.environ.get("XLA_FLAGS", "")
)  # for workers and jobs, which inherit it


def quick() -> dict[str, str]:
    """The variable that makes XLA compile quickly."""
    return {"XLA_FLAGS": " ".join([*QUICK, os.environ["PARALLAX_USERS_XLA_FLAGS"]])}


def of_users() -> dict[str, str]:
    """The variable as it was before the tests."""
    return {"XLA_FLAGS": os.environ["PARALLAX_USERS_XLA_FLAGS"]}
