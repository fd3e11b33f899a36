"""Tables for people: the frames of analysis.tables as text, and the writers that Markdown, LaTeX and Typst need."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd

from analysis import tables
from analysis.load import Run
from kernels import work
from kernels.problem import CASES
from profiling.metrics import LIMITS, METRICS, STALLS

NONE = "–"  # a value that does not exist
UNITS = ("tensor_pipe", "issue_active", "l2_throughput", "dram_throughput")  # one of which may be the limit


@dataclass(frozen=True)
class Table:
    """A printed table. Where a first cell is empty, the row belongs to the block that the last filled one began."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""
    text_columns: int = 1  # so many at the left are text; the rest are numbers
    bold: list[tuple[int, int]] = field(default_factory=list)  # cells that stand out: row and column

    @property
    def blocks(self) -> list[int]:
        """The rows that begin a block, but for the first; none where each row would."""
        starts = [i for i, row in enumerate(self.rows) if row[0]]
        return starts[1:] if len(starts) < len(self.rows) else []


def headline(run: Run) -> str:
    """The run's result in one sentence: the fastest later rung against the first."""
    table = tables.ladder(run)
    mean = tables.geomean(table)
    first, later = mean.iloc[0], mean.iloc[1:]
    over = f"geometric mean over {count(first['cases'], 'case')}, {run.info['gpu']['name']}"
    if later.empty:
        return f"{first['variant']} reaches {percent(first['light_share'])} of speed of light ({over})."
    best = later.loc[later["time_s"].idxmin()]
    verdict = compared(best["speedup"], best["speedup_spread"], first["variant"])
    return f"{best['variant']} {verdict}, and reaches {percent(best['light_share'])} of speed of light ({over})."


def compared(ratio: float, spread: float, other: str) -> str:
    """What a speed-up over `other` means, as a sentence without its subject; nothing within the spread counts."""
    if abs(ratio - 1) <= spread:
        return f"is as fast as {other}, within the measurement's spread"
    if ratio > 1:
        return f"is {times(ratio)[:-1]} times as fast as {other}"
    return f"takes {times(1 / ratio)[:-1]} times as long as {other}"


def rungs(run: Run) -> Table:
    """The ladder in short: a row per variant, geometric means over the cases that all of them run."""
    ladder = tables.ladder(run)
    mean = tables.geomean(ladder)
    first = mean["variant"].iloc[0]
    left_out = [case for case in run.ladder_cases if case not in tables.shared_cases(ladder)]
    note = f"vs {first}: in brackets the lowest and highest case. ± is half the interquartile range."
    if left_out:
        note += f" Left out, because not every rung runs them: {', '.join(left_out)}."
    return Table(
        title=f"Geometric mean over {count(mean['cases'].iloc[0], 'case')}",
        head=["Rung", "Idea", "Time, µs", f"vs {first}", "vs previous", "Of speed of light"],
        rows=[
            [
                row.variant,
                run.info["variants"][row.variant],
                with_spread(microseconds(row.time_s), row.spread),
                NONE
                if row.variant == first
                else f"{with_spread(times(row.speedup), row.speedup_spread)} "
                f"({times(row.speedup_min)} to {times(row.speedup_max)})",
                with_spread(times(row.step), row.step_spread),
                percent(row.light_share),
            ]
            for row in mean.itertuples()
        ],
        note=note,
        text_columns=2,
        bold=[(int(mean["time_s"].argmin()), column) for column in (0, 2)],
    )


def ladder(run: Run) -> Table:
    """The ladder in full: a block of rows per case, its fastest rung in bold."""
    frame = tables.ladder(run).set_index(["case", "variant"])
    first = tables.rungs(run)[0]
    rows, bold = [], []
    for case in run.cases:
        if case not in frame.index:
            continue
        fastest = frame.loc[case]["time_s"].idxmin()
        shown = [name for name in run.variants if (case, name) in frame.index or (name, case) in run.skipped]
        for i, variant in enumerate(shown):
            start = [case if i == 0 else "", variant]
            if (case, variant) not in frame.index:
                rows.append([*start, "skipped", NONE, NONE, NONE, NONE])
                continue
            row = frame.loc[case, variant]
            if variant == fastest:
                bold += [(len(rows), 1), (len(rows), 2)]
            rows.append(
                [
                    *start,
                    with_spread(microseconds(row["time_s"]), row["spread"]),
                    microseconds(row["eager_s"]),
                    NONE if variant == first else with_spread(times(row["speedup"]), row["speedup_spread"]),
                    with_spread(times(row["step"]), row["step_spread"]),
                    percent(row["light_share"]),
                ]
            )
    note = (
        "Time is the median of CUDA-graph replays, out of the L2 cache; eager is that of single calls, with Python, "
        "allocation and launch. ± is half the interquartile range; of a speed-up, that of its round-by-round ratios."
    )
    skips = [f" {variant} skips {case}: {reason}." for (variant, case), reason in run.skipped.items()]
    return Table(
        title="By case",
        head=["Case", "Rung", "Time, µs", "Eager, µs", f"vs {first}", "vs previous", "Of speed of light"],
        rows=rows,
        note=note + "".join(skips),
        text_columns=2,
        bold=bold,
    )


def cases(run: Run) -> Table:
    """What each case asks of the device, and the time below which nothing can run it."""
    rows = []
    for row in tables.cases(run).itertuples():
        limit = "arithmetic" if row.flops_s > row.bytes_s else "memory"
        counts = digits(row.flops / 1e9, 3), digits(row.bytes / 1e6, 3)
        rows.append([row.case, CASES[row.case].shape, limit, *counts, microseconds(row.light_s)])
    return Table(
        title="The cases and their speed of light",
        head=["Case", "Shape", "Limited by", "GFLOP", "MB", "Speed of light, µs"],
        rows=rows,
        note=f"Lower bounds of kernels/work.py at this device's measured ceilings: {_ceilings(run)}.",
        text_columns=3,
    )


def formulations(run: Run) -> Table:
    """What each way to write the core asks for, on the case with most arithmetic."""
    frame = tables.formulations(run)
    case = frame["case"].iloc[0]
    return Table(
        title=f"The formulations on {case} ({CASES[case].shape})",
        head=["Formulation", "GFLOP", "MB", "FLOP/byte", "Speed of light, µs"],
        rows=[
            [
                row.formulation,
                digits(row.flops / 1e9, 3),
                digits(row.bytes / 1e6, 3),
                digits(row.intensity, 3),
                microseconds(row.light_s),
            ]
            for row in frame.itertuples()
        ],
        note="Formulas in kernels/work.py. The token recurrence has least arithmetic and none of it is a matrix "
        "product: its speed of light, at the rate of one, is out of reach. Shares of speed of light are of the second "
        "row everywhere.",
    )


def preprocessing(run: Run) -> Table:
    """Preprocessing and core in a full forward, from Nsight Systems; where there is none, how to add it."""
    frame = tables.preprocessing(run)
    if frame.empty:
        return Table("Nsight Systems", [], [], absent("Nsight Systems", "nsys"))
    return Table(
        title="Preprocessing in a full forward",
        head=["Case", "Rung", "Preprocessing, µs", "Core, µs", "Share"],
        rows=[
            [
                case if i == 0 else "",
                row.variant,
                microseconds(row.preprocess_s),
                microseconds(row.core_s),
                percent(row.share),
            ]
            for case, part in frame.groupby("case", sort=False)
            for i, row in enumerate(part.itertuples())
        ],
        note="Sums of kernel times; every rung has the same preprocessing.",
        text_columns=2,
    )


def attempts(frame: pd.DataFrame) -> Table:
    """The rejected attempts of analysis.prose.attempts."""
    return Table(
        title="What was tried and not kept",
        head=["Stage", "Tried", "Measured", "Why not"],
        rows=frame.values.tolist(),
        note="From analysis/attempts.md, measured when they were tried and not rows of this run: unless it says "
        "otherwise, µs of the graph clock on one H200, core, geometric mean over the lab cases.",
        text_columns=4,
    )


def effect(run: Run, variant: str) -> str:
    """What a rung was worth, by the benchmark, in a sentence or two; that it was not timed, where it was not."""
    ladder = tables.ladder(run)
    mean = tables.geomean(ladder)
    if variant not in set(mean["variant"]):
        return f"The benchmark of this run did not time {variant}."
    row = mean.set_index("variant").loc[variant]
    time = with_spread(microseconds(row["time_s"]), row["spread"])
    over = f"geometric mean over {count(row['cases'], 'case')}"
    text = f"{variant} takes {time} µs, {percent(row['light_share'])} of speed of light ({over})."
    steps = ladder[ladder["variant"] == variant].set_index("case")["step"].dropna()
    if steps.empty or math.isnan(row["step"]):
        return text
    before = mean["variant"].iloc[list(mean["variant"]).index(variant) - 1]
    least, most = steps.idxmin(), steps.idxmax()
    return (
        f"{text} It is {with_spread(times(row['step']), row['step_spread'])} as fast as {before}: from "
        f"{times(steps[least])} on {least} to {times(steps[most])} on {most}."
    )


def bottleneck(run: Run, variant: str, case: str) -> str:
    """What Nsight Compute says of a rung on a case, in a few sentences; empty where it was not profiled."""
    found = tables.profile(run, variant, case)
    busy = {METRICS[name].label: found[name] for name in UNITS if name in found}
    waits = {name: found[name] for name in STALLS if name in found}
    if not busy or not waits:
        return ""
    shares = ", ".join(f"{label} {percent(share)}" for label, share in busy.items())
    longest = max(waits, key=waits.get)
    moved = (found.get("dram_read", math.nan) + found.get("dram_write", math.nan)) / work.core(CASES[case]).bytes
    return (
        f"On {case}, busy of their peak: {shares}. Device memory moves {times(moved)} the least that the core can. The "
        f"longest wait is {METRICS[longest].label} ({METRICS[longest].meaning}): {digits(waits[longest], 2)} warps per "
        "issued instruction."
    )


def counters(run: Run) -> list[Table]:
    """Nsight Compute's counters, a table per profiled case; where there is none, how to add one."""
    profiled = tables.profiled_cases(run)
    if not profiled:
        return [Table("Nsight Compute", [], [], absent("Nsight Compute", "ncu"))]
    return [_counters(case, tables.counters(run, case)) for case in profiled]


def timeline(run: Run) -> Table:
    """Kernel time per NVTX range from Nsight Systems; where there is none, how to add it."""
    frame = tables.timeline(run)
    if frame.empty:
        return Table("Nsight Systems", [], [], absent("Nsight Systems", "nsys"))
    rows, last = [], None
    for row in frame.itertuples():
        start = row.case if row.case != last else ""
        spent = [microseconds(time) for time in (row.kernel_s, row.projected_s, row.host_s)]
        rows.append([start, row.variant, row.phase, str(row.launches), *spent, percent(row.kernel_s / row.projected_s)])
        last = row.case
    return Table(
        title="Nsight Systems: kernel time per NVTX range",
        head=["Case", "Rung", "Phase", "Launches", "Kernels, µs", "Span, µs", "Host, µs", "Kernels in span"],
        rows=rows,
        note="One call after warm-up. The span lasts from the first operation's start to the last one's end; what "
        "kernels do not fill of it is the gaps between launches. Host: what the thread spent in the range, tracing "
        "included; the GPU runs beside it.",
        text_columns=3,
    )


def environment(run: Run) -> Table:
    """Where the numbers come from: device, software and protocol."""
    info = run.info
    gpu, seen = info["gpu"], info.get("clocks", {}).get("seen", [])
    rows = [
        ["Run", info["run"]],
        ["GPU", f"{gpu['name']}, {gpu['sm_count']} SMs, {gpu['l2_bytes'] / 2**20:.0f} MiB L2, driver {gpu['driver']}"],
        ["Commit", info["commit"]],
        ["Versions", ", ".join(f"{name} {version}" for name, version in info["versions"].items())],
    ]
    if info.get("ceilings"):
        rows.append(["Ceilings", _ceilings(run)])
    for clock, label in (("sm_mhz", "SM clock"), ("memory_mhz", "Memory clock")):
        # nvidia-smi's words: a number of MHz, or why there is none
        found = sorted({case[clock] for case in seen}, key=lambda word: (len(word), word))
        if found:
            extremes = " to ".join(dict.fromkeys((found[0], found[-1])))
            rows.append([label, f"{extremes} MHz between cases, {info['clocks']['max'][clock]} at most"])
    rows += [
        [
            f"Trace of {each['variant']}",
            f"{each['case']}, commit {each['commit']}, driver {each['driver']}; {microseconds(each['untraced_s'])} µs "
            f"a call, {microseconds(each['traced_s'])} µs with tracing",
        ]
        for each in info.get("trace", [])
    ]
    rows += [[f"Protocol: {name}", text] for name, text in info["protocol"].items()]
    return Table("Where the numbers come from", ["What", "Value"], rows, text_columns=2)


def origin(run: Run) -> str:
    """The one-line version of `environment`."""
    info, versions = run.info, run.info["versions"]
    software = ", ".join(f"{name} {versions[name]}" for name in ("tilelang", "torch") if name in versions)
    device = f"{info['gpu']['name']}, driver {info['gpu']['driver']}"
    return f"Run {info['run']}: {device}, {software}, commit {info['commit']}."


def markdown(*printed: Table) -> str:
    """Tables as GitHub Markdown, padded so that the source reads as a table too."""
    return "\n\n".join(_markdown(table) for table in printed)


def latex(*printed: Table) -> str:
    r"""Tables as LaTeX longtables with booktabs rules, for \input."""
    return "\n".join(["% needs \\usepackage{booktabs,longtable}", *map(_latex, printed)]) + "\n"


def digits(value: float, significant: int) -> str:
    """A number with that many significant digits, never an exponent and never a whole digit lost."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(float(f"{abs(value):.{significant}g}")))
    return f"{value:.{max(0, significant - 1 - exponent)}f}"


def microseconds(seconds: float) -> str:
    """Seconds as a number of µs."""
    return NONE if math.isnan(seconds) else digits(seconds * 1e6, 4)


def times(ratio: float) -> str:
    """A ratio as a factor, such as 2.41×."""
    return NONE if math.isnan(ratio) else digits(ratio, 3) + "×"


def percent(share: float) -> str:
    """A share as percent."""
    return NONE if math.isnan(share) else f"{share:.1%}"


def with_spread(text: str, spread: float) -> str:
    """A printed value with its relative spread, such as 2.41× ±0.2%; less than 0.005 % is printed as 0."""
    return text if math.isnan(spread) else f"{text} ±{digits(round(spread * 100, 2), 1)}%"


def count(number: int, noun: str) -> str:
    """A number of things, such as 8 cases."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _counters(case: str, frame: pd.DataFrame) -> Table:
    rows, last = [], None
    for row in frame.itertuples():
        shares = [percent(x) for x in (row.sm_throughput, row.dram_throughput, row.tensor_pipe, row.occupancy)]
        counts = [_scaled(row.registers, 1), _scaled(row.shared_memory, 2**10), _scaled(row.dram_bytes, 1e6)]
        stalls = ", ".join(f"{label} {digits(warps, 2)}" for label, warps in row.stalls)
        start = row.variant if row.variant != last else ""
        numbers = [microseconds(row.duration), *shares, *counts, times(row.dram_over_minimum)]
        rows.append([start, row.kernel, stalls, *numbers])
        last = row.variant
    head = ["Rung", "Kernel", "Top stalls", "µs", "SM", "DRAM", "Tensor", "Occupancy", "Registers", "Dynamic smem, KiB"]
    return Table(
        title=f"Nsight Compute: {case} ({CASES[case].shape})",
        head=[*head, "DRAM, MB", "of minimum"],
        rows=rows,
        note="Each kernel replayed with flushed caches: compare these durations with each other, never with the "
        "ladder's. Of minimum: DRAM bytes over the least that the whole core can move. Stalls: warps waiting per "
        "issued instruction.",
        text_columns=3,
    )


def occupancy_limit(of: Mapping[str, float]) -> tuple[str, str] | None:
    """How many CTAs fit an SM and which resources say so, from a rung's counters; None where it was not recorded."""
    limits = {word: of[name] for name, word in LIMITS.items() if not math.isnan(of.get(name, math.nan))}
    if not limits:
        return None
    fewest = min(limits.values())
    return count(int(fewest), "CTA"), " and ".join(word for word, room in limits.items() if room == fewest)


def absent(tool: str, part: str) -> str:
    """What to do about a run without the rows of a profiler that something is made of."""
    remedy = f"On a machine with a GPU, make record PART={part} adds them to the recorded run"
    return f"This run lacks the rows of {tool} for this. {remedy}; make {part} profiles into a run of its own."


def _ceilings(run: Run) -> str:
    """Both ceilings in words."""
    flops, moved = run.ceilings.flops_per_second / 1e12, run.ceilings.bytes_per_second / 1e12
    return f"{digits(flops, 3)} TFLOP/s in a BF16 matrix product, {digits(moved, 3)} TB/s in a copy"


def _scaled(value: float, unit: float) -> str:
    return NONE if math.isnan(value) else digits(value / unit, 3)


def _markdown(table: Table) -> str:
    parts = [f"**{_escape_markdown(table.title)}**"]
    if table.rows:
        cells = [[_escape_markdown(cell) for cell in row] for row in (table.head, *table.rows)]
        for i, j in table.bold:
            cells[i + 1][j] = f"**{cells[i + 1][j]}**"
        widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
        text = table.text_columns
        rule = ["-" * width if j < text else "-" * (width - 1) + ":" for j, width in enumerate(widths)]
        lines = []
        for row in (cells[0], rule, *cells[1:]):
            padded = (c.ljust(w) if j < text else c.rjust(w) for j, (c, w) in enumerate(zip(row, widths, strict=True)))
            lines.append(f"| {' | '.join(padded)} |")
        parts.append("\n".join(lines))
    if table.note:
        parts.append(_escape_markdown(table.note))
    return "\n\n".join(parts)


def _latex(table: Table) -> str:
    parts = [f"\\paragraph{{{_escape_latex(table.title)}}}"]
    if table.rows:
        lines = [[_escape_latex(cell) for cell in row] for row in (table.head, *table.rows)]
        for i, j in table.bold:
            lines[i + 1][j] = f"\\textbf{{{lines[i + 1][j]}}}"
        head, *rows = [" & ".join(line) + r" \\" for line in lines]
        for i in table.blocks:
            rows[i] = "\\addlinespace\n" + rows[i]
        columns = "l" * table.text_columns + "r" * (len(table.head) - table.text_columns)
        top = f"\\begin{{longtable}}{{@{{}}{columns}@{{}}}}"
        parts += [top, r"\toprule", head, r"\midrule\endhead", *rows, r"\bottomrule", r"\end{longtable}"]
    if table.note:
        parts.append(rf"\noindent {_escape_latex(table.note)}")
    return "\n".join(parts)


def _escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is. An underscore inside a word needs no escape on GitHub."""
    return re.sub(r"[\\`*<>|]|(?<!\w)_|_(?!\w)", lambda found: "\\" + found[0], text).replace("\n", " ")


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "µ": r"\textmu{}",
    "×": r"$\times$",
    "±": r"$\pm$",
    "–": "--",
    **{character: "\\" + character for character in "&%$#_{}"},
}


def _escape_latex(text: str) -> str:
    """Text that LaTeX shows as it is."""
    return "".join(_LATEX.get(character, character) for character in text)
