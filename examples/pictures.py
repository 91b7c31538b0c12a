"""The pictures of the examples, written to out/NAME/ under the folder in which an
example is run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

COLOURS = ("#c8d9ec", "#5b8fc7", "#b0413e")
WIDTHS = (
    8,
    4,
    1.3,
)  # the first curve shows on both sides of the second, and that of the third


def curves(
    name: str, of: Mapping[str, Sequence[float]], seconds: Mapping[str, float]
) -> Path:
    """Draws the test accuracies by epoch in the left plot, and the seconds per epoch in
    the right plot."""
    figure, (left, right) = _subplots(1, 2, figsize=(9, 4), width_ratios=(2, 1))
    for (label, curve), width, colour in zip(of.items(), WIDTHS, COLOURS, strict=True):
        left.plot(
            range(1, len(curve) + 1),
            [100 * share for share in curve],
            linewidth=width,
            color=colour,
            label=label,
        )
    left.set(
        xlabel="epochs",
        ylabel="test accuracy (%)",
        title="one curve over the other",
    )
    left.legend(frameon=False, loc="lower right")
    left.grid(alpha=0.25)
    bars = right.bar(list(seconds), list(seconds.values()), color=COLOURS, width=0.6)
    right.bar_label(bars, fmt="%.2f s")
    right.set(ylabel="seconds per epoch (median)", title="on the same cores")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return _saved(figure, name)


def images(name: str, rows: Mapping[str, Sequence[np.ndarray]]) -> Path:
    """Draws rows of grey images of one size, each row under its title."""
    figure, axes = _subplots(len(rows), 1, figsize=(9, 0.95 * len(rows)))
    for strip, (title, row) in zip(axes, rows.items(), strict=True):
        strip.imshow(
            np.hstack(
                [np.pad(np.asarray(image), 1, constant_values=0.5) for image in row]
            ),
            cmap="gray",
            vmin=0,
            vmax=1,
        )
        strip.set_title(title, fontsize=10, loc="left")
        strip.set_axis_off()
    return _saved(figure, name)


def memory(
    name: str, runs: Mapping[str, Sequence[float]], kept: Mapping[str, float]
) -> Path:
    """Draws one panel for each run, with a bar for each step: the bytes on one device
    during the step. In front of the bars, a filled area for each item of `kept` shows
    the bytes that are kept from step to step."""
    figure, axes = _subplots(1, len(runs), figsize=(4.8 * len(runs), 4), sharey=True)
    for panel, (label, during) in zip(axes, runs.items(), strict=True):
        steps = range(1, len(during) + 1)
        panel.bar(
            steps,
            [held / 1e6 for held in during],
            width=0.7,
            color=COLOURS[0],
            label="temporary memory",
        )
        level = 0.0
        for (what, size), colour in zip(kept.items(), COLOURS[1:], strict=True):
            panel.fill_between(
                (0.5, len(during) + 0.5),
                level,
                level + size / 1e6,
                color=colour,
                label=what,
                linewidth=0,
            )
            level += size / 1e6
        panel.set(xlabel="step", title=label, xlim=(0.5, len(during) + 0.5))
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("MB on the first device")
    axes[-1].legend(frameon=False, loc="upper right")
    return _saved(figure, name)


def loads(name: str, by_step: np.ndarray) -> Path:
    """Draws the load of each expert by step, one panel for each layer. `by_step`,
    [steps, layers, experts], holds the loads divided by the mean load."""
    figure, axes = _subplots(
        1, by_step.shape[1], figsize=(9, 3.6), sharey=True, squeeze=False
    )
    for layer, panel in enumerate(axes[0]):
        panel.plot(range(1, len(by_step) + 1), by_step[:, layer], linewidth=1.1)
        panel.axhline(1, color="black", linewidth=0.8, linestyle="--")
        panel.set(xlabel="step", title=f"layer {layer}")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("load of each expert, 1 is the mean")
    return _saved(figure, name)


def losses(name: str, of: Mapping[str, Mapping[int, float]]) -> Path:
    """Draws the held-out losses by step, the curves of all runs in one plot."""
    figure, axes = _subplots(1, 1, figsize=(7, 4))
    for (label, curve), width, colour in zip(of.items(), WIDTHS, COLOURS, strict=True):
        axes.plot(
            list(curve),
            list(curve.values()),
            linewidth=width,
            color=colour,
            label=label,
        )
    axes.set(xlabel="steps", ylabel="held-out loss (nats per token)")
    axes.legend(frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return _saved(figure, name)


def _subplots(*arguments, **options):
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            'The pictures are drawn by matplotlib: pip install -e ".[draw]".'
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(*arguments, layout="constrained", **options)


def _saved(figure, name: str) -> Path:
    path = Path("out") / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
