"""Puts the results before the user's eyes: two short tables and a plot of the loss curves."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table

from integration_tests.demo.results import Results

__all__ = ["plot", "print_tables"]

MARKS = {"resume on 2 ranks": "o", "resume on 4 ranks": "x", "resume on 1 rank": "+"}


def print_tables(results: Results, console: Console) -> None:
    """What was promised and found; then sizes and times, PyTorch's own checkpointing beside ours."""
    checks = Table("promise", "found", "", title="What was checked", title_justify="left")
    for check in results.checks:
        checks.add_row(check.promise, check.found, "[green]yes[/]" if check.kept else "[bold red]NO[/]")
    console.print(checks)
    times = Table(title="Times (medians, in turns, default settings, fsync on) and sizes", title_justify="left")
    times.add_column("")
    for heading in ("ours, s", "stock, s", "ours ÷ stock", "ours, MB", "stock, MB"):
        times.add_column(heading, justify="right")
    for timing in results.timings:
        ours, stock = timing.seconds["ours"], timing.seconds["stock"]
        sizes = [f"{timing.checkpoint_bytes[name] / 1e6:.2f}" for name in ("ours", "stock")]
        times.add_row(timing.what, f"{ours:.2f}", f"{stock:.2f}", f"{ours / stock:.2f}", *sizes)
    console.print(times)


def plot(results: Results, path: Path) -> None:
    """Draw the loss of every job over the steps as a PNG."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # after the choice of the backend

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for curve in results.curves:
        steps, losses = list(curve.losses), list(curve.losses.values())
        if curve.label in MARKS:
            axes.plot(steps, losses, MARKS[curve.label], label=curve.label, markersize=8, fillstyle="none")
        else:
            axes.plot(steps, losses, label=curve.label, linewidth=5 if "killed" in curve.label else 1.5, alpha=0.6)
    axes.axvline(results.saved_at + 0.5, color="grey", linestyle=":", label=f"the checkpoint, step {results.saved_at}")
    axes.axvline(results.killed_at + 0.5, color="tab:red", linestyle=":", label=f"SIGKILL, step {results.killed_at}")
    axes.set(
        xlabel="step", ylabel="loss (nats per byte)", title="A byte-level transformer, killed in the middle of a save"
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
