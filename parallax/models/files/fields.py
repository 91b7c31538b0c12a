"""`config.json` as a table: every field that it may have, and the values of each field that this
code supports.

There are three kinds of fields. *Numbers* state the arguments of the model's configuration, such as
sizes, dropout rates and the epsilon of the norms. *Free* fields change no logits. Any other field
must have a value that the code supports: the table `only` lists these values, and the function
`derived` makes such a table for fields whose values depend on the numbers. If a field is in no
table, an error names the field, since the field may change the logits that the library
`transformers` computes. A *new* model was made by its class, and not loaded from files.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallax.models.files.json_file import read_json, short


@dataclass(frozen=True)
class Number:
    """A number in the model's configuration, such as a size or a dropout rate, and the fields of
    `config.json` that state the number.

    Args:
        names: the fields that state the number. They must agree, and `save` writes all of them.
        aliases: further fields that may state the number; they must agree too, and are not written.
        nullable: the fields that may be null. A field that is null counts as left out.
        kind: `int`, `float` or `bool`.
        default: the value of a field of `names` that is left out, or a function from all fields to
            that value; None: at least one field must be present.
    """

    names: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    nullable: tuple[str, ...] = ()
    kind: type = int
    default: float | int | bool | Callable[[Mapping[str, Any]], Any] | None = None

    def read(self, fields: Mapping[str, Any]) -> Any:
        """Returns the number that `fields` state. Raises `ValueError` if it is missing, if two
        fields disagree, or if a field is of another type.
        """
        stated: dict[str, Any] = {}
        # Each of `names` has the default, unless the file states it. An alias alone, with another
        # value than the default, disagrees with the default and is refused.
        if self.default is not None:
            default = self.default(fields) if callable(self.default) else self.default
            stated = dict.fromkeys(self.names, default)
        for name in (*self.names, *self.aliases):
            if name in fields and not (fields[name] is None and name in self.nullable):
                stated[name] = fields[name]
        # JSON writes 1.0 also as 1. `type`, not `isinstance`: in Python a bool is an int.
        kinds = (int, float) if self.kind is float else (self.kind,)
        if not stated or any(type(value) not in kinds for value in stated.values()):
            needed = "true or false" if self.kind is bool else "a number"
            got = short(stated) if stated else "no such field"
            raise ValueError(
                f"the file needs {needed} ({self.kind.__name__}) for {self.names[0]}; got {got}. "
                "Correct it."
            )
        if len(set(stated.values())) > 1:
            raise ValueError(
                f"{' and '.join(stated)} must agree; got {short(stated)}. The model has one number "
                "for them: give all of them the same value."
            )
        return self.kind(next(iter(stated.values())))

    def written(self, value: Any) -> dict[str, Any]:
        """Returns a dict from each field of `names` to the same number, `value`."""
        return dict.fromkeys(self.names, value)


@dataclass(frozen=True)
class Part:
    """A value in the model's configuration that several fields of `config.json` state together,
    such as the scaling of rotary positions.

    Args:
        names: the fields that the value is read from.
        read: a function from all fields to the value; it raises `ValueError` for a wrong field.
        written: a function from the value to the fields that are written.
        aliases: other names of these fields, which are not written.
        kind: the type of the value. Errors describe a model by its values of kind `int`, as in
            "GPT-2 of n_layer=3".
    """

    names: tuple[str, ...]
    read: Callable[[Mapping[str, Any]], Any]
    written: Callable[[Any], Mapping[str, Any]]
    aliases: tuple[str, ...] = ()
    kind: type = object


# Fields of every model of transformers that change no logits, and the types of their values that
# transformers accepts; () means any type.
FREE: dict[str, tuple[type, ...]] = {
    "architectures": (),
    "id2label": (),
    "label2id": (),
    "num_labels": (),
    "problem_type": (),
    "finetuning_task": (),
    "task_specific_params": (),
    "_name_or_path": (),
    "tokenizer_class": (),
    "output_attentions": (),
    "output_hidden_states": (),
    "return_dict": (),
    "torchscript": (),
    "gradient_checkpointing": (),
    "_attn_implementation_autoset": (),
    "use_cache": (bool,),
    "initializer_range": (float,),
    "bos_token_id": (int, type(None)),
    "eos_token_id": (int, type(None), list),
    "pad_token_id": (int, type(None)),
}
# Fields of every model of transformers that may change its logits, and the values of each field
# that this code supports.
ONLY: dict[str, tuple] = {
    "is_causal": (True,),
    "is_decoder": (False, True, None),
    "is_encoder_decoder": (False,),
    "cross_attention_hidden_size": (None,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
    "transformers_weights": (None,),
    "auto_map": (None,),
}
# Fields that may have any value here, and whose values are not kept: `write` or transformers sets
# them in a new file. (Only `model_type` is checked, by `Fields.read`.)
WRITTEN_ANEW = {"model_type", "dtype", "torch_dtype", "transformers_version"}


@dataclass(frozen=True)
class Fields:
    """The fields that the `config.json` of a family of models may have, and the supported values.

    Args:
        model_type: the family's name in the file.
        title: the family's name in errors.
        numbers: a dict. A key is the name of an argument of the family's configuration. The value
            names the fields of the file that state this argument.
        only: the supported values of each field that changes the logits that `transformers`
            computes. If a file leaves the field out, the first of its supported values counts; the
            file of a new model states this value.
        derived: a function from a dict to a table like `only`. The dict has the names in `numbers`
            as keys, and the model's numbers as values. `save` writes a field of the table only if
            `new` returns the field, and writes the value from `new`.
        free: fields that change no logits, in addition to `FREE`, and the types of their values.
        new: a function that takes the same dict as `derived`, and returns the fields of a new
            model's file that are in neither `numbers` nor `only`.
    """

    model_type: str
    title: str
    numbers: Mapping[str, Number | Part]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], Mapping[str, tuple[Any, ...]]] = lambda numbers: {}
    free: Mapping[str, tuple[type, ...]] = field(default_factory=dict)
    new: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda numbers: {}

    def read(self, file: Path) -> tuple[dict[str, Any], tuple[tuple[str, str], ...]]:
        """Returns the numbers that `file` states, and its differences from the file that `save`
        would write for a new model with the same numbers.

        A difference is a pair: the name of a field, and the field's value as JSON. The field is in
        a table of this family (`free` or `only`) or of all families (`FREE` or `ONLY`). The value
        is "" for a free field that a new model's file has and `file` leaves out. `save` repeats the
        differences: it writes the values, and leaves out the fields with "".

        Raises:
            ValueError: a field is missing, unknown, or has a value that the code does not support.
        """
        fields, supported = read_json(file), ONLY | dict(self.only)
        try:
            # `model_type` must name this family. It is not in `supported`: `save` writes it anew
            # (`WRITTEN_ANEW`), so it must not be one of the differences below.
            self._check_values(fields, {"model_type": (self.model_type,)} | supported)
            numbers = {name: number.read(fields) for name, number in self.numbers.items()}
            derived = self.derived(numbers)
            self._check_values(fields, derived)
            self._check_known(fields, {*supported, *derived})
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        # The fields that may differ from a new model's. A derived field follows from the numbers.
        kept = {*FREE, *self.free, *supported}
        stated = _as_json({name: fields[name] for name in fields.keys() & kept})
        new = _as_json(self._new(numbers))
        # All fields that the file states, and the free fields that it leaves out. A field of `only`
        # that it leaves out has the value of a new model: no difference.
        names = sorted(stated.keys() | (new.keys() & {*FREE, *self.free}))
        differing = (
            (name, stated.get(name, "")) for name in names if stated.get(name) != new.get(name)
        )
        return numbers, tuple(differing)

    def blame(self, error: ValueError, file: Path) -> ValueError:
        """Returns `error`, which a configuration raised, as an error that names `file`. If the text
        of `error` names an argument of the configuration, such as `width`, the new error also names
        the fields of `file` that state this argument.
        """
        stated = ", ".join(
            f"{name} is {' and '.join(number.names)}"
            for name, number in self.numbers.items()
            if re.search(rf"\b{name}\b", str(error))
        )
        return ValueError(f"{file}: {error}{f' In the file, {stated}.' if stated else ''}")

    def write(
        self, numbers: Mapping[str, Any], differing: tuple[tuple[str, str], ...], dtype: str
    ) -> dict[str, Any]:
        """Returns the fields of a `config.json` that states these numbers and the weights' `dtype`.
        The other fields are those of `_new(numbers)`, changed by `differing`, the differences that
        `read` returned.
        """
        texts = _as_json(self._new(numbers)) | dict(differing)
        fields = {name: json.loads(text) for name, text in texts.items() if text}  # "": left out
        for name, number in self.numbers.items():
            fields |= number.written(numbers[name])
        return {"model_type": self.model_type, **fields, "torch_dtype": dtype}

    def fingerprint(self, numbers: Mapping[str, Any]) -> str:
        """Returns the sha256 of the family's name and of all `numbers` except the dropout rates,
        which do not change the meaning of the weights.
        """
        meant = {name: numbers[name] for name in sorted(numbers) if not name.endswith("dropout")}
        # `vars`: a number may be a record, and counts as the dict of its fields.
        text = json.dumps([self.model_type, meant], default=vars)
        return hashlib.sha256(text.encode()).hexdigest()

    def _new(self, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of a new model's `config.json` that `only` and `new` give. The fields
        that state `numbers`, the model's numbers, are not among them.
        """
        return {name: values[0] for name, values in self.only.items()} | dict(self.new(numbers))

    def _check_values(self, fields: Mapping[str, Any], only: Mapping[str, tuple]) -> None:
        """Refuses a field of a file whose value is not among its supported values in `only`."""
        for name in fields.keys() & only.keys():
            value, values = fields[name], only[name]
            # Compared with their types: in Python 1 == True and 0 == False.
            if not any(type(value) is type(needed) and value == needed for needed in values):
                raise ValueError(
                    f"{name} must be {' or '.join(map(repr, values))}; it is {short(value)}, which "
                    f"Parallax does not support in a {self.title}. Load a model with a supported "
                    f"{name}."
                )

    def _check_known(self, fields: Mapping[str, Any], others: set[str]) -> None:
        """Refuses unknown fields: those that are not in `numbers`, `free`, `FREE`, `WRITTEN_ANEW`
        or `others`. `others` has the names of the fields whose values are checked already. Also
        refuses a field in `free` or `FREE` if its value has a wrong type.
        """
        free, known = FREE | dict(self.free), {*WRITTEN_ANEW, *others}
        for number in self.numbers.values():
            known |= {*number.names, *number.aliases}
        if unknown := sorted(fields.keys() - known - free.keys()):
            raise ValueError(
                f"{', '.join(map(short, unknown[:5]))} {'is' if len(unknown) == 1 else 'are'} not "
                "known here, and may change what the model computes. Remove a field only if "
                "transformers gives the same logits without it."
            )
        # `save` writes the free fields again, and transformers accepts only values of these types.
        for name in fields.keys() & free.keys():
            if free[name] and type(fields[name]) not in free[name]:  # (): any type
                kinds = " or ".join(kind.__name__ for kind in free[name])
                needed = kinds.replace("NoneType", "null")
                raise ValueError(
                    f"{name} must be of type {needed}; it is {short(fields[name])}. Correct the "
                    "file."
                )


def _as_json(fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns each field with its value as JSON."""
    return {name: json.dumps(value, sort_keys=True) for name, value in fields.items()}
