"""Where a model's files are: a folder, one file in it, or a name on the Hugging Face hub."""

import os
import re
from pathlib import Path

from parallax.models.files.atomic_replace import STAGE
from parallax.models.files.origin import GENERATION, TOKENIZER
from parallax.models.files.tensors import INDEX, MERGE

CONFIG, ADAPTER = "config.json", "adapter_config.json"
WANTED = [CONFIG, GENERATION, ADAPTER, INDEX, "model*.safetensors", *TOKENIZER]


def locate(path: str | os.PathLike[str], asks: str) -> tuple[Path, Path | None]:
    """Returns the folder of the model, and the one file of its weights, where `path` names that.

    Args:
        path: a folder, a safetensors file, or a name on the hub.
        asks: who needs it, for errors: "gpt2.load".

    Raises:
        FileNotFoundError: there is none, or it has no configuration.
        ImportError: a name on the hub, and the hub's client is not installed.
        ValueError: another kind of file, or an adapter.
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
    """Returns the folder of a model that the Hugging Face hub gives; `asks` begins the errors."""
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
    except (
        Exception
    ) as error:  # whatever the hub's client raises, of its own or of the library under it
        raise FileNotFoundError(
            f"{asks}: there is no folder {name!r} here, and the Hugging Face hub did not give a "
            "model of that name: "
            f"{type(error).__name__}: {error} Correct the path or name, or load a folder that was "
            "downloaded before."
        ) from error
