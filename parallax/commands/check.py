"""The commands `parallax compare` and `parallax bisect` check a step split over virtual devices."""

import argparse
from pathlib import Path
from typing import Any

from parallax.commands.options import add_command, check_folder, layout_of, model, use_cpus


def add_checks(commands: Any) -> None:
    """Adds the commands `compare` and `bisect` to argparse's `commands`, with their options and the
    functions that run them.
    """
    add_command(
        commands,
        "compare",
        compare,
        "Compare a step's predicted memory and messages with the step compiled for virtual CPUs.",
        model="tiny",
    )
    command = add_command(
        commands,
        "bisect",
        first_difference,
        "Find the first value in which a split step differs from the step on one device.",
        model="tiny",
    )
    command.add_argument(
        "--record",
        metavar="FILE",
        help="compare with this record of an earlier --save, not with one device",
    )
    command.add_argument(
        "--save", metavar="FILE", help="write a record of the split run to this file"
    )


def compare(options: argparse.Namespace) -> str:
    """Returns, as text, a table of the values that the plan of the layout predicts, such as memory
    and messages, beside the same values of the compiled step. The training step is compiled for
    virtual CPU devices and not run. `options` has the model, the batch, the layout and the devices,
    as the command line gives them.

    Raises:
        ValueError: the layout does not fit the model, the batch or the devices.
    """
    import jax
    import jax.numpy as jnp

    from parallax import hardware, mesh
    from parallax import plan as plans
    from parallax.models import decoder

    chosen = model(options)
    layout = layout_of(options, chosen.config, options.devices)
    use_cpus(layout.devices)
    world = mesh.make(devices=jax.devices(), **layout.axes)
    train_step = decoder.train_step(
        chosen.family,
        chosen.config,
        plans.ADAMW,
        layout,
        world,
        batch=options.batch,
        key=jax.random.key(0),
    )
    # The shape of a batch of token windows. Each has one more token than the context, since the
    # targets are the inputs shifted by one.
    windows = jax.ShapeDtypeStruct(
        (options.batch, chosen.config.context + 1),
        jnp.int32,
        sharding=mesh.shardings(jax.P(layout.batch_axes), world),
    )
    compiled = train_step.train.lower(train_step.shapes, windows).compile()
    predicted = plans.plan(chosen.config, layout, hardware.VIRTUAL_CPU, batch=options.batch)
    # `plans.compare` returns a row for each prediction, and `plans.compared` writes them as text.
    return plans.compared(plans.compare(predicted, compiled))


def first_difference(options: argparse.Namespace) -> str:
    """Returns a report, as text, of the first value in which the training step of `--layout`
    differs from the step on one device. With `--record`, the step is compared with an earlier run
    instead. With `--save`, a record of this run is also written to a file.

    Raises:
        ValueError: the layout does not fit, the file of `--record` does not exist, or the folder of
            the file of `--save` does not exist.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from parallax import bisect, mesh
    from parallax.layout import Layout
    from parallax.models import decoder

    chosen = model(options)
    layout = layout_of(options, chosen.config, options.devices)
    if options.record and not Path(options.record).is_file():
        raise ValueError(
            f"--record needs a file that --save wrote; there is none at {options.record}."
        )
    check_folder(options, "save")
    # The record is loaded first, so a wrong file is refused before anything is compiled.
    reference = bisect.load(options.record) if options.record else None
    use_cpus(layout.devices)
    jax.config.update("jax_enable_x64", True)  # in float64, rounding is far below a mistake
    generator = np.random.default_rng(0)
    shape = (options.batch, chosen.config.context + 1)
    windows = generator.integers(0, chosen.config.vocabulary, shape).astype(np.int32)
    # AdamW is not used here: it divides a gradient by its own size. If the true gradient is 0, that
    # turns a rounding error into a large difference. The bias of the attention's keys has such a
    # gradient: it shifts all scores of a query alike, and a softmax ignores that.
    optimizer = optax.sgd(0.1, momentum=0.9)

    def run(layout: Layout):
        """Returns the pair that `bisect.record` needs: the training step of a layout, and the
        step's arguments `(state, windows)`.
        """
        train_step = decoder.train_step(
            chosen.family,
            chosen.config,
            optimizer,
            layout,
            mesh.make(devices=jax.devices()[: layout.devices], **layout.axes),
            batch=options.batch,
            key=jax.random.key(0),
            compute=decoder.Compute(dtype=jnp.float64),
        )
        return train_step.train, (train_step.init(), windows)

    if reference is None:
        reference = bisect.record(lambda: run(Layout()))
    # `rows` names the axes that split the sequences of the batch; the loss is a mean along them.
    # `means` names the other axes along which the loss is a mean: along "context", each device has
    # the mean loss of its own tokens.
    split = bisect.record(lambda: run(layout), rows=layout.batch_axes, means=("context",))
    if options.save:
        split.save(options.save)
    return str(bisect.compare(reference, split))
