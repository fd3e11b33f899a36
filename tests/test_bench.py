"""The gate before the stopwatch: a wrong kernel stops the benchmark and is named."""

import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import synthetic
import torch

import variants
from analysis import load
from kernels import peers, preprocess, problem, reference
from kernels.errors import UserError, command
from kernels.problem import CASES, Case, Implementation, UnsupportedCase, make_inputs
from profiling import bench, run, schema, target, trace

CASE = Case("tiny", 1, 65, 1, 2, initial_state=True)
PACKED = Case("packed", 1, 131, 1, 2, initial_state=True, lengths=(65, 0, 66))
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tiny():
    inputs = make_inputs(CASE, "cpu")
    return inputs, reference.chunkwise(*inputs), reference.recurrence(*inputs)


def implementation(forward, **how):
    return Implementation("the idea", forward, preprocess.core_inputs, **how)


def test_right_results_pass_with_their_errors(tiny):
    inputs, right, expected = tiny
    passed = bench.gate({"good": implementation(lambda *_: right)}, {}, CASE, inputs, expected)
    assert passed.errors["good"]["output"] < 1e-9
    assert passed.skipped == {}


def test_implementations_that_want_the_same_share_it(tiny):
    inputs, right, expected = tiny
    calls = []

    def convert(inputs):
        calls.append(1)
        return preprocess.core_inputs(inputs)

    both = {name: Implementation("the idea", lambda *_: right, convert) for name in ("a", "b")}
    assert list(bench.gate(both, {}, CASE, inputs, expected).arguments) == [convert]
    assert len(calls) == 1


def test_a_flipped_sign_is_named_with_case_tensor_and_error(tiny):
    inputs, (output, state), expected = tiny
    with pytest.raises(
        reference.WrongResult, match=r"^bad on tiny .*final_state: relative L2 error 2.00e\+00.*correct"
    ):
        bench.gate({"bad": implementation(lambda *_: (output, -state))}, {}, CASE, inputs, expected)


def test_a_guest_that_is_wrong_or_fails_is_left_out_with_the_reason(tiny):
    inputs, (output, state), expected = tiny

    def broken(*_):
        raise AssertionError("needs a B200")

    guests = {
        "wrong": implementation(lambda *_: (output, -state)),
        "broken": implementation(broken),
        "turned": implementation(
            lambda *_: (output, state.mT), result=lambda returned, _: (returned[0], returned[1].mT)
        ),
    }
    passed = bench.gate({}, guests, CASE, inputs, expected)
    assert list(passed.errors) == ["turned"]
    assert passed.skipped["wrong"].startswith("wrong: final_state: relative L2 error 2.00e+00")
    assert passed.skipped["broken"] == "AssertionError: needs a B200"


def test_a_single_element_decides_on_the_lab_suite_and_on_ours(tiny):
    inputs, (output, state), expected = tiny
    off = state.clone()
    off[0, 0, 0, 0] += 0.02  # of 0.005 allowed, and a relative error far below that
    guest = {"off": implementation(lambda *_: (output, off))}
    assert list(bench.gate({}, guest, CASE, inputs, expected).errors) == ["off"]
    lab = problem.SUITES["lab"][0]
    assert bench.gate({}, guest, lab, inputs, expected).skipped["off"].startswith("wrong: final_state: Tensor-likes")
    with pytest.raises(reference.WrongResult, match="final_state: Tensor-likes"):
        bench.gate(guest, {}, CASE, inputs, expected)


def test_memory_that_nobody_writes_is_poisoned(tiny):
    inputs, (_, state), expected = tiny

    def forgets_to_write(q, k, v, *_):
        return v.new_empty(v.shape), state

    with pytest.raises(reference.WrongResult, match="output: relative L2 error nan"):
        bench.gate({"lazy": implementation(forgets_to_write)}, {}, CASE, inputs, expected)


def test_only_an_unsupported_case_is_skipped(tiny):
    inputs, _, expected = tiny

    def unsupported(*_):
        raise UnsupportedCase("needs T of at least 128, found 65")

    def broken(*_):
        raise RuntimeError("anything else")

    passed = bench.gate({"picky": implementation(unsupported)}, {}, CASE, inputs, expected)
    assert passed.errors == {}
    assert passed.skipped == {"picky": "needs T of at least 128, found 65"}
    with pytest.raises(RuntimeError, match="anything else"):
        bench.gate({"broken": implementation(broken)}, {}, CASE, inputs, expected)


def test_a_rung_without_offsets_skips_packed_sequences_and_one_with_them_runs(monkeypatch):
    def old(q, k, v, g_cumsum, beta, A, initial_state=None):
        return "ran"

    def new(q, k, v, g_cumsum, beta, A, initial_state=None, cu_seqlens=None):
        return "ran"

    rungs = {name: types.SimpleNamespace(gdn_prefill_forward=forward) for name, forward in (("a", old), ("b", new))}
    monkeypatch.setattr(variants, "load", rungs.get)
    assert variants.core_forward("a")(*range(7)) == variants.core_forward("b")(*range(8)) == "ran"
    with pytest.raises(UnsupportedCase, match="one length, found packed ones"):
        variants.core_forward("a")(*range(8))


def test_tracing_and_profiling_say_which_rung_does_not_support_packed_sequences():
    with pytest.raises(UserError, match="fused does not support packed: it takes sequences of one length"):
        trace._launches("fused", tuple(range(8)), PACKED, traced=False)
    with pytest.raises(UserError, match="fused does not support packed: it takes sequences of one length"):
        target._forward(variants.core_forward("fused"), tuple(range(8)), "fused", PACKED)


def test_ours_in_a_full_forward_is_the_public_function(monkeypatch):
    called = {}

    def public(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
        called.update(scale=scale, final=output_final_state)
        return reference.recurrence(q, k, v, g, beta, initial_state, cu_seqlens)

    monkeypatch.setattr(variants, "chunk_gated_delta_rule", public, raising=False)
    phases = bench.implementations(("fused", "ws"))
    assert list(phases) == list(schema.CHECKED)
    assert [list(phases[phase]) for phase in phases] == [["fused", "ws"], [], ["ws"], ["ws"]]
    inputs = make_inputs(PACKED, "cpu")
    passed = bench.gate(phases["full"], {}, PACKED, inputs, reference.recurrence(*inputs), "full")
    assert passed.errors["ws"]["final_state"] < 1e-12
    assert called == {"scale": None, "final": True}


def test_preparation_is_held_against_the_reference_too():
    inputs = make_inputs(PACKED, "cpu")
    _, A = reference.preprocessing(inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens)
    ours = bench.implementations(("ws",))["A"]
    passed = bench.gate(ours, {}, PACKED, inputs, (A,), "A")
    assert list(passed.errors["ws"]) == ["A"]
    assert 1e-4 < passed.errors["ws"]["A"] < 3e-3
    with pytest.raises(
        reference.WrongResult, match=r"^ws on packed \(T=65\+0\+66 Hq=1 Hv=2 S0\) is wrong.*: A: relative"
    ):
        bench.gate(ours, {}, PACKED, inputs, (A.flip(1),), "A")


def test_peak_memory_is_beyond_what_was_there_and_what_is_returned(monkeypatch):
    """A device of our own: 1000 bytes are taken; a call takes 300 for a while, and returns 240."""
    stats = {"requested_bytes.all.current": 1000, "requested_bytes.all.peak": 9999}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: stats.update({"requested_bytes.all.peak": 1000}))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: stats)

    def forward(x):
        stats["requested_bytes.all.peak"] = 1000 + 240 + 300
        return torch.zeros(10, dtype=torch.bfloat16), torch.zeros(55, dtype=torch.float32)

    assert bench.peak_memory(forward, (None,)) == 300


def _measure_on_the_cpu(monkeypatch, tmp_path, ours, theirs, case):
    """`bench.bench` without its stopwatch, on `case`; returns its run.json and its folder."""
    samples = {"latency_graph": [1e-3, 2e-3], "latency_eager": [3e-3]}
    monkeypatch.setattr(problem, "make_inputs", lambda case: make_inputs(case, "cpu"))
    monkeypatch.setattr(bench, "implementations", lambda names: ours)
    monkeypatch.setattr(bench, "time_implementations", lambda chosen, _: dict.fromkeys(chosen, samples))
    monkeypatch.setattr(bench, "peak_memory", lambda *_: 12345)
    monkeypatch.setattr(peers, "find", lambda: (theirs, {}))
    monkeypatch.setattr(run, "clocks", dict)
    info = synthetic.info({"ws": {case.name: 1e-3}}, []) | {"planned": [], "peers": {}}
    bench.bench(("ws",), (case,), tmp_path, info, with_peers=True)
    return info, tmp_path


def test_with_libraries_all_phases_are_measured_and_the_run_can_be_read(monkeypatch, tmp_path):
    def sums(inputs):
        g_cumsum, A = reference.preprocessing(inputs.k, inputs.g, inputs.beta)
        return g_cumsum, A, reference.chunkwise(*inputs)

    def each(name, *phases):
        results = {"cumsum": lambda g, A, both: (g,), "A": lambda g, A, both: (A,)}
        return {phase: Implementation(name, results.get(phase, lambda g, A, both: both), sums) for phase in phases}

    small = dataclasses.replace(CASES["short_tail_state"], T=65)  # of a name that a run may have
    theirs = {"fla": each("FLA", *schema.CHECKED), "flashinfer": each("FlashInfer", "full")}
    ours = {phase: {"ws": one} for phase, one in each("ours", "core", "A", "full").items()} | {"cumsum": {}}
    _, folder = _measure_on_the_cpu(monkeypatch, tmp_path, ours, theirs, small)
    frame = load.load(folder).frame
    assert {phase: list(part["variant"].unique()) for phase, part in frame.groupby("phase", sort=False)} == {
        "core": ["ws", "fla"],
        "cumsum": ["fla"],
        "A": ["ws", "fla"],
        "full": ["ws", "fla", "flashinfer"],
    }
    metrics = frame.groupby("phase")["metric"].agg(lambda found: set(found))
    assert metrics["A"] == {"latency_graph", "latency_eager", "error_A"}
    assert metrics["full"] == {"latency_graph", "latency_eager", "error_output", "error_final_state", "peak_memory"}
    assert frame.loc[frame["metric"] == "peak_memory", "value"].tolist() == [12345.0] * 3
    cut = frame[frame["metric"] != "error_A"]
    cut.to_csv(folder / "measurements.csv", index=False)
    with pytest.raises(run.BadRun, match=r"error_A of ws on short_tail_state \(A\) was expected"):
        load.load(folder)


def test_a_case_that_nobody_supports_leaves_reasons_and_no_rows(monkeypatch, tmp_path):
    def unsupported(*_):
        raise UnsupportedCase("no")

    ours = {phase: {"ws": implementation(unsupported)} for phase in schema.CHECKED}
    info, folder = _measure_on_the_cpu(monkeypatch, tmp_path, ours, {}, PACKED)
    assert {skip["phase"] for skip in info["skipped"]} == set(schema.CHECKED)
    assert not (folder / "measurements.csv").exists()


def test_a_command_ends_with_one_paragraph_and_a_nonzero_exit():
    @command
    def main():
        raise UserError("expected a, found b: do c")

    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == "error: expected a, found b: do c"  # a text: Python prints it and exits with 1


@pytest.mark.parametrize(
    "module", ["profiling.bench", "profiling.coldstart", "profiling.ncu", "profiling.nsys", "profiling.record"]
)
def test_without_a_gpu_the_commands_say_what_to_do(module, tmp_path):
    for tool in ("ncu", "nsys"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("error: a CUDA GPU was expected")
    assert "make report" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_folder_with_results_is_never_written_into(tmp_path):
    (tmp_path / "measurements.csv").write_text("mine")
    with pytest.raises(run.BadRun, match="choose another OUT"):
        run.new_folder("bench", str(tmp_path))
    assert (tmp_path / "measurements.csv").read_text() == "mine"


def test_a_stated_commit_comes_before_that_of_an_older_repository(monkeypatch):
    monkeypatch.setenv("GDN_COMMIT", "0123456789")
    assert run._commit() == "0123456789"
    monkeypatch.delenv("GDN_COMMIT")
    assert run._commit() != "0123456789"


def test_a_case_is_timed_on_copies_of_its_tensors_and_on_nothing_else(monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(L2_cache_size=1000))
    x, plan, offsets = torch.zeros(299), object(), torch.zeros(1, dtype=torch.int32)  # 1200 bytes, of 4 x 1000 to move
    copies = bench.input_copies((x, None, plan, offsets))
    assert len(copies) == 4
    assert copies[0][0] is x
    assert all(copy[0] is not x and torch.equal(copy[0], x) for copy in copies[1:])
    assert all(copy[1] is None and copy[2] is plan and copy[3] is offsets for copy in copies)


@pytest.mark.gpu
def test_make_bench_stops_at_a_kernel_with_a_flipped_sign(tmp_path):
    """A copy of `fused` that adds W S instead of subtracting it."""
    source = (ROOT / "variants" / "fused.py").read_text()
    flipped = source.replace("Vnew_frag[i, j] -= WS_frag[i, j]", "Vnew_frag[i, j] += WS_frag[i, j]")
    assert flipped != source
    (tmp_path / "flipped.py").write_text(
        flipped.replace("def fused(", "def flipped(").replace("return fused", "return flipped")
    )
    script = (
        "import sys, variants; variants.__path__.append(sys.argv.pop(1)); variants.LADDER = ('flipped',); "
        "from profiling import bench; bench.main()"
    )
    words = [sys.executable, "-c", script, str(tmp_path), "--case", "short_tail_state", "--out", str(tmp_path / "out")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: flipped on short_tail_state (B=1 T=1025 Hq=2 Hv=8 S0) is wrong" in done.stderr
    assert "output: relative L2 error" in done.stderr
    assert not (tmp_path / "out" / "measurements.csv").exists()
