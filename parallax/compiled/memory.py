"""Reads the memory of a compiled step, as XLA counts it. No device is needed.

memory.of(train.lower(*arguments).compile())
# {"arguments": ..., "results": ..., "temporaries": ..., "peak": ...}
"""

import jax


def of(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Returns a dict of bytes on a device, with the keys "arguments", "results", "temporaries", and
    "peak" for the sum of these. "results" leaves out results that are written over a donated
    argument.

    On a TPU the returned dict also has the key "program", the bytes of the program itself, which is
    in the device's memory. "peak" includes these bytes.
    """
    analysis = compiled.memory_analysis()
    assert analysis is not None, "This backend gives no memory analysis."
    sizes = {
        "arguments": analysis.argument_size_in_bytes,
        # XLA writes some results over donated arguments, and calls these results aliases.
        "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
    }
    if analysis.generated_code_size_in_bytes:
        sizes["program"] = analysis.generated_code_size_in_bytes
    return sizes | {"peak": sum(sizes.values())}
