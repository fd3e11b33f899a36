"""Whatever happens to a valid export of Nsight Compute, its reader gives the right rows or refuses it as BadExport."""

import csv
import gzip
import io
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from profiling import ncu_export, run, tools
from profiling.metrics import METRICS

# The same examples in every run; one costs milliseconds.
EXAMPLES = settings(
    max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
COUNTERS = {metric.counter for metric in METRICS.values()}


def recorded():
    """A recorded raw CSV, without most of the columns that are not read."""
    text = gzip.decompress((run.RECORDED / "h200" / "ncu" / "chain_equal.csv.gz").read_bytes()).decode()
    lines = list(csv.reader(io.StringIO(text)))
    others = ("ID", "thread Domain", "Kernel Name", "CC", "device__attribute_d", "device__attribute_max", "launch__")
    keep = [i for i, name in enumerate(lines[0]) if name in COUNTERS or name.startswith(others)]
    return [[line[i] for i in keep] for line in lines]


def as_details(lines):
    """The same launches as a details CSV: those of our metrics that this page shows, in rows that end behind them."""
    column = {name: i for i, name in enumerate(lines[0])}
    nvtx = next(name for name in column if name.startswith("thread Domain"))
    head = ["ID", nvtx, "Kernel Name", "CC"]
    found = [[*head, "Section Name", "Metric Name", "Metric Unit", "Metric Value", "Rule Name", "Rule Type"]]
    for line in lines[2:]:
        for metric in METRICS.values():
            if metric.details:
                i = column[metric.counter]
                found.append([*(line[column[name]] for name in head), *metric.details, lines[1][i], line[i], ""])
    return found


def text(lines):
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(lines)
    return out.getvalue()


RAW = recorded()
TABLES = {"raw": RAW, "details": as_details(RAW)}
TEXTS = {page: text(lines) for page, lines in TABLES.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exports")


def outcome(folder, data, name="export.csv"):
    """The rows of an export as {(variant, kernel, metric): value}, or None where it is refused, in one paragraph."""
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    try:
        rows = ncu_export.read(path, "r")
    except tools.BadExport as error:
        refusal = str(error)
    else:
        assert rows
        found = {(row["variant"], row["kernel"], row["metric"]): row["value"] for row in rows}
        assert len(found) == len(rows)
        return found
    assert str(path) in refusal
    assert "\n" not in refusal
    return None


def assert_right(found, right, whole=False):
    assert found.keys() == right.keys() if whole else found.keys() <= right.keys()
    for key, value in found.items():
        assert value == pytest.approx(right[key], rel=1e-9, abs=1e-15), key


@pytest.fixture(scope="module", params=TEXTS)
def page(request):
    return request.param


@pytest.fixture(scope="module")
def right(page, folder):
    return outcome(folder, TEXTS[page])


def test_the_untouched_exports_are_read(right, page):
    assert len({kernel for _, kernel, _ in right}) == len(RAW) - 2
    assert {metric for *_, metric in right} == {name for name in METRICS if page == "raw" or METRICS[name].details}


@EXAMPLES
@given(data=st.data())
def test_cut_anywhere(page, folder, right, data):
    whole = TEXTS[page].encode()
    found = outcome(folder, whole[: data.draw(st.integers(0, len(whole)))])
    assert found is None or assert_right(found, right) is None


@EXAMPLES
@given(data=st.data())
def test_columns_dropped_repeated_and_reordered(page, folder, right, data):
    count = len(TABLES[page][0])
    columns = data.draw(
        st.permutations(range(count)) | st.lists(st.integers(0, count - 1), min_size=count // 2, max_size=count + 2)
    )
    columns = [0, *(i for i in columns if i)]  # a table of ncu begins with the kernel's number
    whole = [line + [""] * (count - len(line)) for line in TABLES[page]]
    found = outcome(folder, text([line[i] for i in columns] for line in whole))
    assert found is None or assert_right(found, right) is None
    if len(columns) == count == len(set(columns)):
        assert found == right


@EXAMPLES
@given(data=st.data())
def test_rows_dropped_repeated_and_reordered(page, folder, right, data):
    lines = TABLES[page]
    chosen = data.draw(
        st.permutations(range(len(lines))) | st.lists(st.integers(0, len(lines) - 1), max_size=len(lines))
    )
    found = outcome(folder, text(lines[i] for i in chosen))
    assert found is None or assert_right(found, right) is None


@EXAMPLES
@given(end=st.sampled_from(["\r\n", "\r", "\n"]), encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]))
def test_other_line_ends_and_encodings(page, folder, right, end, encoding):
    assert outcome(folder, TEXTS[page].replace("\n", end).encode(encoding)) == right


@EXAMPLES
@given(data=st.data())
def test_output_of_the_program_between_the_rows(page, folder, right, data):
    lines = TEXTS[page].splitlines()
    printed = st.text(max_size=40) | st.sampled_from(['"', '""', '"ID"', '"a","b"', "==PROF== Disconnected", "1,2,3"])
    for said in data.draw(st.lists(printed, min_size=1, max_size=4)):
        i = data.draw(st.integers(0, len(lines)))
        # With or without a line end of its own.
        lines[i : i + 1] = [said, *lines[i : i + 1]] if data.draw(st.booleans()) else [said + "".join(lines[i : i + 1])]
    found = outcome(folder, "\n".join(lines).encode("utf-8", errors="surrogateescape") + b"\n")
    assert found is None or assert_right(found, right, whole=True) is None


@EXAMPLES
@given(data=st.data())
def test_program_output_that_does_not_look_like_a_table_is_passed_over(page, folder, right, data):
    lines = TEXTS[page].splitlines()
    for said in data.draw(st.lists(st.from_regex(r"[a-z=][ -!#-~]{0,60}", fullmatch=True), max_size=4)):
        lines.insert(data.draw(st.integers(0, len(lines))), said)
    assert outcome(folder, "\n".join(lines)) == right


# The units of ncu 2022 to 2026 and how many base units each has.
FAMILIES = (
    {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1.0},
    {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9},
    {"byte/block": 1.0, "Kbyte/block": 1e3},
    {"hz": 1.0, "Mhz": 1e6, "Ghz": 1e9, "cycle/nsecond": 1e9, "cycle/usecond": 1e6, "cycle/second": 1.0},
)


@EXAMPLES
@given(data=st.data())
def test_other_units(folder, data):
    lines = [list(line) for line in RAW]
    for i, unit in enumerate(RAW[1]):
        family = next((family for family in FAMILIES if unit in family), None)
        if family and RAW[0][i] in COUNTERS:
            lines[1][i] = data.draw(st.sampled_from(sorted(family)))
            for line in lines[2:]:
                line[i] = f"{float(line[i]) * family[unit] / family[lines[1][i]]:.18f}"
    assert_right(outcome(folder, text(lines)), outcome(folder, TEXTS["raw"]), whole=True)


@EXAMPLES
@given(unit=st.text(max_size=12), counter=st.sampled_from(sorted(COUNTERS)))
def test_any_unit_is_known_or_refused(folder, unit, counter):
    lines = [list(line) for line in RAW]
    i = RAW[0].index(counter)
    lines[1][i] = unit
    found = outcome(folder, text(lines))
    assert found is None or unit == RAW[1][i] or unit.partition("/")[0] in ncu_export._UNITS


@EXAMPLES
@given(
    group=st.sampled_from(["", ",", ".", "'", "’", " ", "\xa0", "\u202f"]),
    mark=st.sampled_from([".", ","]),
    indian=st.booleans(),
    columns=st.lists(st.integers(1, len(RAW[0]) - 1), unique=True, max_size=4) | st.just(range(1, len(RAW[0]))),
    conflicts=st.integers(0, 10**7),
)
def test_another_locale(folder, group, mark, indian, columns, conflicts):
    """Also of few columns, which may leave open what a separator means: then a number is refused, never guessed."""
    if group == mark:
        return
    needed = ("Kernel Name", "thread Domain", METRICS["duration"].counter, METRICS["bank_conflicts"].counter)
    columns = [0, *(i for i, name in enumerate(RAW[0]) if i and (i in columns or name.startswith(needed)))]
    lines = [[line[i] for i in columns] for line in RAW]
    for line in lines[2:]:
        line[lines[0].index(METRICS["bank_conflicts"].counter)] = str(conflicts)
    right = outcome(folder, text(lines))

    def localized(cell):
        # Hardware counters, with six decimals, are printed without a locale.
        if not re.fullmatch(r"\d+(\.\d{1,5})?", cell):
            return cell
        whole, _, decimals = cell.partition(".")
        head, tail = whole[:-3], whole[-3:]
        step = 2 if indian else 3
        parts = [head[max(end - step, 0) : end] for end in range(len(head), 0, -step)][::-1]
        return group.join([*parts, tail]) + (mark + decimals if decimals else "")

    for line in lines[2:]:
        line[:] = [localized(cell) if "__" in name else cell for name, cell in zip(lines[0], line, strict=True)]
    found = outcome(folder, text(lines))
    if len(columns) == len(RAW[0]):
        assert found is not None
    assert found is None or assert_right(found, right, whole=True) is None


@EXAMPLES
@given(data=st.data())
def test_a_damaged_archive(folder, data):
    packed = bytearray(gzip.compress(TEXTS["raw"].encode(), mtime=0))
    if data.draw(st.booleans()):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    else:
        del packed[data.draw(st.integers(0, len(packed) - 1)) :]
    found = outcome(folder, bytes(packed), "export.csv.gz")
    assert found is None or found == outcome(folder, TEXTS["raw"])


@EXAMPLES
@given(
    data=st.binary(max_size=400), head=st.sampled_from([b"", b'"ID",', *(t.encode()[:3000] for t in TEXTS.values())])
)
@pytest.mark.parametrize("name", ["export.csv", "export.csv.gz"])
def test_anything_else_is_refused(folder, name, data, head):
    assert outcome(folder, head + data, name) is None
