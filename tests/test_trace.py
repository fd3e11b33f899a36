"""Traces: markers that leave kernels as they are, rows and path from synthetic buffers, and the recorded ones."""

import importlib.util
import itertools
import json
import re

import numpy as np
import pandas as pd
import pytest
import synthetic
import torch
from legible import assert_legible
from matplotlib.colors import to_hex
from traced import assert_holds_together

import variants
from analysis import load, plots_trace, present, report, roles
from analysis import trace as explained
from kernels import build, markers, problem, work
from kernels.markers import CHUNKS, MARKERS, Marker
from profiling import record, run, spans, trace
from profiling.schema import BadTable

CASE = "wide_gva_state"
MARKED = ("smem", "multibuf", "ws", "rs", "split")
# Two roles by hand: one computes from what the other loads, which has two homes for it.
LOADER = [Marker("loader", "wait empty", -2), Marker("loader", "copy K"), Marker("loader", "arrive full")]
WORKER = [
    Marker("worker", "wait full"),
    Marker("worker", "issue W"),
    Marker("worker", "compute P"),
    Marker("worker", "drain W"),
    Marker("worker", "arrive empty"),
]


def traced(name, case=CASE):
    (launch,) = build.launches_of(
        variants.load(name).gdn_prefill_forward, build.meta_inputs(problem.CASES[case]), traced=True
    )
    return launch.source


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with the traces that the markers of every rung would leave."""
    times = {name: {CASE: 1e-3 / 2**i} for i, name in enumerate(MARKED)}
    folder = synthetic.write_run(tmp_path_factory.mktemp("trace") / "run", times)
    for name in MARKED:
        synthetic.write_trace(folder, name, CASE, traced(name).markers)
    return folder


def by_hand(tmp_path, found=(*LOADER, *WORKER), **how):
    folder = synthetic.write_run(tmp_path / "run", {"ws": {CASE: 1e-3}})
    synthetic.write_trace(folder, "ws", CASE, found, **how)
    return roles.read(folder, run.read_info(folder))[0]


# Markers


@pytest.mark.parametrize("name", MARKED)
def test_markers_leave_the_cubin_as_it_is(name, tmp_path):
    source = (run.ROOT / "variants" / f"{name}.py").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in source if not re.match(r"\s*(role|mark)\(|from kernels.markers import", line)]
    assert len(source) - len(kept) > 20
    path = tmp_path / f"{name}_without_markers.py"
    path.write_text("".join(kept), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    bare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bare)
    cubins = [
        build.cubin(source).content
        for module in (bare, variants.load(name))
        for source in build.kernels_of(module.gdn_prefill_forward, (problem.CASES[CASE],))
    ]
    assert len(cubins) == 2
    assert cubins[0] == cubins[1]


@pytest.mark.parametrize("name", MARKED)
def test_a_traced_build_spills_nothing_and_serializes_no_wgmma(name):
    source = traced(name)
    made = build.cubin(source)
    assert "C75" not in made.log  # ptxas' warnings of wgmma that it serialized
    (facts,) = build.facts(source)
    assert (facts.spill_bytes, facts.ldl, facts.stl) == (0, 0, 0)
    assert facts.hgmma > 0


def test_an_untraced_build_after_a_traced_one_has_no_trace():
    assert traced("multibuf").markers
    (source,) = build.kernels_of(variants.load("multibuf").gdn_prefill_forward, (problem.CASES[CASE],))
    assert source.markers == ()
    assert "gdn_mark" not in source.prim_func.script(show_meta=True)
    assert source.prim_func.script() != traced("multibuf").prim_func.script()


@pytest.mark.parametrize("name", MARKED)
def test_the_roles_of_a_rung_do_not_wait_for_ever(name):
    """By the chunks that its markers name: a wait for an arrival that comes too late, or never, would stand still."""
    buffer = synthetic.clocks(traced(name).markers, 20)
    assert (buffer[:20] > 0).sum() >= 19 * len(traced(name).markers)


def test_the_buffer_bounds_what_is_stored():
    assert f"(unsigned)chunk < {CHUNKS}" in markers._DEVICE
    assert all(case.T <= 64 * CHUNKS for case in problem.CASES.values())
    recorder = markers._Recorder(None, [None] * MARKERS, ("state", 0, 0))
    with pytest.raises(markers.BadMarker, match=f"at most {MARKERS} markers.*leave some out"):
        recorder.mark("wait w_full", 0)


@pytest.mark.parametrize("text", ["w_full", "await w_full", "wait", ""])
def test_a_marker_without_verb_or_name_is_refused(text):
    with pytest.raises(markers.BadMarker, match=r"of a verb \(wait, issue.*expected, found '"):
        markers._Recorder(None, [], ("state", 0, 0)).mark(text, 0)


def test_a_marker_without_a_role_is_refused():
    with pytest.raises(markers.BadMarker, match="found 'wait w_full' with no role before it"):
        markers._Recorder(None).mark("wait w_full", 0)


def test_markers_of_no_role_are_not_recorded():
    recorder = markers._Recorder(None, [], (None, 0, 0))
    recorder.mark("wait w_full", 0)
    assert recorder.markers == []


def test_markers_do_nothing_outside_of_a_traced_build():
    assert markers.role("state", 0, None) is None
    assert markers.mark("nonsense") is None


@pytest.mark.parametrize(("case", "tiles"), [(CASE, (64, 64, 64, 64, 128)), ("q16_64_4x8192", (128, 128, 64, 64, 128))])
def test_the_tile_of_a_cta(case, tiles):
    assert tuple(traced(name, case).dv_tile for name in MARKED) == tiles


def test_the_tensor_floor_is_the_core_s_arithmetic():
    assert (work.chunk_cycles(64), work.chunk_cycles(128)) == (1280, 2304)
    case = problem.Case("floor", 2, 640, 4, 4)
    flops = work.chunk_cycles(128) * work.TENSOR_FLOPS_PER_CYCLE * 2 * 4 * 10
    assert work.core(case).flops == flops


# Rows


def test_rows_by_hand():
    found = [Marker("a", "wait x"), Marker("a", "arrive y", 1), Marker("b", "copy z"), Marker("a", "compute w")]
    buffer = np.zeros((CHUNKS, MARKERS), dtype=np.int64)
    buffer[0, :4] = 1000, 1007, 1003, 1010
    buffer[1, :4] = 1100, 1108, 1103, 1111
    rows = spans.decode(found, buffer)
    assert [tuple(row) for row in rows[spans.EVENT].itertuples(index=False)] == [
        ("a", 0, "wait x", "wait", 0, 0, 10),
        ("a", 0, "arrive y", "arrive", 1, 7, 0),
        ("a", 0, "compute w", "elementwise", 0, 10, 90),
        ("b", 0, "copy z", "copy", 0, 3, 100),
    ]


def test_a_marker_that_a_chunk_does_not_reach_leaves_no_gap():
    buffer = synthetic.clocks([*LOADER, *WORKER], 6)
    buffer[2, 4] = 0
    rows = spans.decode([*LOADER, *WORKER], buffer)
    own = rows[(rows["role"] == "worker") & (rows["chunk"] == 2)]
    assert list(own["span"]) == ["wait full", "compute P", "drain W", "arrive empty"]
    assert own["cycles"].sum() == 20 + 40 + 170 + 260


@pytest.mark.parametrize("chunks", [0, 1])
def test_a_trace_of_less_than_two_chunks_is_refused(chunks):
    with pytest.raises(BadTable, match=r"at least two chunks.*trace a longer case"):
        spans.decode(WORKER, synthetic.clocks(WORKER, chunks))


@pytest.mark.parametrize("name", MARKED)
def test_spans_tile_the_loop_of_every_role(name, folder):
    rows = spans.read(spans.stored(folder, name, CASE))
    assert rows.columns.tolist() == spans.COLUMNS
    assert set(rows["kind"]) == set(spans.KINDS)
    assert rows["chunk"].max() == 30
    for _, own in rows[rows["kind"] != "arrive"].groupby("role"):
        assert (own["start"].diff().iloc[1:] == own["cycles"].shift().iloc[1:]).all()
        assert own["cycles"].sum() == own["start"].iloc[-1] + own["cycles"].iloc[-1] - own["start"].iloc[0]


def test_the_same_trace_is_the_same_file(folder, tmp_path):
    path = spans.stored(folder, "ws", CASE)
    again = spans.stored(tmp_path, "ws", CASE)
    spans.write(spans.read(path), again)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.drop(columns="about"), "rows with the columns"),
        (lambda rows: rows.iloc[:0], "found 0 with"),
        (lambda rows: rows.assign(tool="ncu"), "found several or others of tool ncu"),
        (lambda rows: rows.assign(variant=["ws", *["smem"] * (len(rows) - 1)]), "found several or others of variant"),
        (lambda rows: rows.assign(kind="idle"), "kinds idle"),
        (lambda rows: rows.drop(index=rows.index[3]), "spans of state that follow one another"),
        (lambda rows: rows.assign(cycles=0), "spans of state that follow one another"),
    ],
)
def test_a_table_that_is_no_trace_is_refused(folder, change, message):
    with pytest.raises(BadTable, match=f"^here: .*{message}"):
        spans.validate(change(spans.read(spans.stored(folder, "ws", CASE))), "here")


def test_a_missing_or_broken_file_is_refused(tmp_path):
    with pytest.raises(BadTable, match="no such file: record it with `make trace`"):
        spans.read(tmp_path / "ws.csv.gz")
    (tmp_path / "ws.csv.gz").write_text("no gzip")
    with pytest.raises(BadTable, match="a packed CSV was expected"):
        spans.read(tmp_path / "ws.csv.gz")


@pytest.mark.parametrize("text", ["16", "a:b", "20:16", "16:16", ":4", "-1:4"])
def test_a_window_that_is_none_is_refused(text):
    with pytest.raises(spans.BadChunks, match=r"such as 16:20, were expected, found"):
        spans.window(text, 100)


def test_a_window_lies_within_the_trace():
    assert spans.window("16:20", 20) == (16, 20)
    with pytest.raises(spans.BadChunks, match="CHUNKS=16:20: chunks of those that this trace can hold, 0:19"):
        spans.window("16:20", 19)


# What they say


def test_who_waits_for_whom_by_hand(tmp_path):
    found = by_hand(tmp_path)
    # The worker takes 40 + 170 + 260 and a wait of 20; the loader 110, and waits for the rest.
    assert roles.pace(found, 16, 20) == ("worker", 490)
    shares = roles.roles(found, 16, 20).set_index("role")
    assert shares["cycles"].tolist() == [490, 490]
    assert shares.loc["worker", ["wait", "tensor", "elementwise", "copy"]].tolist() == pytest.approx(
        [20 / 490, 300 / 490, 170 / 490, 0]
    )
    waits = roles.waits(found, 16, 20).set_index("role")
    assert waits["released_by"].tolist() == ["worker", "loader"]
    assert waits["barrier"].tolist() == ["empty", "full"]
    assert waits["cycles"].tolist() == [380, 20]


def test_the_path_stays_with_a_role_that_never_waits_for_others(tmp_path):
    steps = roles.steps(by_hand(tmp_path), 16, 20)
    assert list(zip(steps["role"], steps["span"], steps["cycles"], strict=True)) == [
        ("worker", "wait full", 20),
        ("worker", "issue W", 40),
        ("worker", "compute P", 170),
        ("worker", "drain W", 260),
    ]


def test_the_path_goes_through_the_role_that_is_waited_for(tmp_path):
    """With one home, the loader can't be ahead: it waits for the worker, and the worker for it."""
    one_home = [Marker("loader", "wait empty", -1), *LOADER[1:], *WORKER]
    found = by_hand(tmp_path, one_home, durations={"copy K": 300})
    chunk = 20 + 300 + 20 + 40 + 170 + 260
    path = roles.path(found, 16, 20)
    assert path["cycles"].sum() == 4 * chunk
    assert (path["start"].diff().iloc[1:] == path["cycles"].shift().iloc[1:]).all()  # no gap
    steps = roles.steps(found, 16, 20).set_index(["role", "span"])["cycles"]
    assert steps["loader", "copy K"] == 300
    assert steps["loader", "wait empty"] == steps["worker", "wait full"] == 20
    assert steps.sum() == chunk


@pytest.mark.parametrize("name", MARKED)
def test_the_path_is_as_long_as_its_chunks(name, folder):
    (found,) = [each for each in roles.read(folder, run.read_info(folder)) if each.variant == name]
    lead, cycles = roles.pace(found, 16, 20)
    assert roles.steps(found, 16, 20)["cycles"].sum() == pytest.approx(cycles, rel=1e-9)
    assert lead in set(roles.path(found, 16, 20)["role"])


def test_a_wait_that_ends_before_its_arrival_is_refused():
    wrong = [*LOADER[:2], Marker("loader", "arrive full", -1), *WORKER]
    events = spans.decode(wrong, synthetic.clocks([*LOADER, *WORKER], 32, durations={"copy K": 900}))
    found = roles.Trace({"variant": "ws", "case": CASE}, events)
    with pytest.raises(BadTable, match=r"found wait full of worker .*before loader arrives.*correct the `ahead`"):
        _ = found.spans


def test_the_sentence_names_floor_cost_and_longest_step(folder):
    (found,) = [each for each in roles.read(folder, run.read_info(folder)) if each.variant == "ws"]
    text = roles.sentence(found, 16, 20)
    assert re.search(r"take CTA 0 of ws \d+ cycles each; the tensor cores would be done with one in 1280", text)
    assert "waits least is state; the longest step of its dependent path is drain K^T Vnew of state" in text
    assert text.endswith("µs: +5.0%.")
    assert "The trace holds" not in text


def test_a_cut_trace_says_so(tmp_path):
    found = by_hand(tmp_path, chunks=CHUNKS + 88)
    assert found.info["recorded"] == CHUNKS - 1
    assert "The trace holds chunks 0 to 510 of 600: those that CTA 0 runs through" in roles.sentence(found, 16, 20)


def test_the_events_for_perfetto(folder):
    (found,) = [each for each in roles.read(folder, run.read_info(folder)) if each.variant == "ws"]
    events = json.loads(json.dumps(explained.chrome(found, 16, 20)))["traceEvents"]
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert list(tracks.values()) == ["state", "prepare", "output", "load K Q", "load V A", "gates", "store O"]
    bars = [each for each in events if each["ph"] == "X"]
    assert len(bars) == len(found.window(16, 20))
    for tid in tracks:
        own = [(each["ts"], each["ts"] + each["dur"]) for each in bars if each["tid"] == tid]
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(own))
    begins, ends = ({each["id"]: each for each in events if each["ph"] == kind} for kind in "sf")
    assert begins.keys() == ends.keys()
    assert begins
    assert all(begins[i]["ts"] <= ends[i]["ts"] and begins[i]["name"] == ends[i]["name"] for i in begins)


# The figure


def test_the_figure_is_legible_and_complete(folder):
    found = roles.read(folder, run.read_info(folder))
    for chosen in (found[2:], found[1:], found):
        figure = plots_trace.figure(chosen)
        assert_legible(figure, "trace")
        assert len(figure.axes) == len(chosen)
    names = [label.get_text() for label in figure.axes[2].get_yticklabels()]
    assert names == ["state", "prepare", "output", "load K Q", "load V A", "gates", "store O"]
    texts = {text.get_text().replace("\n", " ") for text in figure.axes[2].texts}
    assert {"vnew_full", "drain W S", "γ_ℓ S", "P"} <= texts
    assert {to_hex(bar.get_facecolor()) for bar in figure.axes[2].patches} >= set(plots_trace.KINDS.values())
    floors = [bar for bar in figure.axes[2].patches if bar.get_y() < -0.6]
    assert floors[0].get_width() == 1280


def test_a_run_without_a_trace_says_how_to_add_one(tmp_path):
    bare = synthetic.write_run(tmp_path / "run", {"ws": {CASE: 1e-3}})
    assert roles.read(bare, run.read_info(bare)) == []
    text = " ".join(plots_trace.figure([]).texts[0].get_text().split())
    for said in (text, present.markdown(*roles.tables([]))):
        assert "make record PART=trace" in said
        assert "make trace" in said
    found = report.parts(load.load(bare))["trace"]
    assert found.frame.empty
    assert "trace" not in report.figures(load.load(bare))


def test_the_report_has_figure_tables_and_origin(folder, tmp_path):
    report.write(load.load(folder), tmp_path / "out")
    assert (tmp_path / "out" / "figures" / "trace.svg").exists()
    written = pd.read_csv(tmp_path / "out" / "tables" / "trace.csv")
    assert set(written["variant"]) == set(MARKED)
    text = (tmp_path / "out" / "tables" / "trace.md").read_text(encoding="utf-8")
    assert "**Inside ws: who waits for whom**" in text
    origin = present.markdown(present.environment(load.load(folder)))
    assert "wide_gva_state, commit 0123456789, driver 570.1; 100.0 µs a call, 105.0 µs with tracing" in origin


# The commands


def call(main, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["trace", *words])
    main()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variant", "fused"], r"^error: variants/fused\.py: one kernel with markers was expected, found 0 of 1"),
        (["--variant", "naive"], r"^error: variants/naive\.py: .* found 0 of 3: mark the steps of its loop"),
        (["--chunks", "4"], "^error: CHUNKS: a first chunk and a later end"),
        (["--case", "short_tail_state"], r"^error: CHUNKS=16:20: .* this trace can hold, 0:16, .* a longer case"),
        (["--case", "long_low_gva", "--chunks", "0:512"], r"^error: CHUNKS=0:512: .* can hold, 0:511,"),
        ([], "^error: a CUDA GPU was expected"),
    ],
)
def test_what_can_not_be_traced_is_said_first(words, message, monkeypatch):
    monkeypatch.setattr(run, "require_gpu", lambda: (_ for _ in ()).throw(run.NoGPU("a CUDA GPU was expected")))
    with pytest.raises(SystemExit, match=message):
        call(trace.main, monkeypatch, *words)


def test_the_command_explains_a_run(folder, tmp_path, monkeypatch, capsys):
    words = ("--run", str(folder), "--variant", "multibuf,ws", "--chunks", "20:22", "--out", str(tmp_path / "out"))
    call(explained.main, monkeypatch, *words)
    printed = capsys.readouterr().out
    assert "**Inside multibuf: what its roles do on wide_gva_state**" in printed
    assert "chunks 20 to 21 take CTA 0 of ws" in printed
    assert "smem" not in printed
    made = {f"trace.{kind}" for kind in ("svg", "pdf", "png")} | {f"{name}-{CASE}.json" for name in ("multibuf", "ws")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == made


def test_the_command_says_which_traces_there_are(folder, monkeypatch):
    with pytest.raises(SystemExit, match=r"a trace of fused on a case was expected, found smem on wide_gva_state, mul"):
        call(explained.main, monkeypatch, "--run", str(folder), "--variant", "fused")


@pytest.fixture
def recorded(tmp_path, monkeypatch, folder):
    """A recorded run of another commit without traces, and a machine whose trace is the synthetic one."""
    own = synthetic.write_run(tmp_path / "own", {name: {CASE: 1e-3} for name in record.TRACED})

    def fake(name, case, where, info, now):
        path = spans.stored(where, name, case.name)
        rows = spans.read(spans.stored(folder, name, CASE)).assign(case=case.name, run=info["run"])
        spans.write(rows, path)
        known = {"variant": name, "case": case.name, "commit": now["commit"], "recorded": 31, "chunks": 32}
        info["trace"].append(known)
        return known

    monkeypatch.setattr(trace, "record", fake)
    monkeypatch.setattr(run, "describe", lambda _: run.read_info(own) | {"commit": "fedcba9876"})
    return own


def test_traces_are_added_to_a_run_with_their_own_commit(recorded, monkeypatch):
    call(record.main, monkeypatch, "--part", "trace", "--out", str(recorded))
    info = run.read_info(recorded)
    assert info["commit"] == "0123456789"
    assert {each["commit"] for each in info["trace"]} == {"fedcba9876"}
    assert len(roles.read(recorded, info)) == len(record.TRACED) * 2
    with pytest.raises(SystemExit, match=r"trace: is recorded already; remove that folder"):
        call(record.main, monkeypatch, "--part", "trace", "--out", str(recorded))
    load.load(recorded)


def test_traces_of_another_gpu_are_not_added(recorded, monkeypatch):
    other = run.read_info(recorded) | {"gpu": {"name": "NVIDIA H100", "slug": "h100"}}
    monkeypatch.setattr(run, "describe", lambda _: other)
    with pytest.raises(SystemExit, match="a run on NVIDIA H100 was expected, found NVIDIA H200"):
        call(record.main, monkeypatch, "--part", "trace", "--out", str(recorded))
    assert not (recorded / "trace").exists()


def stand_in(monkeypatch, disturbed):
    """A machine whose kernels write 1 into their output, and the clocks of ws where they record."""
    source = traced("ws")
    plain = build.kernels_of(variants.load("ws").gdn_prefill_forward, (problem.CASES[CASE],))[0]

    def launches(name, arguments, case, traced):
        return [build.Launch(source if traced else plain, (torch.zeros(2),))]

    def compiled(wanted):
        def kernel(output, *buffer):
            output.fill_(2 if buffer and disturbed else 1)
            for each in buffer:
                each.copy_(torch.from_numpy(synthetic.clocks(source.markers, 24)))

        return kernel

    monkeypatch.setattr(trace, "_launches", launches)
    monkeypatch.setattr(trace, "core_inputs", lambda _: (torch.zeros(1),))
    monkeypatch.setattr(problem, "make_inputs", lambda _: None)
    monkeypatch.setattr(build, "compile_into_cache", compiled)
    monkeypatch.setattr(trace, "timed", lambda call: call() and 1e-3)
    monkeypatch.setattr(trace, "ROUNDS", 1)


def test_a_trace_is_recorded_with_what_it_costs(monkeypatch, tmp_path):
    stand_in(monkeypatch, disturbed=False)
    info = synthetic.info({"ws": {CASE: 1e-3}}, [])
    known = trace.record("ws", problem.CASES[CASE], tmp_path, info, info)
    assert info["trace"] == [known]
    assert (known["commit"], known["driver"], known["dv_tile"]) == ("0123456789", "570.1", 64)
    assert (known["chunks"], known["recorded"]) == (128, 23)
    assert known["traced_s"] == known["untraced_s"] == pytest.approx(1e-4)
    assert len(roles.read(tmp_path, info)[0].spans) > 1000


def test_a_trace_that_changes_the_result_is_refused(monkeypatch, tmp_path):
    stand_in(monkeypatch, disturbed=True)
    info = synthetic.info({"ws": {CASE: 1e-3}}, [])
    with pytest.raises(trace.TraceDisturbs, match="ws on wide_gva_state: the same results with and without tracing"):
        trace.record("ws", problem.CASES[CASE], tmp_path, info, info)
    assert list(tmp_path.iterdir()) == []


def test_the_recorded_traces_hold_together():
    recorded = load.load(load.DEFAULT)
    found = roles.read(recorded.folder, recorded.info)
    assert {(trace.variant, trace.case) for trace in found} == {
        (name, case) for name in record.TRACED for case in record.TRACE_CASES.split(",")
    }
    for each in found:
        assert_holds_together(each)
