"""Figures of Nsight Compute's counters, a panel per rung or per resource, drawn from analysis.tables.profiles."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis import style, tables
from analysis.load import Run
from analysis.present import absent, digits, occupancy_limit, percent
from profiling.metrics import LIMITS, METRICS, STALLS

REASONS = 7  # stall reasons that are shown, those with the longest bar anywhere
USE = ("tensor_pipe", "issue_active", "sm_throughput", "l2_throughput", "dram_throughput")
# What an SM of compute capability 9.0 has (CUDA C++ Programming Guide, technical specifications).
MOST_REGISTERS, MOST_SHARED = 255, 227 * 2**10
_ROW = 0.17  # inches


def stalls_figure(run: Run, case: str | None) -> Figure:
    """Warps that wait per issued instruction, by reason; a panel per rung."""
    found = tables.profiles(run, case).reindex(columns=STALLS).dropna(axis="columns")
    if found.empty:
        return style.message(absent("Nsight Compute", "ncu"))
    shown = found.max().nlargest(REASONS).index
    last, worst = found.index[-1], found.iloc[-1].idxmax()
    title = f"What warps of {last} wait for most is “{METRICS[worst].label}”: {METRICS[worst].meaning}"
    with style.look():
        figure = _panels(found[shown], title, case, lambda value: digits(value, 2), found.to_numpy().max())
        figure.supxlabel("Warps that wait, per issued instruction", fontsize=7.5)
    return figure


def utilisation_figure(run: Run, case: str | None) -> Figure:
    """How busy each part of the GPU is, of its peak; a panel per rung."""
    found = tables.profiles(run, case).reindex(columns=USE).dropna(axis="columns")
    if found.empty:
        return style.message(absent("Nsight Compute", "ncu"))
    tensor = found.iloc[:, 0]
    title = (
        f"{METRICS[found.columns[0]].label}: {percent(tensor.iloc[-1])} of its peak in {found.index[-1]}, "
        f"{percent(tensor.iloc[0])} in {found.index[0]}"
    )
    with style.look():
        figure = _panels(100 * found, title, case, lambda value: f"{value:.0f}", 100)
        figure.supxlabel("Busy, % of peak", fontsize=7.5)
    return figure


def resources_figure(run: Run, case: str | None) -> Figure:
    """What a CTA holds and how many fit: occupancy and its limit, registers, shared memory, waves; a row per rung."""
    found = tables.profiles(run, case).reindex(columns=["occupancy", "registers", "shared_memory", "waves", *LIMITS])
    found = found.dropna(subset=found.columns[:4])
    if found.empty:
        return style.message(absent("Nsight Compute", "ncu"))
    panels = {
        "registers": ("Registers of\na thread", 1, MOST_REGISTERS),
        "shared_memory": ("Dynamic smem of\na CTA, KiB", 2**-10, MOST_SHARED),
        "waves": ("CTAs, of those that\nthe GPU can hold", 1, 1),
    }
    limits = [occupancy_limit(row) for _, row in found.iterrows()]
    title = f"What an SM holds of {found.index[-1]}"
    if limits[-1]:
        title = f"An SM has room for {limits[-1][0]} of {found.index[-1]}, limited by {limits[-1][1]}"
    with style.look():
        figure = style.headed(1.0 + _ROW * len(found), f"{title} ({case})")
        occupancy, *others = figure.subplots(1, 1 + len(panels), sharey=True)
        for y, ((variant, row), limit) in enumerate(zip(found.iterrows(), limits, strict=True)):
            occupancy.barh(y, 100 * row["occupancy"], **style.fill(variant))
            fit = " by ".join(limit) if limit else "limit not recorded"
            occupancy.text(104, y, f"{percent(row['occupancy'])}, {fit}", va="center", fontsize=6.5)
            for axes, (name, (_, scale, most)) in zip(others, panels.items(), strict=True):
                end = scale * max(most, found[name].max())
                axes.barh(y, scale * row[name], **style.fill(variant))
                axes.text(1.05 * end, y, digits(scale * row[name], 3), va="center", fontsize=6.5)
                axes.set_xlim(0, 1.35 * end)
        for axes, (label, scale, most) in zip(others, panels.values(), strict=True):
            axes.axvline(scale * most, color=style.INK, lw=0.8, ls="--")
            axes.set_xlabel(label)
            axes.locator_params(axis="x", nbins=3)
        occupancy.set_xlim(0, 100)
        occupancy.set_xticks([0, 50, 100])
        occupancy.set_xlabel("Occupancy, % of warps,\nand the CTAs that fit")
        occupancy.set_yticks(range(len(found)), found.index)
        occupancy.set_ylim(len(found) - 0.4, -0.6)
    return figure


def _panels(found: pd.DataFrame, title: str, case: str, text, end: float) -> Figure:
    """A panel per row of `found`, a bar per column; every panel has the same axis, which begins at 0."""
    figure = style.headed(0.9 + _ROW * len(found.columns), f"{title} ({case})")
    grid = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (variant, row) in zip(grid, found.iterrows(), strict=True):
        for y, value in enumerate(row):
            axes.barh(y, value, **style.fill(variant))
            style.label(axes, value, y, text(value), fontsize=6.5)
        axes.set_title(variant, fontsize=7.5)
        axes.set_xlim(0, 1.3 * end)
        axes.locator_params(axis="x", nbins=2)
        axes.set_yticks(range(len(found.columns)), [METRICS[name].label for name in found.columns])
        axes.set_ylim(len(found.columns) - 0.4, -0.6)
    return figure
