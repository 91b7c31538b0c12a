"""Save a model again and again, killed before one file operation after the other, until one save
gets through.

    python tests/killed_save.py FOLDER

leaves a folder FOLDER/over/NUMBER and FOLDER/new/NUMBER for each: with a model that was there
before, or nothing. A child process saves, and a hook of Python's auditing kills it. Nothing here
starts JAX's devices, whose threads a child would not have.
"""

import os
import signal
import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

from parallax.models import gpt2
from parallax.models.files import Origin

OPERATIONS = (
    "open",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "os.rmdir",
    "os.chmod",
    "shutil.rmtree",
    "shutil.copyfile",
)


def model(heads: int) -> gpt2.GPT2:
    """A model of so many heads, every number of which is that; the sizes of its tensors do not tell
    how many."""
    origin = Origin(
        (("eos_token_id", str(heads)),), f'{{"eos_token_id": {heads}}}' if heads == 2 else None
    )
    config = gpt2.Config(
        layers=1,
        heads=heads,
        width=8,
        context=4,
        vocabulary=11,
        vocabulary_multiple=1,
        origin=origin,
    )
    shapes = eqx.filter_eval_shape(lambda: gpt2.GPT2(config, key=jax.random.key(0)))
    return jax.tree.map(lambda shape: np.full(shape.shape, heads, shape.dtype), shapes)


def killed(folder: Path, number: int) -> bool:
    """Save the model of 4 heads in a child that is killed before operation `number` on `folder`.
    Whether it was."""
    child = os.fork()
    if child == 0:
        left = [number]

        def hook(event: str, arguments: tuple) -> None:
            if event in OPERATIONS and str(folder) in str(arguments):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        gpt2.save(model(4), folder)
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


if __name__ == "__main__":
    for scene in ("over", "new"):
        for number in range(1, 200):
            folder = Path(sys.argv[1], scene, str(number))
            if scene == "over":
                gpt2.save(model(2), folder)
            if not killed(folder, number):
                break
