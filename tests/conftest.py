"""How tests run: eight virtual devices, float64 available, strict promotion, and one of two sets of compiler flags.

**Quick flags**, the default. Tests compile for minutes what runs for milliseconds, so LLVM is told not to optimise. Collectives
and memory are those of the programs that users get. The bits are not: a product and a sum that a user's program fuses into one
rounding are two roundings here, on every device alike. Tests with a tolerance cover that difference.

**Users' flags**, with `--users-flags`: XLA_FLAGS as the environment has them. What is about bits is tested with these alone:
replicas that must not drift, determinism, a run that resumes bit for bit, two programs that must be equal. Such a test is
marked `bits`, and `test_bits.py` runs them in processes of their own. Jobs of several processes (`faults.py`) and two equal runs
of the example have users' flags too. And `.ci/run` takes a tenth of all tests, another one each time, with
`--users-flags --part 10`.

**Sweeps.** A test marked `sweep(n)` is about more programs than one run has time for. Each run takes one nth of its cases, and
n successive values of `--sweep-seed` take every case once. The tests of a file that are marked `sweep(n, "together")` are cases
of one sweep. A test marked `sweep` alone lets hypothesis draw other examples for each seed. `--sweep-all` runs every case.
`.ci/run` counts its seeds up, so all cases are run over time.
"""

import hashlib
import os
import signal
from collections import defaultdict

os.environ["JAX_PLATFORMS"] = "cpu"
# XLA's pool has a thread a device, and programs queued one behind another would starve in it; tests may queue.
os.environ.setdefault("NPROC", "32")

import flags
import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a shape compiles. Derandomised: a red run can be run again.
hypothesis.settings.register_profile("parallax", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("parallax")


def pytest_addoption(parser):
    group = parser.getgroup("parallax")
    group.addoption("--users-flags", action="store_true", help="compile as users do: tests marked `bits` need it")
    group.addoption("--part", type=int, default=1, metavar="N", help="one Nth of the tests, drawn by --sweep-seed")
    group.addoption("--sweep-seed", type=int, default=0, metavar="K", help="which part of each sweep to run (0)")
    group.addoption("--sweep-all", action="store_true", help="all cases of every sweep")


def pytest_configure(config):
    if config.option.part < 1:
        raise pytest.UsageError(
            f"--part needs a number from 1 on: one Nth of the tests; got {config.option.part}. Leave it out for all."
        )
    # Before the first compilation; what the tests start inherits it.
    os.environ.update(flags.of_users() if config.option.users_flags else flags.quick())


def pytest_report_header(config):
    compiled = "users' flags" if config.option.users_flags else "quick flags (what is about bits: test_bits.py)"
    drawn = "sweeps whole" if config.option.sweep_all else f"--sweep-seed {config.option.sweep_seed}"
    return f"parallax: {compiled}, {drawn}" + f", --part {config.option.part}" * (config.option.part > 1)


@pytest.hookimpl(trylast=True)  # of what -m and -k have chosen
def pytest_collection_modifyitems(config, items):
    option = config.option
    chosen = items if option.users_flags else [item for item in items if not item.get_closest_marker("bits")]
    sweeps = defaultdict(list)
    for item in chosen:
        if mark := item.get_closest_marker("sweep"):
            parts, *together = mark.args or [1]
            sweeps[item.path if together else item.nodeid.partition("[")[0], parts].append(item)
    left_out = set()
    if not option.sweep_all:
        for (_, parts), cases in sweeps.items():
            left_out.update(set(cases) - set(part(cases, option.sweep_seed, parts)))
        for item in set().union(*sweeps.values()) - left_out:
            if option.sweep_seed and hypothesis.is_hypothesis_test(item.obj):
                hypothesis.seed(option.sweep_seed)(item.obj)
    chosen = drawn([item for item in chosen if item not in left_out], option.sweep_seed, option.part)
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def part(cases, seed, parts=1):
    """One of `parts` equal parts of the cases: those of `parts` successive seeds together are all of them."""
    shuffled = sorted(cases, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
    return [item for number, item in enumerate(shuffled) if (number - seed) % parts == 0]


def drawn(cases, seed, parts):
    """One of `parts` equal parts, drawn anew for each seed: taken in turns, some cases of a sweep would never have their turn."""
    return sorted(cases, key=lambda item: hashlib.sha256(f"{seed} {item.nodeid}".encode()).digest())[::parts]


@pytest.fixture
def heard():
    """SIGINT and SIGHUP end a process, and its children, as they usually do, though nohup or a shell's `&` had them ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
