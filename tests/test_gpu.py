"""On a Hopper GPU: every rung against the FP64 recurrence, on poisoned outputs."""

import importlib
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
from kernels import peers, preprocess, problem, reference
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


def check_preprocessing(inputs, allowed=3e-3):
    """Against FP64; rows past the last offset are left alone."""
    with poisoned_memory():
        g_cumsum, A = preprocess.prepare(inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens)
    end = inputs.k.shape[1] if inputs.cu_seqlens is None else int(inputs.cu_seqlens[-1])
    expected_g, expected_A = reference.preprocessing(inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens)
    torch.testing.assert_close(g_cumsum[:, :end].double(), expected_g[:, :end], rtol=1e-5, atol=1e-5)
    assert reference.relative_error(A[:, :end], expected_A[:, :end]) <= allowed
    assert A[:, end:].isnan().all()
    assert g_cumsum[:, end:].isnan().all()


@pytest.mark.parametrize("gates", ["random", "zero", "steep"])
@pytest.mark.parametrize("T", [1, 63, 64, 65, 200])
@pytest.mark.parametrize(("Hq", "Hv"), [(1, 1), (2, 6), (2, 8), (1, 8)])
def test_preprocessing_matches_fp64(T, gates, Hq, Hv):
    check_preprocessing(problem.make_inputs(problem.Case("odd", 2, T, Hq, Hv, gates=gates)))


@pytest.mark.parametrize("beta", [0.5, 0.99])
def test_preprocessing_is_exact_enough_where_the_inverse_grows(beta):
    """Nothing decays, and keys are nearly parallel."""
    inputs = problem.make_inputs(problem.Case("grows", 1, 640, 2, 8, gates="zero"))
    k = torch.nn.functional.normalize(inputs.k[:, :1].float() + 0.02 * inputs.k.float(), dim=-1).bfloat16()
    check_preprocessing(inputs._replace(k=k, beta=torch.full_like(inputs.beta, beta)))


def test_preprocessing_repeats_its_bits_on_a_full_gpu():
    inputs = problem.make_inputs(problem.CASES["wide_gva_state"])
    first = preprocess.prepare(inputs.k, inputs.g, inputs.beta)
    for _ in range(100):
        for again, before in zip(preprocess.prepare(inputs.k, inputs.g, inputs.beta), first, strict=True):
            assert torch.equal(again, before)


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
    Plan("split", 64, 1, 0),
    Plan("split", 64, 7, 0),
    Plan("split", 64, 7, 4),
    Plan("split", 128, 1, 0),
    Plan("split", 128, 5, 0),
    Plan("split", 128, 3, 4),
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
    monkeypatch.setattr(rung, "plan", lambda *shape: Plan("split", 128, segments, 0))
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


@pytest.mark.parametrize("Hv", [8, 16, 32])
def test_heads_that_hardly_decay_match_the_recurrence_in_as_many_segments_as_planned(Hv):
    assert variants.plan(1, 16449, Hv, torch.device("cuda")).exact >= 8
    inputs = problem.make_inputs(problem.Case("long", 1, 16449, Hv // 4, Hv, True, "quarter_off"))
    with poisoned_memory():
        actual = variants.gdn_prefill_forward(*preprocess.core_inputs(inputs))
    reference.check(actual, reference.recurrence(*inputs), elementwise=False)


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


LENGTHS = {
    "one": (200,),
    "empty": (0, 130, 0, 0, 64, 0),
    "single": (1, 1, 63, 65, 1),
    "uneven": (3000, 16, 1, 700),
    "whole": (640, 1280, 64),
}


def packed(lengths, Hq=2, Hv=8, gates="random", state=True, behind=0, dtype=torch.int32):
    """Inputs of sequences of these lengths; `behind` rows of NaN past the last offset."""
    case = problem.Case("packed", 1, sum(lengths), Hq, Hv, state, gates, lengths)
    inputs = problem.make_inputs(case)
    tail = [torch.nn.functional.pad(x, (0,) * (2 * x.ndim - 3) + (behind,), value=torch.nan) for x in inputs[:5]]
    return problem.Inputs(*tail, inputs.initial_state, inputs.cu_seqlens.to(dtype))


def full(inputs, **how):
    with poisoned_memory():
        return variants.chunk_gated_delta_rule(
            *inputs[:5], initial_state=inputs.initial_state, cu_seqlens=inputs.cu_seqlens, **how
        )


def check_full(inputs, elementwise=True, **how):
    """Against FP64, and nothing written behind the last offset."""
    output, state = full(inputs, **how)
    end = inputs.q.shape[1] if inputs.cu_seqlens is None else int(inputs.cu_seqlens[-1])
    assert output[:, end:].isnan().all()
    ends = inputs._replace(**{name: getattr(inputs, name)[:, :end] for name in ("q", "k", "v", "g", "beta")})
    reference.check((output[:, :end], state), reference.recurrence(*ends), elementwise)


@pytest.mark.parametrize("behind", [0, 100])
@pytest.mark.parametrize("gates", ["random", "half_off", "steep"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_packed_sequences_match_the_recurrence(lengths, gates, behind):
    for Hq, Hv, state in ((2, 8, True), (1, 3, False), (16, 64, True)):
        check_full(packed(lengths, Hq, Hv, gates, state, behind), elementwise=gates != "half_off")


@pytest.mark.parametrize("gates", problem.GATES)
def test_packed_sequences_match_the_recurrence_in_every_plan(split, gates):
    """Long ones in segments, with exact starts where the plan has them, and short ones between."""
    inputs = packed((4161, 30, 5000, 0, 100), 1, 4, gates)
    check_full(inputs, elementwise=problem.Case("x", 1, 1, 1, 1, gates=gates).decays)


def test_packed_sequences_repeat_their_bits_whatever_type_offsets_have(split):
    inputs = packed((1280, 640, 64, 1280))
    output, state = full(inputs, scale=0.1)
    assert output.isfinite().all()
    for _ in range(50):
        again, again_state = full(inputs, scale=0.1)
        assert torch.equal(again, output)
        assert torch.equal(again_state, state)
    wide = packed((1280, 640, 64, 1280), dtype=torch.int64)
    assert torch.equal(full(wide, scale=0.1)[0], output)


def test_a_sequence_does_not_see_its_neighbours():
    """NaN in one of them reaches no other."""
    inputs = packed((100, 30, 100))
    expected, expected_state = full(inputs)
    for tensor in (inputs.q, inputs.k, inputs.v):
        tensor[:, 100:130] = torch.nan
    output, state = full(inputs)
    for rows, which in ((slice(0, 100), 0), (slice(130, 230), 2)):
        assert torch.equal(output[:, rows], expected[:, rows])
        assert torch.equal(state[which], expected_state[which])


def test_thousands_of_short_sequences_match_the_recurrence():
    check_full(packed((16,) * 2050, 1, 2))


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("T", [1, 64, 129, 1025, 4097])
def test_the_full_function_matches_the_recurrence(T, group):
    for B in (1, 2, 7):
        check_full(problem.make_inputs(problem.Case("full", B, T, 2, 2 * group, B == 2)))


@pytest.mark.parametrize("lengths", [None, (700, 100, 233)], ids=["batch", "packed"])
def test_the_full_function_in_several_calls_through_the_state_equals_one(lengths):
    inputs = problem.make_inputs(problem.Case("chained", 1, 1033, 2, 8, True, "quarter_off", lengths or ()))
    offsets, state, outputs = lengths and inputs.cu_seqlens.tolist(), inputs.initial_state, []
    for half in (0, 1):  # of each sequence
        cut = [
            slice(begin + (end - begin) // 2 * half, end if half else begin + (end - begin) // 2)
            for begin, end in itertools.pairwise(offsets or (0, 1033))
        ]
        part = [torch.cat([x[:, of] for of in cut], dim=1) for x in inputs[:5]]
        sizes = torch.tensor([0, *(of.stop - of.start for of in cut)], device="cuda")
        output, state = full(problem.Inputs(*part, state, sizes.cumsum(0) if lengths else None))
        outputs.append(output.split(sizes[1:].tolist(), dim=1))
    output = torch.cat([part for both in zip(*outputs, strict=True) for part in both], dim=1)
    reference.check((output, state), reference.recurrence(*inputs), elementwise=False)


def test_the_full_function_normalises_scales_and_leaves_out_the_state():
    inputs = problem.make_inputs(problem.Case("how", 2, 200, 2, 4, initial_state=True))
    longer = inputs._replace(q=inputs.q * 3, k=inputs.k * 5)
    before = [x if x is None else x.clone() for x in longer]
    output, state = full(longer, use_qk_l2norm_in_kernel=True, scale=1.0, output_final_state=False)
    assert state is None
    expected, expected_state = reference.recurrence(*inputs)
    reference.check((output / 128**0.5, expected_state), (expected, expected_state), elementwise=True)
    for now, then in zip(longer, before, strict=True):
        assert now is then or torch.equal(now, then)


@pytest.mark.parametrize("lengths", [None, (700, 100, 233)], ids=["batch", "packed"])
def test_the_full_function_is_captured_on_any_stream_and_allocates_what_it_says(lengths):
    inputs = problem.make_inputs(problem.Case("captured", 1, 1033, 2, 8, True, "random", lengths or ()))
    expected = full(inputs)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    output, state = variants.chunk_gated_delta_rule(
        *inputs[:5], initial_state=inputs.initial_state, cu_seqlens=inputs.cu_seqlens
    )
    asked = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    returned = sum(x.numel() * x.element_size() for x in (output, state))
    assert asked - returned == 1033 * 8 * (64 * 2 + 4)  # A and g_cumsum
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        replayed = variants.chunk_gated_delta_rule(
            *inputs[:5], initial_state=inputs.initial_state, cu_seqlens=inputs.cu_seqlens
        )
    for tensor in replayed:
        tensor.fill_(torch.nan)
    graph.replay()
    for actual, wanted in zip(replayed, expected, strict=True):
        assert torch.equal(actual, wanted)


class Layer(torch.nn.Module):
    """What stands around the operator in a model: projections, a short convolution, gates, a norm."""

    def __init__(self, rule, width=256, Hq=2, Hv=4):
        super().__init__()
        self.rule, self.Hq, self.Hv = rule, Hq, Hv
        self.qkv = torch.nn.Linear(width, (2 * Hq + Hv) * 128)
        self.gates = torch.nn.Linear(width, 2 * Hv)
        self.out = torch.nn.Linear(Hv * 128, width)
        self.A_log, self.dt_bias = (torch.nn.Parameter(torch.randn(Hv)) for _ in range(2))

    def forward(self, x, state=None, cu_seqlens=None):
        mixed = torch.nn.functional.silu(self.qkv(x)).unflatten(-1, (-1, 128))
        q, k, v = mixed.split((self.Hq, self.Hq, self.Hv), dim=2)  # not contiguous
        b, a = self.gates(x).chunk(2, dim=-1)
        g = -self.A_log.float().exp() * torch.nn.functional.softplus(a.float() + self.dt_bias)
        output, state = self.rule(
            q, k, v, g=g, beta=b.sigmoid(), initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return self.out(output.flatten(2)), state


@pytest.mark.parametrize("offsets", [None, (0, 100, 100, 300)], ids=["batch", "packed"])
def test_a_model_layer_runs_with_ours_as_with_flash_linear_attention(offsets):
    found, missing = peers.find()  # which keeps FLA from handing over to FlashQLA, that refuses empty sequences
    if "fla" not in found:
        pytest.skip(missing["fla"])
    fla = importlib.import_module("fla.ops.gated_delta_rule")
    torch.manual_seed(0)
    layer = Layer(None).cuda().bfloat16()
    x = torch.randn(1, 300, 256, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = None if offsets is None else torch.tensor(offsets, device="cuda")
    with torch.no_grad():
        layer.rule = fla.chunk_gated_delta_rule
        theirs = layer(x, cu_seqlens=cu_seqlens)
        layer.rule = variants.chunk_gated_delta_rule
        ours = layer(x, cu_seqlens=cu_seqlens)
    for actual, expected in zip(ours, theirs, strict=True):
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        assert reference.relative_error(actual, expected) < 1e-2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("inputs.g[0, 150:192, 1] = 0.5", "log-gates <= 0 were expected, found one above 0"),
        ("inputs.cu_seqlens[1] = 250", "cu_seqlens were expected to rise"),
        ("inputs.cu_seqlens[2] = 1000", "cu_seqlens were expected to rise"),
    ],
)
def test_the_full_function_refuses_growth_and_offsets_on_the_device(change, message):
    """In a process of its own, which a device-side assertion ends. Gates behind the last offset are nobody's."""
    script = (
        "import torch, variants; from kernels import problem\n"
        "inputs = problem.make_inputs(problem.Case('x', 1, 200, 1, 2, lengths=(80, 120)))\n"
        "def call(): variants.chunk_gated_delta_rule(*inputs[:5], cu_seqlens=inputs.cu_seqlens)\n"
        "inputs.cu_seqlens[2] = 190; inputs.g[:, 190:] = 7; call(); torch.cuda.synchronize()\n"
        "print('accepted', flush=True)\n"
        f"inputs.cu_seqlens[2] = 200; inputs.g[:, 190:] = -1; {change}; call(); torch.cuda.synchronize()\n"
        "print('not refused')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[0] == "accepted"
    assert message in done.stdout + done.stderr
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


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing_in_packed_sequences(tool):
    script = (
        "import torch, variants; from kernels import problem\n"
        "case = problem.Case('packed', 1, 330, 1, 3, True, 'half_off', (130, 0, 1, 199))\n"
        "inputs = problem.make_inputs(case)\n"
        "variants.chunk_gated_delta_rule(*inputs[:5], initial_state=inputs.initial_state, "
        "cu_seqlens=inputs.cu_seqlens)\n"
        "torch.cuda.synchronize()"
    )
    sanitize(tool, script, seconds=240)
