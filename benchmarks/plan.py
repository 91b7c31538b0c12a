"""What `parallax.plan` predicts beside what compiled steps have, in bytes; and beside the times of
steps that run.

    python benchmarks/plan.py [--quick]
        # compiles 80 layouts of two GPT-2s, runs nothing: about 20 minutes on 2 cores
    python benchmarks/plan.py --times
        # runs ten layouts: about 3 minutes; for a machine that does nothing else

See benchmarks/README.md for the columns.
"""

import argparse
import statistics

import jax
import jax.numpy as jnp
import live_hardware
import measure
import numpy as np
from jax.sharding import PartitionSpec as P

from parallax import hardware, mesh, plan
from parallax.layout import Layout
from parallax.models import decoder, gpt2
from parallax.plan.families import Config, family_of

MINI = gpt2.Config(layers=8, heads=8, width=256, context=256, vocabulary=8000)
MODELS = {"mini": MINI, "small": gpt2.SMALL}
# Of the machine code, not of the program: how memory is assigned does not depend on it.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

LAYOUTS = """
    4
    8  microbatches=2
    4  remat=block
    4  remat=products
    4  remat=attention
    8  data=8
    16 data=8,microbatches=2,zero=1,remat=block
    16 data=8,microbatches=2,zero=2,remat=block
    16 data=8,microbatches=2,zero=3,remat=block
    16 data=4,zero=3
    16 data=4,microbatches=2,zero=3,remat=products
    16 data=4,zero=1
    32 data=4,microbatches=4,zero=2
    8  data=2,zero=3,remat=gathers
    4  tensor=2
    4  tensor=4
    4  tensor=4,remat=block
    4  tensor=4,sequence=True
    4  tensor=4,sequence=True,remat=gathers
    4  tensor=2,sequence=True,remat=products
    8  tensor=4,microbatches=2,sequence=True,remat=block
    16 data=4,tensor=2
    16 data=2,tensor=4,microbatches=2,zero=1,sequence=True,remat=block
    16 data=2,tensor=2,zero=3,sequence=True,remat=gathers
    16 data=2,tensor=2,microbatches=2,zero=2,remat=attention
    8  stage=2,microbatches=2
    8  stage=4,microbatches=4
    8  stage=4,microbatches=8,remat=stage
    8  stage=2,microbatches=4,chunks=2
    8  stage=2,microbatches=4,remat=block
    8  stage=4,microbatches=8,remat=products
    8  stage=4,microbatches=4,schedule=gpipe
    16 data=2,stage=2,tensor=2,microbatches=4
    16 data=2,stage=2,tensor=2,microbatches=4,split_sends=True
    16 data=2,stage=2,tensor=2,microbatches=4,zero=1,remat=products
    16 data=2,stage=2,tensor=2,microbatches=4,zero=2,sequence=True,remat=block
    16 data=2,stage=2,tensor=2,microbatches=4,zero=3,sequence=True,remat=gathers
    16 data=2,stage=4,microbatches=8,zero=1
    8  stage=2,tensor=4,microbatches=4,sequence=True,remat=stage
    16 data=4,stage=2,microbatches=2,zero=3,remat=block
    16 data=4,stage=2,microbatches=4,chunks=2,zero=1,remat=stage
"""  # the global batch, and the layout

TIMED = """
    16 data=8
    16 data=8,zero=3,remat=block
    16 data=4,tensor=2
    16 data=2,tensor=4,sequence=True
    16 tensor=8
    16 tensor=8,remat=block
    16 data=4,stage=2,microbatches=4
    16 data=2,stage=4,microbatches=4,remat=block
    16 stage=8,microbatches=8
    16 stage=8,microbatches=4,remat=stage
"""


def main():
    arguments = parse()
    measure.virtual_devices(8)
    if arguments.times:
        return times(arguments.rounds)
    names = ("mini",) if arguments.quick else MODELS
    cases = [
        (name, *case) for name in names for case in read(LAYOUTS)[:: 13 if arguments.quick else 1]
    ]
    rows = []
    for name, batch, layout in cases:
        rows.append(row(name, batch, layout, comparison(MODELS[name], layout, batch)))
        print(
            f"{len(rows)} of {len(cases)}: {name}, {rows[-1]['layout']}: {rows[-1]['off']}",
            flush=True,
        )
    print(f"\n{measure.table(rows)}\n")
    off = [abs(float(row["off"].rstrip("%"))) for row in rows]

    def equal(column):
        return sum(row[column] == "equal" for row in rows)

    print(
        f"{len(rows)} layouts. Arguments equal in {equal('arguments')}, bytes sent along every "
        f"axis equal in {equal('sent')}. Temporaries: off by {statistics.median(off):.1f} % in the "
        f"median, {max(off):.1f} % at worst."
    )


def read(layouts: str) -> list[tuple[int, Layout]]:
    """The batch and the layout of each line."""
    lines = [line.split() for line in layouts.strip().splitlines()]
    return [(int(batch), Layout.parse("".join(rest))) for batch, *rest in lines]


def compiled(config: Config, layout: Layout, batch: int, options: dict | None = None):
    """The prepared step and its program."""
    mesh_ = mesh.make(**layout.axes, devices=jax.devices()[: layout.devices])
    prepared = decoder.train_step(
        family_of(config), config, plan.ADAMW, layout, mesh_, batch=batch, key=jax.random.key(0)
    )
    windows = jax.ShapeDtypeStruct(
        (batch, config.context + 1), jnp.int32, sharding=mesh.shardings(P("data"), mesh_)
    )
    return prepared, prepared.train.lower(prepared.shapes, windows).compile(options)


def comparison(config: Config, layout: Layout, batch: int) -> list[plan.Comparison]:
    """The predictions beside the program."""
    _, program = compiled(config, layout, batch, QUICKLY)
    return plan.compare(plan.plan(config, layout, hardware.VIRTUAL_CPU, batch=batch), program)


def row(name: str, batch: int, layout: Layout, found: list[plan.Comparison]) -> dict[str, object]:
    """One line of the table."""
    arguments, temporaries, *sent = found
    wrong = [one for one in sent if one.predicted != one.program]
    return {
        "model": name,
        "batch": batch,
        "layout": str(layout) or "one device",
        "arguments": "equal"
        if arguments.predicted == arguments.program
        else f"{arguments.off:+.2%}",
        "sent": "equal" if not wrong else ", ".join(f"{one.what} {one.off:+.2%}" for one in wrong),
        "sent MB": f"{sum(one.program for one in sent) / 1e6:.1f}",
        "temporaries MB": f"{temporaries.program / 1e6:.1f}",
        "predicted MB": f"{temporaries.predicted / 1e6:.1f}",
        "off": f"{temporaries.off:+.1%}",
    }


def times(rounds: int):
    """Predicted and measured times of ten layouts on all eight devices, and how well their orders
    agree."""
    here = live_hardware.measured(mesh.make(all=8))
    print(
        f"{here.name}, each of eight: {here.full_rate / 1e9:.3g} GFLOP/s, "
        f"{here.bandwidth / 1e9:.3g} GB/s, a hop {1e6 * here.fast.alpha:.3g} us, a byte "
        f"{1e9 * here.fast.beta:.3g} ns\n"
    )
    rivals, planned = {}, {}
    for batch, layout in read(TIMED):
        prepared, program = compiled(MINI, layout, batch)
        tokens = (
            np.arange(batch * (MINI.context + 1), dtype=np.int32).reshape(batch, -1)
            % MINI.vocabulary
        )
        rivals[str(layout)] = Rival(prepared, program, tokens, mesh.make(**layout.axes))
        planned[str(layout)] = plan.plan(MINI, layout, here, batch=batch)
    taken = measure.medians(measure.interleaved(rivals, rounds=rounds))
    rows = [
        {
            "layout": name,
            "predicted s": f"{planned[name].seconds.total:.3f}",
            "measured s": f"{seconds:.3f}",
            "products": f"{planned[name].seconds.products:.3f}",
            "memory": f"{planned[name].seconds.passes:.3f}",
            "messages": f"{planned[name].seconds.messages:.3f}",
            "new memory": f"{planned[name].seconds.fresh:.3f}",
        }
        for name, seconds in sorted(taken.items(), key=lambda item: item[1])
    ]
    print(measure.table(rows), "\n")

    def order(values):
        return np.argsort(np.argsort(values))

    predicted = order([planned[name].seconds.total for name in taken])
    print(
        "rank correlation (Spearman): "
        f"{np.corrcoef(predicted, order(list(taken.values())))[0, 1]:.2f}"
    )


class Rival:
    """A step that goes on from where it was."""

    def __init__(self, prepared, program, tokens, mesh_):
        self.program, self.state = program, jax.block_until_ready(prepared.init())
        self.windows = mesh.place(tokens, P("data"), mesh_)

    def __call__(self):
        """One step."""
        self.state, info = self.program(self.state, self.windows)
        return info


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four layouts of the smaller model")
    parser.add_argument("--times", action="store_true", help="run ten layouts instead")
    parser.add_argument("--rounds", type=int, default=5, help="of --times (5)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
