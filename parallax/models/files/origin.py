"""`Origin`: the `config.json` fields and the files that came with a model and that the model does
not use. `save` writes them again.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from parallax.models.files.json_file import read_json

GENERATION = "generation_config.json"
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)


@dataclass(frozen=True)
class Origin:
    """The `config.json` fields and the files that came with a model and that the model does not
    use. An `Origin` can be compared and hashed, as a static part of a model must be.

    Attributes:
        fields: the fields of the model's `config.json` whose values are not those that `save`
            writes for a new model (a model that was not loaded from files). Each field comes with
            its value as JSON, or with "" if the file leaves the field out.
        generation: `generation_config.json`, as JSON; None if there was none.
        tokenizer: the folder that the model came from; None if it has no files of a tokenizer.
            `save` copies these files as they are when `save` runs.
    """

    fields: tuple[tuple[str, str], ...] = ()
    generation: str | None = None
    tokenizer: str | None = None

    @classmethod
    def of(cls, folder: Path, fields: tuple[tuple[str, str], ...]) -> "Origin":
        """Returns the `Origin` of the model in `folder`. `fields` is the value of the attribute
        `fields`: pairs of a field's name and its value as JSON. Raises `ValueError` for damaged
        JSON.
        """
        generation = folder / GENERATION
        has_tokenizer = any((folder / name).is_file() for name in TOKENIZER)
        return cls(
            fields=fields,
            generation=json.dumps(read_json(generation)) if generation.is_file() else None,
            tokenizer=str(folder.absolute()) if has_tokenizer else None,
        )

    def tokenizer_files(self) -> list[Path]:
        """Returns the files of the tokenizer, or an empty list if the model came without one.
        Raises `ValueError` if the files are gone.
        """
        if self.tokenizer is None:
            return []
        files = [Path(self.tokenizer, name) for name in TOKENIZER]
        present = [file for file in files if file.is_file()]
        if not present:
            raise ValueError(
                f"the model came with a tokenizer from {self.tokenizer}, and the tokenizer's files "
                "are not there any more. Put the files back. Or save without a tokenizer, with "
                "dataclasses.replace(config.origin, tokenizer=None), and add "
                f"{' and '.join(TOKENIZER[:2])} to the saved folder yourself: without these files "
                "transformers makes an empty tokenizer."
            )
        return present
