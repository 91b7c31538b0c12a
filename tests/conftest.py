"""The climate of every test: eight virtual devices, float64 at hand, nothing promoted in silence."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
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
