"""The gate before the stopwatch: a wrong kernel stops the benchmark and is named."""

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from kernels import preprocess, reference
from kernels.errors import UserError, command
from kernels.problem import Case, Implementation, UnsupportedCase, make_inputs
from profiling import bench, run

CASE = Case("tiny", 1, 65, 1, 2, initial_state=True)
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
    x, plan = torch.zeros(300), object()  # 1200 bytes, of 4 x 1000 to move
    copies = bench.input_copies((x, None, plan))
    assert len(copies) == 4
    assert copies[0][0] is x
    assert all(copy[0] is not x and torch.equal(copy[0], x) for copy in copies[1:])
    assert all(copy[1] is None and copy[2] is plan for copy in copies)


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
