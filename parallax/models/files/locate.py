"""Finds a model's files: by a folder, one file in it, or a name on the Hugging Face hub."""

import os
import re
from pathlib import Path

from parallax.models.files.atomic_replace import STAGE
from parallax.models.files.origin import GENERATION, TOKENIZER
from parallax.models.files.tensors import INDEX, MERGE

CONFIG, ADAPTER = "config.json", "adapter_config.json"
WANTED = [CONFIG, GENERATION, ADAPTER, INDEX, "model*.safetensors", *TOKENIZER]


def locate(path: str | os.PathLike[str], asks: str) -> tuple[Path, Path | None]:
    """Returns the folder of the model, and the file of its weights: `path` if that is a file, else
    None.

    Args:
        path: a folder, a safetensors file, or a name on the hub.
        asks: the caller's name, which errors begin with, such as "gpt2.load".

    Raises:
        FileNotFoundError: there is no such folder, or it has no `config.json`.
        ImportError: `path` is a name on the hub, and the hub's client is not installed.
        ValueError: `path` is another kind of file, or the folder holds an adapter.
    """
    folder, file = Path(path), None
    if folder.is_file():
        if folder.suffix != ".safetensors":
            raise ValueError(
                f"{asks} needs a folder or a .safetensors file; got the file {folder}. Pass its "
                "folder."
            )
        folder, file = folder.parent, folder
    elif not folder.is_dir():
        # Anything that cannot be a name on the hub is a mistyped path: the hub is not asked.
        if (
            not isinstance(path, str)
            or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path)
            or path.endswith(".safetensors")
        ):
            raise FileNotFoundError(
                f"{asks}: there is no file or folder {os.fspath(path)}. Correct the path."
            )
        folder = _downloaded(path, asks)
    if (folder / ADAPTER).exists():
        raise ValueError(
            f"{asks}: {folder / ADAPTER} is there, so {folder} is an adapter (LoRA) or has one. "
            f"{MERGE}"
        )
    if not (folder / CONFIG).is_file():
        cut = (
            f" A save was cut off; what it replaced is in {folder / STAGE}. Save again."
            if (folder / STAGE).exists()
            else ""
        )
        raise FileNotFoundError(
            f"{asks} needs {folder / CONFIG}, which says what the weights beside it "
            f"are.{cut or ' Copy it there.'}"
        )
    return folder, file


def _downloaded(name: str, asks: str) -> Path:
    """Returns the folder into which the Hugging Face hub's client put the model `name`; errors
    begin with `asks`.
    """
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"{asks}: there is no folder {name!r} here, and asking the Hugging Face hub for a "
            "model of that name needs "
            f"huggingface_hub. Correct the path, or pip install -e '.[hub]'."
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=WANTED))
    except Exception as error:  # the client raises its own errors and those of its HTTP library
        raise FileNotFoundError(
            f"{asks}: there is no folder {name!r} here, and the Hugging Face hub did not give a "
            "model of that name "
            f"({type(error).__name__}: {error}). Correct the path or name, or load a folder that "
            "was downloaded before."
        ) from error
