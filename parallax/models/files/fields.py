"""`config.json` as a table: every field that may stand in it, with what it must say. A field that
no table has is refused.

A number is a size of the model. Other fields have the one value that the code computes, or change
no logits and are free. So whatever transformers obeys is either read, or checked, or known to be
harmless.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallax.models.files.texts import read_json, short

ABSENT: Any = type("Absent", (), {})()  # of a field that the file leaves out


@dataclass(frozen=True)
class Number:
    """A number of the model, and where it stands.

    Args:
        names: the fields that state it, which must agree; all are written.
        aliases: other names of it, which must agree too, and are not written.
        nullable: those of them that may be null, which means that they are left out.
        kind: `int` or `float`; or `bool`, of a choice.
        default: what a field of `names` means that is left out, or a function of all fields to
            that; None: one must be there.
    """

    names: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()
    kind: type = int
    default: float | int | bool | Callable[[Mapping[str, Any]], Any] | None = None

    def read(self, fields: Mapping[str, Any], file: Path) -> Any:
        """The number. Raises `ValueError` for none, for two, or for something else."""
        first = self.names[0]
        given = {name: fields[name] for name in (*self.names, *self.aliases) if name in fields}
        given = {
            name: value
            for name, value in given.items()
            if value is not None or name not in self.nullable
        }
        if self.default is not None:
            meant = self.default(fields) if callable(self.default) else self.default
            given = {name: meant for name in self.names} | given
        kinds = {int: (int,), float: (int, float), bool: (bool,)}[self.kind]
        fits = lambda value: (
            isinstance(value, kinds) and isinstance(value, bool) == (self.kind is bool)
        )
        if not given or not all(map(fits, given.values())):
            needed = "true or false" if self.kind is bool else "a number"
            raise ValueError(
                f"{file} needs {needed} for {first}; got "
                f"{short(given) if given else 'no such field'}. Correct it."
            )
        if len(set(given.values())) > 1:
            raise ValueError(
                f"{file}: {' and '.join(given)} must agree; got {short(given)}. The model has one "
                "number for them."
            )
        number: Any = next(iter(given.values()))
        return self.kind(number)

    def written(self, value: Any) -> dict[str, Any]:
        """The fields that state it."""
        return dict.fromkeys(self.names, value)


@dataclass(frozen=True)
class Part:
    """What a model has of a form of its own, such as a record, in fields of a form of theirs.

    Args:
        names: the fields that it is read from.
        of: from all fields to the value. It raises `ValueError`; the caller puts the file's name
            before its message.
        to: from the value to the fields that are written.
    """

    names: tuple[str, ...]
    of: Callable[[Mapping[str, Any]], Any]
    to: Callable[[Any], Mapping[str, Any]]
    aliases: tuple[str, ...] = ()
    kind: type = object

    def read(self, fields: Mapping[str, Any], file: Path) -> Any:
        """The value. Raises `ValueError` as `of` does."""
        try:
            return self.of(fields)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    def written(self, value: Any) -> dict[str, Any]:
        """The fields that state it."""
        return dict(self.to(value))


@dataclass(frozen=True)
class Free:
    """A field that changes no logits.

    Args:
        default: what a model that was made here is written with, if at all.
        kinds: the types that its value may have, where transformers takes no others.
    """

    default: Any = ABSENT
    kinds: tuple[type, ...] = ()


NONE = type(None)
TOKEN_ID = (int, NONE)  # the types of a token's id
LATER = Free()

FREE: dict[str, Free] = {  # of every model of transformers
    **dict.fromkeys(
        (
            "architectures",
            "id2label",
            "label2id",
            "num_labels",
            "problem_type",
            "task_specific_params",
        ),
        LATER,
    ),
    **dict.fromkeys(
        ("_name_or_path", "name_or_path", "_commit_hash", "tokenizer_class", "finetuning_task"),
        LATER,
    ),
    **dict.fromkeys(
        ("output_hidden_states", "output_attentions", "return_dict", "output_scores"), LATER
    ),
    **dict.fromkeys(
        ("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"), LATER
    ),
    **dict.fromkeys(
        ("torchscript", "gradient_checkpointing", "tf_legacy_loss", "use_bfloat16"), LATER
    ),
    **dict.fromkeys(("sep_token_id", "decoder_start_token_id", "prefix"), LATER),
    # of generation, as old files have them
    **dict.fromkeys(
        ("max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams"),
        LATER,
    ),
    **dict.fromkeys(
        ("num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p"),
        LATER,
    ),
    **dict.fromkeys(
        ("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "bad_words_ids"), LATER
    ),
    **dict.fromkeys(
        ("encoder_no_repeat_ngram_size", "num_return_sequences", "return_dict_in_generate"), LATER
    ),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"), LATER),
    **dict.fromkeys(
        ("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"), LATER
    ),
    "use_cache": Free(True, (bool,)),
    "initializer_range": Free(0.02, (float,)),
    "bos_token_id": Free(None, TOKEN_ID),
    "eos_token_id": Free(None, (*TOKEN_ID, list)),
    "pad_token_id": Free(None, TOKEN_ID),
}

ONLY: dict[
    str, tuple
] = {  # of every model of transformers: what its code obeys, and ours has one value for
    "is_causal": (True,),
    "is_decoder": (False, True, None),
    "is_encoder_decoder": (False,),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "transformers_weights": (None,),
    "auto_map": (None,),
    "per_layer_config": (None,),
}

OF_THE_FILE = (
    "dtype",
    "torch_dtype",
    "transformers_version",
)  # of a file's own making: written anew


@dataclass(frozen=True)
class Fields:
    """The table of a family's `config.json`.

    Args:
        model_type: the family's name there.
        title: its name in a sentence.
        numbers: each argument of the family's configuration that files state, and where it stands.
        only: values that the code stands for; the first is meant where the field is left out, and
            written.
        derived: likewise, of the numbers; not written, since they follow from those.
        free: fields that change no logits, beside `FREE`.
        made: of the numbers, fields that a model made here is written with.
    """

    model_type: str
    title: str
    numbers: Mapping[str, Number | Part]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], Mapping[str, tuple[Any, ...]]] = lambda numbers: {}
    free: Mapping[str, Free] = field(default_factory=dict)
    made: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda numbers: {}

    def read(self, file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        """The numbers that `file` states, and the fields that `write` could not know by itself.

        Raises `ValueError` for what is missing, or what the model has no code for.
        """
        fields = read_json(file)
        self._check_type(fields, file)
        numbers = {name: number.read(fields, file) for name, number in self.numbers.items()}
        stays = ONLY | dict(self.only)
        fixed = stays | dict(self.derived(numbers))
        for name, values in fixed.items():
            if not any(_same(fields.get(name, values[0]), value) for value in values):
                raise ValueError(
                    f"{file}: {name} must be {' or '.join(map(repr, values))}; it is "
                    f"{short(fields[name])}, for which this "
                    f"{self.title} has no code. Load another model."
                )
        free = FREE | dict(self.free)
        self._check_known(fields, {*fixed, *free}, file)
        for name in fields.keys() & free.keys():
            kinds, value = free[name].kinds, fields[name]
            if kinds and (
                not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
            ):
                needed = " or ".join("null" if kind is NONE else kind.__name__ for kind in kinds)
                raise ValueError(
                    f"{file}: {name} must be of type {needed}; it is {short(value)}. Correct the "
                    "file."
                )
        plain = self._plain(numbers)
        names = {*fields, *(plain.keys() & free.keys())} & {*free, *stays}
        came = {name: fields.get(name, ABSENT) for name in names}
        return numbers, {
            name: value
            for name, value in came.items()
            if not _same_text(plain.get(name, ABSENT), value)
        }

    def blame(self, error: ValueError, file: Path) -> ValueError:
        """What a configuration said of its numbers, with the fields of `file` that state them."""
        named = {
            name: number
            for name, number in self.numbers.items()
            if re.search(rf"\b{name}\b", str(error))
        }
        where = ", ".join(
            f"{name} is {' and '.join(number.names)}" for name, number in named.items()
        )
        return ValueError(f"{file}: {error} In the file, {where}." if where else f"{file}: {error}")

    def write(
        self, numbers: Mapping[str, Any], kept: Mapping[str, Any], dtype: str
    ) -> dict[str, Any]:
        """The fields of a `config.json` of these numbers, with those that `read` kept."""
        stated = {
            name: value
            for size, number in self.numbers.items()
            for name, value in number.written(numbers[size]).items()
        }
        fields = {
            "model_type": self.model_type,
            **self._plain(numbers),
            **kept,
            **stated,
            "torch_dtype": dtype,
        }
        return {name: value for name, value in fields.items() if value is not ABSENT}

    def fingerprint(self, numbers: Mapping[str, Any]) -> str:
        """The sha256 of what the weights mean under these numbers; rates that only training has are
        left out.
        """
        meant = {name: numbers[name] for name in sorted(numbers) if not name.endswith("dropout")}
        return hashlib.sha256(
            json.dumps([self.model_type, meant], default=vars).encode()
        ).hexdigest()

    def _plain(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """What is written where nothing came in."""
        defaults = {name: each.default for name, each in self.free.items()}
        defaults = {name: each.default for name, each in FREE.items()} | defaults
        written = {name: value for name, value in defaults.items() if value is not ABSENT}
        return (
            written
            | {name: values[0] for name, values in self.only.items()}
            | dict(self.made(numbers))
        )

    def _check_type(self, fields: Mapping[str, Any], file: Path) -> None:
        found = fields.get("model_type", self.model_type)
        if found != self.model_type:
            raise ValueError(
                f"{file}: model_type must be {self.model_type!r}; it is {short(found)}, for which "
                f"this {self.title} has no "
                f"code. Load another model."
            )

    def _check_known(self, fields: Mapping[str, Any], others: set[str], file: Path) -> None:
        stated = {
            name for number in self.numbers.values() for name in (*number.names, *number.aliases)
        }
        unknown = sorted(fields.keys() - stated - others - {*OF_THE_FILE, "model_type"})
        if unknown:
            raise ValueError(
                f"{file}: {', '.join(map(short, unknown[:5]))} "
                f"{'is' if len(unknown) == 1 else 'are'} not known here, and may "
                f"change what the model computes. Remove {'it' if len(unknown) == 1 else 'them'} "
                "from the file where "
                f"transformers gives the same logits without."
            )


def _same(value: Any, other: Any) -> bool:
    """Whether both mean the same: 1 is not True, nor 0 False."""
    return type(value) is type(other) and value == other


def _same_text(value: Any, other: Any) -> bool:
    """Whether both are written alike, or both left out."""
    if value is ABSENT or other is ABSENT:
        return value is other
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)
