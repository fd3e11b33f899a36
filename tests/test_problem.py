"""Cases, inputs and the validation of a core call."""

import pytest
import torch

from kernels import problem
from kernels.problem import Case, check_core_inputs, check_inputs, make_inputs

CASE = Case("test", 2, 65, 2, 4, initial_state=True)
DRAWN = (8.963, -12.127, 105.202, -27.062, 249.525, -118.292)  # sums of its inputs, before there were packed sequences


def test_suites_are_the_documented_ones():
    assert len(problem.SUITES["lab"]) == 8
    assert len(problem.SUITES["qwen"]) == 20
    assert problem.CASES["wide_gva_state"].shape == "B=1 T=8192 Hq=16 Hv=64 S0"
    assert problem.CASES["q16_64_4x8192"] == Case("q16_64_4x8192", 4, 8192, 16, 64, True, "quarter_off")
    assert len(problem.SUITES["varlen"]) == 12
    assert problem.CASES["v2_8_28672_4096"] == Case(
        "v2_8_28672_4096", 1, 32768, 2, 8, initial_state=True, lengths=(28672, 4096)
    )
    assert problem.CASES["v16_64_8x1024"].sequences == (1024,) * 8
    assert len(problem.CASES) == 40


def test_a_case_says_its_sequences_and_prints_them_in_short():
    assert Case("batch", 2, 65, 1, 1).sequences == (65, 65)
    assert Case("batch", 2, 65, 1, 1).shape == "B=2 T=65 Hq=1 Hv=1"
    assert problem.CASES["v2_8_28672_4096"].shape == "T=28672+4096 Hq=2 Hv=8 S0"
    assert problem.CASES["v2_8_8x4096"].shape == "T=8x4096 Hq=2 Hv=8 S0"
    assert Case("odd", 1, 9, 1, 1, lengths=(2, 2, 0, 3, 2)).shape == "T=2x2+0+3+2 Hq=1 Hv=1"


def test_select_takes_suites_and_names_once_each():
    assert problem.select("lab") == problem.SUITES["lab"]
    assert problem.select("wide_gva_state,lab")[0].name == "wide_gva_state"
    assert len(problem.select("wide_gva_state,lab,wide_gva_state")) == 8
    with pytest.raises(problem.UnknownCase, match=r"lab, qwen, varlen.*found 'big'"):
        problem.select("lab,big")


def test_a_case_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Hv a multiple of Hq"):
        Case("bad", 1, 64, 3, 4)
    with pytest.raises(ValueError, match="gates must be one of random, mixed"):
        Case("bad", 1, 64, 1, 1, gates="odd")


@pytest.mark.parametrize(("B", "lengths"), [(2, (64,)), (1, (32, 31)), (1, (65, -1))])
def test_packed_sequences_that_cannot_be_are_refused(B, lengths):
    with pytest.raises(ValueError, match=r"case bad: lengths .* B must be 1 and T their sum, found B="):
        Case("bad", B, 64, 1, 1, lengths=lengths)


def test_inputs_are_seeded_and_as_documented():
    one, two = make_inputs(CASE, "cpu"), make_inputs(CASE, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(one[:-1], two[:-1], strict=True))
    assert one.cu_seqlens is None
    assert not torch.equal(one.v, make_inputs(CASE, "cpu", seed=1).v)
    assert one.q.shape == one.k.shape == (2, 65, 2, 128)
    assert one.v.shape == (2, 65, 4, 128)
    assert one.q.dtype == one.k.dtype == one.v.dtype == torch.bfloat16
    torch.testing.assert_close(one.k.float().norm(dim=-1), torch.ones(2, 65, 2), rtol=1e-2, atol=0)
    assert one.g.max() <= 0
    assert 0 < one.beta.min() < one.beta.max() < 1
    assert one.initial_state.shape == (2, 4, 128, 128)


def test_inputs_of_one_length_are_those_of_the_recorded_run():
    drawn = [float(x.double().sum()) for x in make_inputs(CASE, "cpu")[:-1]]
    assert drawn == pytest.approx(DRAWN, rel=1e-3)  # another machine may round otherwise


def test_packed_inputs_have_offsets_and_a_state_per_sequence():
    packed = make_inputs(Case("packed", 1, 130, 2, 4, initial_state=True, lengths=(65, 0, 65)), "cpu")
    assert packed.cu_seqlens.tolist() == [0, 65, 65, 130]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.initial_state.shape == (3, 4, 128, 128)
    assert packed.v.shape == (1, 130, 4, 128)


def test_gates_do_what_they_are_called():
    def g(gates):
        return make_inputs(Case("test", 1, 8, 1, 8, gates=gates), "cpu").g

    assert torch.all(g("mixed")[:, 1::2] == 0)
    assert torch.all(g("mixed")[:, ::2] < 0)
    assert torch.all(g("quarter_off")[..., ::4] == 0)
    assert (g("quarter_off") == 0).float().mean() == 0.25
    assert torch.all(g("zero") == 0)
    assert torch.all(g("steep") == -20)


NAMES = ("q", "k", "v", "g_cumsum", "beta", "A", "initial_state")
PACKED = Case("packed", 1, 130, 2, 4, initial_state=True, lengths=(65, 0, 65))


def core_arguments(case=CASE):
    """The arguments of `check_core_inputs` by name, on the `meta` device, where nothing is computed."""
    inputs = (None if x is None else x.to("meta") for x in make_inputs(case, "cpu"))
    q, k, v, g, beta, state, cu_seqlens = inputs
    A = torch.empty(*g.shape, 64, dtype=torch.bfloat16, device="meta")
    return dict(zip(NAMES, (q, k, v, g, beta, A, state), strict=True)) | {"cu_seqlens": cu_seqlens}


def full_arguments(case=CASE):
    """Those of `check_inputs`."""
    arguments = core_arguments(case)
    del arguments["A"]
    return arguments | {"g": arguments.pop("g_cumsum")}


CHECKS = [(check_core_inputs, core_arguments), (check_inputs, full_arguments)]
both = pytest.mark.parametrize(("check", "arguments"), CHECKS, ids=["core", "full"])


@both
def test_inputs_are_accepted_with_and_without_state_and_offsets(check, arguments):
    assert check(**arguments()) == (2, 65, 2, 4)
    assert check(**arguments() | {"initial_state": None}) == (2, 65, 2, 4)
    assert check(**arguments(PACKED)) == (1, 130, 2, 4)
    long = arguments(PACKED)["cu_seqlens"].long()
    assert check(**arguments(PACKED) | {"initial_state": None, "cu_seqlens": long}) == (1, 130, 2, 4)


def test_both_checks_take_arguments_in_the_order_of_the_forwards():
    assert check_core_inputs(*core_arguments().values()) == (2, 65, 2, 4)
    assert check_inputs(*(x.to("meta") for x in make_inputs(PACKED, "cpu"))) == (1, 130, 2, 4)


@pytest.mark.parametrize(
    ("check", "arguments", "name"), [(*each, name) for each in CHECKS for name in each[1]() if name != "cu_seqlens"]
)
def test_wrong_shape_dtype_and_layout_are_refused_by_name(check, arguments, name):
    def call(change):
        inputs = arguments()
        check(**inputs | {name: change(inputs[name])})

    with pytest.raises(ValueError, match=r"must|expected"):
        call(lambda x: x[:, :-1])
    with pytest.raises(TypeError, match=f"^{name} must be torch"):
        call(lambda x: x.half())
    with pytest.raises(ValueError, match=f"^{name} must be contiguous.*pass {name}.contiguous"):
        call(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match=r"one CUDA device, found .* on cpu"):
        call(lambda x: torch.empty(x.shape, dtype=x.dtype))


@both
def test_offsets_that_cannot_be_are_refused(check, arguments):
    def call(**change):
        check(**arguments(PACKED) | change)

    offsets = arguments(PACKED)["cu_seqlens"]
    for wrong in (offsets[:1], offsets[:0], offsets[None]):
        with pytest.raises(ValueError, match=r"^cu_seqlens must be \[N\+1\].*found shape .* B=1: pack"):
            call(cu_seqlens=wrong)
    with pytest.raises(ValueError, match=r"^cu_seqlens must be .* found shape \[4\] and B=2"):
        check(**arguments() | {"cu_seqlens": offsets})
    with pytest.raises(TypeError, match=r"^cu_seqlens must be torch.int32, found torch.int16"):
        call(cu_seqlens=offsets.short())
    with pytest.raises(ValueError, match=r"^cu_seqlens must be contiguous"):
        call(cu_seqlens=torch.empty(8, dtype=torch.int32, device="meta")[::2])
    with pytest.raises(ValueError, match="one CUDA device, found cu_seqlens on cpu"):
        call(cu_seqlens=torch.tensor([0, 65, 65, 130]))
    with pytest.raises(ValueError, match=r"^initial_state must have shape \[3, 4, 128, 128\], found \[1, 4"):
        call(initial_state=torch.empty(1, 4, 128, 128, device="meta"))


def test_heads_that_do_not_group_and_missing_dimensions_are_refused():
    q, k, v, g, beta, A, state, _ = core_arguments().values()
    with pytest.raises(ValueError, match="Hv a multiple of Hq, found B=2 T=65 Hq=2 Hv=3"):
        check_core_inputs(q, k, v[:, :, :3], g, beta, A, state)
    with pytest.raises(ValueError, match=r"q and v must be \[B,T,H,128\]"):
        check_core_inputs(q[0], k, v, g, beta, A, state)


@both
def test_tensors_that_are_all_on_the_cpu_are_refused(check, arguments):
    inputs = {name: x if x is None else torch.empty(x.shape, dtype=x.dtype) for name, x in arguments().items()}
    with pytest.raises(ValueError, match=r"one CUDA device, found q on cpu.*use kernels\.reference"):
        check(**inputs)
