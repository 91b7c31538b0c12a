"""Runs killed before one file operation after the other, each of which the same command must then
bring to its end.

    python tests/killed_run.py FOLDER SCENE FIRST EVERY

kills run number FIRST, FIRST + EVERY, ... of a scene, until one gets through, and lets the same
command go on in each folder. It prints the moments, a line each. A child process runs, and a hook
of Python's auditing kills it; a file that is opened to be written gives two moments, one before it
is there and one when it is there and empty. Nothing here starts JAX's devices before a child is
forked, which would not have their threads. What the arrays' writer does in C++ is not heard; it
goes on beside.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint  # noqa: F401  (seconds, once)

from parallax.run.checkpoint import Checkpoints
from parallax.run.retention import Retention

OPERATIONS = {
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.mkdir": (0,),
    "os.rmdir": (0,),
    "os.truncate": (0,),
    "os.link": (0, 1),
}
DIR_FD = {
    "os.rename": 2,
    "os.remove": 1,
    "os.mkdir": 2,
    "os.rmdir": 1,
}  # where the descriptor of a path's folder stands
LAST = 4  # steps of a run


def killing(folder: Path, number: int) -> Callable[[str, tuple], None]:
    """A hook that kills this process at its moment `number` in `folder`."""
    left, inside = number, False

    def inside_folder(event: str, arguments: tuple) -> bool:
        base = arguments[DIR_FD[event]] if event in DIR_FD else -1
        above = os.readlink(f"/proc/self/fd/{base}") if base not in (-1, None) else ""
        return any(
            str(folder) in os.path.join(above, os.fsdecode(arguments[i]))
            for i in OPERATIONS[event]
            if named(arguments[i])
        )

    def named(argument: Any) -> bool:
        return isinstance(argument, str | bytes | os.PathLike)

    def moment() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal inside
        if inside:
            return
        inside = True
        try:
            act(event, arguments)
        finally:  # an operation of ours that fails must not end the watch
            inside = False

    def act(event: str, arguments: tuple) -> None:
        if event == "open" and named(arguments[0]) and str(folder) in os.fsdecode(arguments[0]):
            path, _, flags = arguments
            if flags & (os.O_WRONLY | os.O_RDWR):
                if moment():
                    os.kill(os.getpid(), signal.SIGKILL)
                if moment():
                    # A lock tries O_EXCL first, and fails if its file is there.
                    with contextlib.suppress(OSError):
                        os.open(path, flags, 0o666)
                    os.kill(os.getpid(), signal.SIGKILL)
        elif event in OPERATIONS and inside_folder(event, arguments) and moment():
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def in_a_child(work: Callable[[], Any]) -> int:
    """The exit status of a child process that does this: 0, or that of the signal that killed
    it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    return os.waitpid(child, 0)[1]


# The commands, each to be given again: what it leaves is a function of the folder alone


def state_of(step: int) -> dict[str, jax.Array]:
    """What a run has computed by then."""
    return {
        "weight": jnp.arange(6.0, dtype=jnp.float32) * step,
        "count": jnp.asarray(step, jnp.int32),
    }


def only_checkpoints(folder: Path, done: Callable[[int], object]) -> int:
    """A loop with nothing but its checkpoints, of which two stay. Returns the step that it went on
    from."""
    with Checkpoints(
        folder / "checkpoints", settings={"seed": 0}, keep=Retention(2), say=lambda line: None
    ) as checkpoints:
        restored = checkpoints.restore(state_of(0))
        first = 0 if restored is None else restored.step
        if restored is not None:
            np.testing.assert_array_equal(restored.state["weight"], state_of(first)["weight"])
        for step in range(first + 1, LAST + 1):
            checkpoints.save(step, state_of(step), {"seen": step})
            checkpoints.wait()
            done(step)
    return first


def example(folder: Path, done: Callable[[int], object]) -> int:
    """`examples/gpt2.py` in one process, with a step that computes next to nothing. Returns the
    step that it went on from."""
    from untrained import run  # starts JAX's devices

    return run(folder, steps=LAST, done=done)


def nothing(folder: Path) -> None:
    folder.mkdir(parents=True)


def half(command: Callable[..., int]) -> Callable[[Path], None]:
    """What the command leaves that was killed when half of its steps were saved."""

    def begun(folder: Path) -> None:
        nothing(folder)
        kill = lambda step: step == LAST // 2 and os.kill(os.getpid(), signal.SIGKILL)
        assert in_a_child(lambda: silent(command, folder, kill)) == signal.SIGKILL

    return begun


SCENES = {
    "checkpoints, new": (only_checkpoints, nothing),
    "checkpoints, resumed": (only_checkpoints, half(only_checkpoints)),
    "example, new": (example, nothing),
    "example, resumed": (example, half(example)),
}


def left(folder: Path) -> list[str]:
    """What a run leaves, without the names that the arrays' writer draws."""
    return sorted(
        str(path.relative_to(folder))
        for depth in (1, 2, 3)
        for path in folder.glob("/".join("*" * depth))
    )


def silent(command: Callable[..., int], *arguments: Any) -> int:
    """The command, without what it prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        return command(*arguments)


def main(place: Path, scene: str, first: int, every: int) -> None:
    command, begin = SCENES[scene]
    begun, number = place / "begun" / "run", first
    begin(begun)
    while True:
        folder, sealed = place / str(number) / "run", place / str(number) / "sealed"
        shutil.copytree(begun, folder)

        def work(folder=folder, sealed=sealed, number=number):
            sys.addaudithook(killing(folder, number))
            silent(command, folder, lambda step: sealed.write_text(str(step)))

        status = in_a_child(work)
        assert status in (0, signal.SIGKILL), f"moment {number}: the run ended by {status}"
        if status == 0:
            break
        number += every

    def go_on():
        undisturbed = place / "undisturbed" / "run"
        shutil.copytree(begun, undisturbed)
        silent(command, undisturbed, lambda step: None)
        for killed in range(first, number, every):
            folder, sealed = place / str(killed) / "run", place / str(killed) / "sealed"
            before = int(sealed.read_text()) if sealed.exists() else 0
            try:
                again = silent(command, folder, lambda step: None)
                assert again >= before, f"went on from {again}, and step {before} was saved"
                # What a kill left goes with the next save, and after the last one there is none.
                assert left(folder) == left(undisturbed) or (
                    again == LAST and {*left(folder)} > {*left(undisturbed)}
                )
                assert silent(command, folder, lambda step: None) == LAST
            except BaseException as error:
                raise AssertionError(f"killed at moment {killed}: {left(folder)}") from error
            print(json.dumps({"moment": killed, "went on from": again}))

    assert in_a_child(go_on) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
