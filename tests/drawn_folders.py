"""Folders with a model, damaged or changed as a draw says: for what `gpt2.load` refuses, and what
it takes."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import safetensors.numpy

FIXTURE = Path(__file__).parent / "fixtures" / "gpt2"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
ODD = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        3,
        1.5,
        10**9,
        10**18,
        10**399,
        1e300,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        "x",
        "\ud800",
        "gelu_pytorch_tanh",
        [],
        [1],
        {},
        {"a": [None]},
        "../model.safetensors",
        "/dev/zero",
    ),
]
NAMES = [
    *(
        "n_layer",
        "n_head",
        "n_embd",
        "n_positions",
        "n_ctx",
        "vocab_size",
        "n_inner",
        "layer_norm_epsilon",
        "resid_pdrop",
    ),
    *(
        "activation_function",
        "tie_word_embeddings",
        "is_causal",
        "num_hidden_layers",
        "hidden_size",
        "model_type",
        "eos_token_id",
    ),
    *(
        "transformers_weights",
        "quantization_config",
        "torch_dtype",
        "use_cache",
        "summary_type",
        "something_else",
        "pruned_heads",
    ),
]


def damaged(folder: Path, seed: int) -> str:
    """Copy the fixture into `folder`, and damage it in one of many ways, which are told."""
    shutil.copytree(FIXTURE, folder)
    draw = np.random.default_rng(seed)
    damage = DAMAGES[seed % len(DAMAGES)]
    damage(folder, draw)
    return damage.__name__


def shard(folder: Path) -> None:
    """Split the weights over two files and an index."""
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    names = sorted(tensors)
    parts = dict(zip(SHARDS, (names[:20], names[20:]), strict=True))
    for file, part in parts.items():
        safetensors.numpy.save_file({name: tensors[name] for name in part}, folder / file)
    (folder / WEIGHTS).unlink()
    index = {
        "metadata": {},
        "weight_map": {name: file for file, part in parts.items() for name in part},
    }
    (folder / INDEX).write_text(json.dumps(index))


def _file(folder, draw) -> Path:
    return folder / str(draw.choice(["config.json", WEIGHTS]))


def cut(folder, draw):
    file = _file(folder, draw)
    content = file.read_bytes()
    file.write_bytes(content[: draw.integers(len(content))])


def overwritten(folder, draw):
    """Some bytes of the configuration or of the weights' header."""
    file = _file(folder, draw)
    content = bytearray(file.read_bytes())
    for place in draw.integers(min(len(content), 3000), size=draw.integers(1, 4)):
        content[place] = draw.integers(256)
    file.write_bytes(content)


def field(folder, draw):
    _fields(folder, lambda fields: fields | {str(draw.choice(NAMES)): ODD[draw.integers(len(ODD))]})


def field_gone(folder, draw):
    _fields(
        folder,
        lambda fields: {name: value for name, value in fields.items() if draw.random() > 0.1},
    )


def nested(folder, draw):
    depth = int(draw.choice([30, 100, 1000, 100_000]))
    file = folder / str(draw.choice(["config.json", "generation_config.json"]))
    file.write_text('{"a": ' + "[" * depth + "]" * depth + "}")


def header(folder, draw):
    """A tensor's entry in the header says something else."""
    content = (folder / WEIGHTS).read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    found = json.loads(content[8 : 8 + size])
    name = str(draw.choice(sorted(found.keys() - {"__metadata__"})))
    entry = found[name]
    change = draw.integers(6)
    if change == 0:
        entry["dtype"] = str(draw.choice(["F16", "I64", "F8_E4M3", "F32", "Q", "BOOL", "U64"]))
    elif change == 1:
        entry["shape"] = [
            int(draw.choice([0, 1, 12, 10**9, 2**63, 2**64 - 1])) for _ in range(draw.integers(4))
        ]
    elif change == 2:
        entry["data_offsets"] = [int(each) for each in draw.integers(70_000, size=2)]
    elif change == 3:
        found[f"transformer.h.{draw.choice([7, 10**9, -1])}.ln_1.bias"] = found.pop(name)
    elif change == 4:
        found["x" * 10_000 if draw.random() < 0.5 else "é\n"] = entry
    else:
        found["__metadata__"] = {"format": "pt", "parallax.configuration": "of another"}
    text = json.dumps(found).encode()
    text += b" " * (-len(text) % 8)
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


def length(folder, draw):
    """The header's length."""
    content = (folder / WEIGHTS).read_bytes()
    size = int(draw.choice([0, 1, 7, 100, 99_999_999, 2**40, 2**63]))
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", size) + content[8:])


def index(folder, draw):
    shard(folder)
    found = json.loads((folder / INDEX).read_text())
    names = sorted(found["weight_map"])
    name, change = str(draw.choice(names)), draw.integers(4)
    if change == 0:
        found["weight_map"][name] = ODD[draw.integers(len(ODD))]
    elif change == 1:
        del found["weight_map"][name]
    elif change == 2:
        found["weight_map"] = ODD[draw.integers(len(ODD))]
    else:
        (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps(found))


def other_files(folder, draw):
    """A file more, a folder where a file should be, a byte order mark."""
    change = draw.integers(5)
    if change == 0:
        (folder / "adapter_config.json").write_text("{}")
    elif change == 1:
        (folder / "generation_config.json").write_bytes(draw.bytes(20))
    elif change == 2:
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).mkdir()
    elif change == 3:
        content = (folder / "config.json").read_bytes()
        (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + content)
    else:
        (folder / "config.json").write_bytes(draw.bytes(1000))


DAMAGES = [
    cut,
    overwritten,
    field,
    field_gone,
    nested,
    header,
    length,
    index,
    other_files,
    field,
    header,
]


def _fields(folder, change):
    fields = change(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(fields))
