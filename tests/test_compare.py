"""Two runs side by side: the arithmetic by hand, the words, what is refused."""

import json
import math

import pytest
import synthetic
from legible import assert_legible

from analysis import compare, load, present, report
from kernels.errors import UserError
from profiling import schema

CHAIN, WIDE = "chain_equal", "wide_gva_state"
TIMES = {"naive": {CHAIN: 400e-6, WIDE: 800e-6}, "ws": {CHAIN: 100e-6, WIDE: 200e-6}}
FASTER = {"naive": {CHAIN: 400e-6, WIDE: 800e-6}, "ws": {CHAIN: 50e-6, WIDE: 25e-6}}


@pytest.fixture
def make(tmp_path):
    """A run of its own id, with changes to its run.json."""

    def made(name, times, gpu="NVIDIA H200", profiled=(WIDE,), **changes):
        folder = synthetic.write_run(tmp_path / name, times, profiled=profiled)
        info = json.loads((folder / "run.json").read_text())
        info |= {"run": name, "commit": name} | changes
        info["gpu"] |= {"name": gpu, "slug": gpu.split()[1].lower()}
        (folder / "run.json").write_text(json.dumps(info))
        frame = schema.read(folder / "measurements.csv").assign(run=name, gpu=gpu)
        schema.write(frame, folder / "measurements.csv")
        return load.load(folder)

    return made


def test_ratios_by_hand(make):
    table = compare.table(make("a", TIMES), make("b", FASTER)).set_index(["case", "variant"])
    assert table["ratio"].to_dict() == pytest.approx(
        {
            (CHAIN, "naive"): 1,
            (CHAIN, "ws"): 2,
            (WIDE, "naive"): 1,
            (WIDE, "ws"): 8,
            ("geomean", "naive"): 1,
            ("geomean", "ws"): 4,
        }
    )
    # Each time spreads by 0.1 %; a quotient of two by their root of squares, a mean of two by that over the root of 2.
    assert table.loc[(CHAIN, "ws"), "ratio_spread"] == pytest.approx(math.sqrt(2) * 1e-3)
    assert table.loc[("geomean", "ws"), "ratio_spread"] == pytest.approx(1e-3)
    assert table.loc[("geomean", "ws"), ["ratio_min", "ratio_max"]].tolist() == pytest.approx([2, 8])


def test_the_headline_names_what_differs(make):
    a = make("a", TIMES)
    by_commit = compare.headline(a, make("b", FASTER))
    assert by_commit == ("On b, ws is 4.00 times as fast as on a (geometric mean over 2 cases; 2.00× to 8.00×).")
    assert compare.headline(make("c", FASTER, gpu="NVIDIA H100"), a).startswith(
        "On h200, ws takes 4.00 times as long as on h100"
    )


def test_a_case_of_one_run_only_is_left_out(make):
    table = compare.table(make("a", TIMES), make("b", {"naive": {WIDE: 8e-4}, "ws": {WIDE: 1e-4}}))
    assert set(table["case"]) == {WIDE, "geomean"}


def test_rungs_of_one_run_only_are_left_out(make):
    table = compare.table(make("a", TIMES), make("b", {**FASTER, "mine": FASTER["ws"]}))
    assert set(table["variant"]) == {"naive", "ws"}


def test_counters_side_by_side(make):
    a, b = make("a", TIMES), make("b", FASTER)
    frame = compare.counters(a, b).set_index(["variant", "metric"])
    assert frame.loc[("ws", "duration"), ["a", "b", "change"]].tolist() == pytest.approx([200e-6, 25e-6, 1 / 8])
    (printed,) = compare.counters_tables(a, b)
    assert printed.rows[0] == ["naive", "Duration", "800.0 µs", "800.0 µs", "1.00×"]
    assert compare.counters(a, make("c", FASTER, profiled=())).empty


def test_the_figure_is_legible(make):
    everybody = {name: {CHAIN: 1e-3 / i, WIDE: 1e-3 / i} for i, name in enumerate(("naive", "fused", "ws", "mine"), 1)}
    assert_legible(compare.figure(make("a", everybody), make("b", everybody, gpu="NVIDIA H100")), "comparison")


def other_protocol(make):
    return [make("a", TIMES), make("b", TIMES, protocol={"graph": "median of 7 replays", "eager": "median of 5 calls"})]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (lambda make: [make(name, TIMES) for name in "abc"], "one run or two were expected, found 3"),
        (lambda make: [make("a", TIMES)] * 2, "two runs were expected, found a twice"),
        (other_protocol, "found 'median of 5 replays' in .* and 'median of 7 replays' in .*"),
        (
            lambda make: [make("a", {"naive": {CHAIN: 1e-3}}), make("b", {"ws": {WIDE: 1e-3}}, profiled=())],
            f"rungs timed on the same cases were expected .*naive on {CHAIN}, and ws on {WIDE}",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(make, tmp_path, runs, message):
    with pytest.raises(UserError, match=message):
        compare.write(runs(make), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_compares_two_runs(make, tmp_path, monkeypatch, capsys):
    a, b = make("a", TIMES), make("b", FASTER)
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["report", "--run", f"{a.folder},{b.folder}", "--out", str(out)])
    report.main()
    assert capsys.readouterr().out.startswith(compare.headline(a, b))
    assert (out / "comparison.pdf").read_bytes().startswith(b"%PDF")
    assert (out / "tables" / "comparison.md").read_text(encoding="utf-8") == present.markdown(
        compare.times_table(a, b)
    ) + "\n"
    assert (out / "figures" / "comparison.svg").exists()
