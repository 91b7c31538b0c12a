"""The same run in four processes, which talk over gloo, as in one process and on one device."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import process_step
import pytest

SECONDS = 240
FAST_COMPILER = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
pytestmark = pytest.mark.slow


def start(process, processes, port, output, path):
    script = Path(process_step.__file__)
    command = [sys.executable, script, str(process), str(processes), str(port), path]
    environment = os.environ | {"XLA_FLAGS": FAST_COMPILER, "PYTHONPATH": os.pathsep.join([str(script.parent.parent), *sys.path])}
    return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    outputs = [folder / f"{i}.txt" for i in range(4)]
    running = []
    try:
        for i, output in enumerate(outputs):
            with output.open("w") as file:
                running.append(start(i, len(outputs), port, file, folder / "found.npz"))
        end = time.monotonic() + SECONDS
        while None in (codes := [process.poll() for process in running]) and not any(codes) and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        for process in running:
            process.kill()
            process.wait()
    if codes != [0] * len(outputs):
        printed = "\n".join(f"--- process {i}\n{output.read_text()}" for i, output in enumerate(outputs))
        pytest.fail(f"exit codes {codes} (None: ended after {SECONDS} s)\n{printed}")
    with np.load(folder / "found.npz") as file:
        return dict(file)


@pytest.mark.parametrize("layout", [process_step.EIGHT, process_step.ONE], ids=["one process, eight devices", "one device"])
def test_equals(four_processes, layout):
    with jax.numpy_dtype_promotion("standard"):  # optax's
        expected = process_step.train(layout)
    assert four_processes.keys() == expected.keys()
    for name, value in expected.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(four_processes[name], value, rtol=0, atol=1e-11 * scale, err_msg=name)
