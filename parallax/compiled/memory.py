"""The memory of a compiled step, as XLA counts it. It needs no device.

memory.of(train.lower(*arguments).compile())  # {"arguments": ..., "temporaries": ..., "peak": ...}
"""

import jax


def of(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Returns the bytes on a device: arguments, results that take no argument's place, temporaries,
    and their sum.

    The program itself is counted too where it lies in the device's memory (TPU).
    """
    analysis = compiled.memory_analysis()
    assert analysis is not None, "This backend gives no memory analysis."
    sizes = {
        "arguments": analysis.argument_size_in_bytes,
        "results": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
    }
    if analysis.generated_code_size_in_bytes:
        sizes["program"] = analysis.generated_code_size_in_bytes
    return sizes | {"peak": sum(sizes.values())}
