"""What a model was loaded with beside its sizes, so that `save` gives it out again."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallax.models.files.fields import ABSENT
from parallax.models.files.texts import read_json

GENERATION = "generation_config.json"
TOKENIZER = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
    ),
    *("vocab.json", "merges.txt", "tokenizer.model", "spiece.model"),
)


@dataclass(frozen=True)
class Origin:
    """What came with a model and is not computed with: it can be compared and hashed, as a static
    part of a model must be.

    Attributes:
        fields: of `config.json`, those that differ from what `save` writes by itself, each with its
            value as JSON, which is empty for one that the file leaves out.
        generation: `generation_config.json`, as JSON; None where there was none.
        tokenizer: the folder that the model came from, where it has files of a tokenizer.
    """

    fields: tuple[tuple[str, str], ...] = ()
    generation: str | None = None
    tokenizer: str | None = None

    @classmethod
    def of(cls, folder: Path, fields: dict[str, Any]) -> "Origin":
        """What `folder` has beside sizes and weights, and these fields. Raises `ValueError` for
        damaged JSON.
        """
        generation = folder / GENERATION
        return cls(
            tuple(
                sorted(
                    (name, "" if value is ABSENT else json.dumps(value))
                    for name, value in fields.items()
                )
            ),
            json.dumps(read_json(generation)) if generation.is_file() else None,
            str(folder.absolute())
            if any((folder / name).is_file() for name in TOKENIZER)
            else None,
        )

    @property
    def values(self) -> dict[str, Any]:
        """The fields, as Python values; `ABSENT` for one that the file leaves out."""
        return {name: json.loads(text) if text else ABSENT for name, text in self.fields}

    def tokenizer_files(self) -> list[Path]:
        """The files of the tokenizer. Raises `ValueError` where they are not there any more."""
        if self.tokenizer is None:
            return []
        found = [file for name in TOKENIZER if (file := Path(self.tokenizer, name)).is_file()]
        if not found:
            raise ValueError(
                f"the model came with a tokenizer from {self.tokenizer}, and its files are not "
                "there any more. Put them back, "
                "or leave it out with dataclasses.replace(config.origin, tokenizer=None) and copy "
                f"{', '.join(TOKENIZER[:2])} "
                f"to the saved model yourself: without them transformers makes an empty tokenizer."
            )
        return found
