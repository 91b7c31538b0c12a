"""How tests run: eight virtual devices, float64 available, strict promotion, in three tiers, and by
one seed.

**Tiers.** A test without a mark is numerical, small and in process: `pytest` runs these. A test
marked `programs` starts processes: an example, a benchmark, a page, a job of several ranks. A test
marked `long` is a large drawn case. A mark may stand beside another: `-m "long and programs"`
selects jobs that are killed on purpose, which need a quiet machine and `-n 0`.

**Sweeps.** A test marked `sweep(n)` is about more programs than one run has time for. Each run
takes one nth of its cases, of a `long` test one fifth of that, and successive values of `--seed`
take every case once. All tests marked `sweep(n, "name")` with one name are cases of one sweep:
"steps" are those that compile whole steps of a model and run several, some seconds each;
"wholes" are other tests of more than a second; "search" are those that search among layouts. A
test marked `sweep` alone lets hypothesis draw other examples for each seed. No sweep has more than
30 slices; `--all` runs them whole.

**Quick flags**, the default. Tests compile for minutes what runs for milliseconds, so LLVM is told
not to optimise. Collectives and memory are those of the programs that users get. The bits are not:
a product and a sum that a user's program fuses into one rounding are two roundings here, on every
device alike. Tests with a tolerance cover that difference.

**Users' flags**, with `--users-flags`: XLA_FLAGS as the environment has them. What is about bits is
tested with these alone: replicas that must not drift, determinism, a run that resumes bit for bit,
two programs that must be equal. Such a test is marked `bits`. A run with `--users-flags` takes
these, and a tenth of the others, another tenth for each seed. Jobs of several processes
(`faults.py`) and two equal runs of the example always have users' flags.
"""

import gc
import hashlib
import os
import signal
from collections import defaultdict
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"
# XLA's pool has a thread a device, and programs queued one behind another would starve in it; tests
# may queue.
os.environ.setdefault("NPROC", "32")

import checked
import flags
import hypothesis
import jax
import pytest

checked.install()  # before the package is imported

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a shape compiles. Derandomised: a red run can be run again.
hypothesis.settings.register_profile("parallax", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("parallax")


SLICES = 30  # at most: so many values of --seed in a row take every case of every sweep
OF_LONG = 5  # a run takes a fifth of the long tests
OF_OTHERS = 10  # with users' flags, a tenth of the tests that are not about bits


def pytest_addoption(parser):
    group = parser.getgroup("parallax")
    group.addoption(
        "--seed", type=int, default=0, metavar="N", help="which slice of every sweep to run (0)"
    )
    group.addoption("--all", action="store_true", help="every case of every sweep")
    group.addoption(
        "--users-flags",
        action="store_true",
        help="compile as users do: the tests of bits, a tenth of the others",
    )


def pytest_configure(config):
    # Before the first compilation; what the tests start inherits it.
    os.environ.update(flags.of_users() if config.option.users_flags else flags.quick())


def pytest_report_header(config):
    compiled = (
        "users' flags"
        if config.option.users_flags
        else "quick flags (tests of bits need --users-flags)"
    )
    return (
        f"parallax: {compiled}, "
        f"{'sweeps whole' if config.option.all else f'--seed {config.option.seed}'}"
    )


@pytest.hookimpl(trylast=True)  # of what -m and -k have chosen
def pytest_collection_modifyitems(config, items):
    option = config.option
    chosen = items
    if not option.users_flags:
        chosen = [item for item in items if not item.get_closest_marker("bits")]
    if not option.all:
        chosen = [item for sweep in sweeps(chosen) for item in one_slice(sweep, option.seed)]
        if option.users_flags:
            chosen = of_bits_and_some_others(chosen, option.seed)
    for item in chosen:
        if (
            option.seed
            and item.get_closest_marker("sweep")
            and hypothesis.is_hypothesis_test(item.obj)
        ):
            hypothesis.seed(option.seed)(item.obj)
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


class Sweep(NamedTuple):
    """Cases of which a run takes one slice."""

    name: str
    slices: int
    cases: list


def sweeps(items):
    """All items, each in its sweep; a test that every run takes is a sweep of one slice."""
    found = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sweep")
        long = item.get_closest_marker("long")
        number, *named = (mark.args if mark else ()) or (1,)
        name = named[0] if named else item.nodeid.partition("[")[0]
        if long and not mark:
            name = "long"  # all of them, or the tests of one case would all fall on one seed
        found[name, min(number * (OF_LONG if long else 1), SLICES)].append(item)
    return [Sweep(name, slices, cases) for (name, slices), cases in found.items()]


def one_slice(sweep, seed):
    """The cases of one seed: those of as many successive seeds as there are slices are all of
    them."""
    first = int(digest(sweep.name), 16)  # sweeps of few cases begin with different seeds
    shuffled = sorted(sweep.cases, key=lambda item: digest(item.nodeid))
    return [
        item for number, item in enumerate(shuffled) if (number + first - seed) % sweep.slices == 0
    ]


def of_bits_and_some_others(items, seed):
    """The tests of bits, and one tenth of the others, drawn anew for each seed."""
    bits = [item for item in items if item.get_closest_marker("bits")]
    others = [item for item in items if not item.get_closest_marker("bits")]
    return bits + sorted(others, key=lambda item: digest(f"{seed} {item.nodeid}"))[::OF_OTHERS]


def pytest_collection_finish():
    """Keeps what was imported out of garbage collection, and collects more seldom: each would read
    all of JAX's programs anew.

    It was a sixth of the processor time of tests that trace.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def heard():
    """SIGINT and SIGHUP end a process, and its children, as they usually do, though nohup or a
    shell's `&` had them ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
