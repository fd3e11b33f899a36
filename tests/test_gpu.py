"""On a Hopper GPU: every rung against the FP64 recurrence, on poisoned outputs."""

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from traced import assert_holds_together

import variants
from analysis import roles
from kernels import preprocess, problem, reference
from profiling import trace
from profiling.bench import poisoned_memory
from profiling.run import describe
from variants import Plan

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent


def run(name, inputs):
    with poisoned_memory():
        core = preprocess.core_inputs(inputs)
        return variants.load(name).gdn_prefill_forward(*core)


@pytest.fixture(scope="module", params=problem.SUITES["lab"], ids=lambda case: case.name)
def lab(request):
    inputs = problem.make_inputs(request.param)
    return request.param, inputs, reference.recurrence(*inputs)


@pytest.mark.parametrize("name", variants.LADDER)
def test_lab_case_matches_the_recurrence(name, lab):
    _, inputs, expected = lab
    reference.check(run(name, inputs), expected, elementwise=True)


@pytest.mark.parametrize("initial_state", [False, True], ids=["no_state", "state"])
@pytest.mark.parametrize("gates", ["random", "zero", "steep"])
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 127, 200])
def test_odd_shapes_match_the_recurrence(T, gates, initial_state):
    case = problem.Case("odd", 2, T, 1, 8, initial_state, gates)
    inputs = problem.make_inputs(case)
    expected = reference.recurrence(*inputs)
    for name in variants.LADDER:
        reference.check(run(name, inputs), expected, elementwise=False)


@pytest.mark.parametrize(("B", "Hq", "Hv"), [(1, 3, 3), (7, 2, 6), (5, 4, 32)])
@pytest.mark.parametrize("name", variants.LADDER)
def test_any_batch_and_heads_match_the_recurrence(name, B, Hq, Hv):
    """The last one has more than 66 heads in all, so the rungs with a choice take the wide dv tile."""
    inputs = problem.make_inputs(problem.Case("heads", B, 130, Hq, Hv, initial_state=True))
    reference.check(run(name, inputs), reference.recurrence(*inputs), elementwise=True)


@pytest.mark.parametrize("name", variants.LADDER)
def test_a_single_chunk_ends(name):
    """In a process of its own with a time limit: a pipeline that waits for a second chunk would hang."""
    script = (
        "import sys, variants; from kernels import preprocess, problem\n"
        "for T in (1, 64): variants.load(sys.argv[1]).gdn_prefill_forward("
        "*preprocess.core_inputs(problem.make_inputs(problem.Case('one', 1, T, 1, 1))))\n"
        "import torch; torch.cuda.synchronize()"
    )
    subprocess.run([sys.executable, "-c", script, name], cwd=ROOT, check=True, timeout=60)


@pytest.mark.parametrize("gates", ["random", "zero", "steep"])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
def test_preprocessing_matches_its_pytorch_form(T, gates):
    inputs = problem.make_inputs(problem.Case("odd", 2, T, 2, 8, gates=gates))
    with poisoned_memory():
        g_cumsum = preprocess.chunk_cumsum(inputs.g)
        A = preprocess.kkt_inverse(inputs.k, g_cumsum, inputs.beta)
    expected_g = preprocess.chunk_cumsum(inputs.g.cpu())
    expected_A = preprocess.kkt_inverse(inputs.k.cpu(), expected_g, inputs.beta.cpu())
    torch.testing.assert_close(g_cumsum.cpu(), expected_g, rtol=1e-5, atol=1e-5)
    assert reference.relative_error(A.cpu(), expected_A) < 1e-3


@pytest.mark.parametrize("name", variants.LADDER)
def test_inputs_stay_as_they_are_and_repeats_are_bitwise_equal(name):
    core = preprocess.core_inputs(problem.make_inputs(problem.CASES["short_tail_state"]))
    before = [x.clone() for x in core]
    results = [variants.load(name).gdn_prefill_forward(*core) for _ in range(200)]
    for output, state in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(state, results[0][1])
    for now, then in zip(core, before, strict=True):
        assert torch.equal(now, then)


def chained(forward, inputs, cuts):
    """A sequence cut at these tokens, in as many calls, each from the state that the one before left."""
    state, outputs = inputs.initial_state, []
    for begin, end in itertools.pairwise((0, *cuts, inputs.q.shape[1])):
        part = problem.Inputs(*(x[:, begin:end].contiguous() for x in inputs[:5]), state)
        with poisoned_memory():
            output, state = forward(*preprocess.core_inputs(part))
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize("name", variants.LADDER)
def test_a_sequence_in_two_calls_through_the_state_equals_one_call(name):
    inputs = problem.make_inputs(problem.Case("chained", 2, 300, 2, 8, initial_state=True))
    actual = chained(variants.load(name).gdn_prefill_forward, inputs, (130,))
    reference.check(actual, reference.recurrence(*inputs), elementwise=True)


def test_offsets_beyond_32_bits():
    """q, k and the gates are small, v has 2**31 + 64 * 128 * 128 elements: its last chunk lies past 2**31."""
    B, T, Hq, Hv = 1, 2**17 + 64, 1, 128
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    q, k = (torch.nn.functional.normalize(randn(B, T, Hq, 128), dim=-1).bfloat16() for _ in range(2))
    v = torch.empty(B, T, Hv, 128, dtype=torch.bfloat16, device="cuda").normal_(generator=generator)
    g, beta = torch.full((B, T, Hv), -0.5, device="cuda"), randn(B, T, Hv).sigmoid()
    output, state = run("fused", problem.Inputs(q, k, v, g, beta, None))
    # With these gates nothing older than 128 tokens is left: the end of the sequence alone is the reference.
    tail = problem.Inputs(*(x[:, -256:].contiguous() for x in (q, k, v, g, beta)), None)
    expected, expected_state = reference.recurrence(*tail)
    reference.check((output[:, -64:], state), (expected[:, -64:], expected_state), elementwise=True)


PLANS = [
    Plan("split", 64, 1, False),
    Plan("split", 64, 7, False),
    Plan("split", 64, 4, True),
    Plan("split", 128, 1, False),
    Plan("split", 128, 5, False),
    Plan("split", 128, 4, True),
]


@pytest.fixture(params=PLANS, ids=lambda plan: f"{plan.dv_tile}x{plan.segments}{'e' if plan.exact else ''}")
def split(request, monkeypatch):
    """`split` with this plan, whatever the shape."""
    rung = variants.load("split")
    monkeypatch.setattr(rung, "plan", lambda *shape: request.param)
    return rung.gdn_prefill_forward


@pytest.mark.parametrize("gates", problem.GATES)
def test_every_plan_matches_the_recurrence(split, gates):
    """65 chunks and a token: exact starts have room, and the last segment ends in a short chunk."""
    case = problem.Case("plan", 1, 4161, 1, 4, initial_state=True, gates=gates)
    inputs = problem.make_inputs(case)
    with poisoned_memory():
        actual = split(*preprocess.core_inputs(inputs))
    reference.check(actual, reference.recurrence(*inputs), elementwise=case.decays)


@pytest.mark.parametrize("gates", ["random", "half_off"])
def test_every_plan_repeats_its_bits_and_a_sequence_alone_has_those_of_the_batch(split, gates):
    core = preprocess.core_inputs(problem.make_inputs(problem.Case("repeat", 2, 4161, 1, 4, True, gates)))
    output, state = split(*core)
    for _ in range(1000):
        again, again_state = split(*core)
        assert torch.equal(again, output)
        assert torch.equal(again_state, state)
    alone, alone_state = split(*(x[1:].contiguous() for x in core))
    assert torch.equal(alone, output[1:])
    assert torch.equal(alone_state, state[1:])


@pytest.mark.parametrize("segments", [2, 3])
def test_a_full_gpu_repeats_its_bits(segments, monkeypatch):
    """A CTA on every SM, launches without a pause, and segments that wait for a second turn."""
    rung = variants.load("split")
    monkeypatch.setattr(rung, "plan", lambda *shape: Plan("split", 128, segments, False))
    core = preprocess.core_inputs(problem.make_inputs(problem.Case("full", 1, 4161, 16, 64, initial_state=True)))
    output, _ = rung.gdn_prefill_forward(*core)
    for _ in range(20):
        for again, _ in [rung.gdn_prefill_forward(*core) for _ in range(20)]:
            assert torch.equal(again, output)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("T", [1, 64, 129, 1025, 4097])
def test_the_public_function_matches_the_recurrence(T, group):
    for B in (1, 2, 7):
        inputs = problem.make_inputs(problem.Case("public", B, T, 2, 2 * group, B == 2))
        with poisoned_memory():
            actual = variants.gdn_prefill_forward(*preprocess.core_inputs(inputs))
        reference.check(actual, reference.chunkwise(*inputs), elementwise=True)


@pytest.mark.parametrize("cuts", [(1000,), (64, 1000)])
def test_the_public_function_in_several_calls_through_the_state_equals_one(cuts):
    inputs = problem.make_inputs(problem.Case("chained", 1, 2500, 2, 8, initial_state=True, gates="quarter_off"))
    actual = chained(variants.gdn_prefill_forward, inputs, cuts)
    reference.check(actual, reference.recurrence(*inputs), elementwise=False)


@pytest.mark.parametrize("name", ["short_tail_state", "q2_8_8192"])
def test_the_public_function_is_captured_on_any_stream_and_allocates_what_it_returns(name):
    core = preprocess.core_inputs(problem.make_inputs(problem.CASES[name]))
    before = [x.clone() for x in core]
    expected = variants.gdn_prefill_forward(*core)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        variants.gdn_prefill_forward(*core)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - allocated == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        replayed = variants.gdn_prefill_forward(*core)
    for tensor in replayed:
        tensor.fill_(torch.nan)
    graph.replay()
    for actual, wanted in zip(replayed, expected, strict=True):
        assert torch.equal(actual, wanted)
    for now, then in zip(core, before, strict=True):
        assert torch.equal(now, then)


def test_a_growing_state_is_refused():
    """In a process of its own, which a device-side assertion ends."""
    script = (
        "import torch, variants; from kernels import preprocess, problem\n"
        "core = list(preprocess.core_inputs(problem.make_inputs(problem.Case('x', 1, 200, 1, 2))))\n"
        "variants.gdn_prefill_forward(*core); torch.cuda.synchronize(); print('accepted', flush=True)\n"
        "core[3][0, 150:192, 1] += 5\n"
        "variants.gdn_prefill_forward(*core); torch.cuda.synchronize(); print('not refused')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[0] == "accepted"
    assert "log-gates <= 0 were expected, found one above 0" in done.stdout + done.stderr
    assert "not refused" not in done.stdout


def sanitize(tool, script, *arguments, seconds):
    """Run a script under a tool of compute-sanitizer, which must find nothing."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not on PATH")
    words = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", script, *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("name", variants.LADDER)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool, name):
    script = (
        "import sys, variants; from kernels import preprocess, problem\n"
        "core = preprocess.core_inputs(problem.make_inputs(problem.Case('small', 1, 200, 1, 2, True)))\n"
        "variants.load(sys.argv[1]).gdn_prefill_forward(*core)\n"
        "import torch; torch.cuda.synchronize()"
    )
    sanitize(tool, script, name, seconds=120)


@pytest.mark.parametrize("plan", PLANS[1:3] + PLANS[4:], ids=str)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing_in_any_plan(tool, plan):
    script = (
        "import variants; from variants import Plan, split; from kernels import preprocess, problem\n"
        f"plan = {plan}; split.plan = lambda *shape: plan\n"
        "case = problem.Case('small', 1, 4161 if plan.exact else 700, 1, 2, True, 'half_off')\n"
        "split.gdn_prefill_forward(*preprocess.core_inputs(problem.make_inputs(case)))\n"
        "import torch; torch.cuda.synchronize()"
    )
    sanitize(tool, script, seconds=240)


@pytest.mark.parametrize("name", [name for name in variants.LADDER if name not in ("naive", "fused")])
def test_a_trace_holds_together(name, tmp_path):
    """The same bits as untraced too, else `record` raises."""
    case = problem.CASES["wide_gva_state"]
    info = describe({name: variants.label(name)})
    known = trace.record(name, case, tmp_path, info, info)
    # CTA 0 of split has the first of two segments: (128 - 2) / 2 + 2 chunks.
    assert (known["chunks"], known["recorded"]) == (128, 64 if name == "split" else 127)
    (found,) = roles.read(tmp_path, info)
    assert_holds_together(found)
