"""Checks a split run: compares its first losses with those of a run on one device."""

import jax
import numpy as np

from gpt2_run.plan import Plan, default_dtype, optimizer
from parallax import data, mesh
from parallax.layout import Layout
from parallax.models import decoder, gpt2

BY_DEFAULT = 3  # steps, of the model `tiny`, which one device can hold


def compared_steps(plan: Plan) -> int:
    """Returns the number of first steps that are also computed on one device; 0 if the
    run has only one device, or several processes."""
    s = plan.settings
    asked = s.compare
    if asked is None:
        asked = BY_DEFAULT if s.model == "tiny" and s.source is None else 0
    if plan.mesh.size == 1 or plan.job.processes > 1:
        return 0
    return min(asked, s.steps)


def losses(plan: Plan) -> list[float]:
    """Returns the losses of the first steps, computed on one device. The batches, the
    first weights and the optimizer are those of the split run."""
    s, number = plan.settings, compared_steps(plan)
    if number == 0:
        return []
    layout = Layout(precision=s.precision)
    train_step = decoder.train_step(
        gpt2.FAMILY,
        plan.config,
        optimizer(s),
        layout,
        mesh.make(devices=jax.devices()[:1], **layout.axes),
        batch=s.batch,
        key=jax.random.key(s.seed),
        compute=decoder.Compute(max_norm=1.0, dtype=default_dtype()),
    )
    state, values = train_step.init(plan.begins_with), []
    for step in range(number):
        batch = data.batch(
            plan.train, seed=s.seed, step=step, size=s.batch, length=plan.length
        )
        state, info = train_step.train(state, np.asarray(batch, np.int32))
        values.append(float(info.loss))
    return values


def compared(records: list[dict]) -> list[dict]:
    """Returns the records that have both losses: of the split run and of one device."""
    return [record for record in records if "one_device" in record and "loss" in record]


def summary(record: dict) -> str:
    """Returns a line that compares the two losses of a step."""
    difference = abs(record["loss"] - record["one_device"])
    return (
        f"step {record['step']}: loss {record['loss']:.6f}, on one device "
        f"{record['one_device']:.6f}: difference {difference:.1e}"
    )


def table(records: list[dict]) -> str:
    """Returns one line, made by `summary`, for each record that has the losses of both
    runs; "" if there is no such record."""
    return "\n".join(summary(record) for record in compared(records))
