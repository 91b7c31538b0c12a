"""The climate of every test: eight virtual devices, float64 at hand, nothing promoted in silence, quick compilation."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# The tests compile for minutes what runs for milliseconds. LLVM alone has less to do: until it has them, the programs, which
# some tests read, are those that users get. What the tests start inherits it.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "--xla_backend_extra_options=-unroll-full-max-count=1,-unroll-max-count=1,-vectorize-loops=false,-vectorize-slp=false,-fast-isel=true",
        *filter(None, [os.environ.get("XLA_FLAGS")]),
    ]
)
# XLA's pool has a thread a device, and programs queued one behind another would starve in it; tests may queue.
os.environ.setdefault("NPROC", "32")

import hypothesis
import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# No deadline: the first example of a shape compiles. Derandomised: a red run can be run again.
hypothesis.settings.register_profile("parallax", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("parallax")
