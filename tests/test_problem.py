"""Cases, inputs and the validation of a core call."""

import pytest
import torch

from kernels import problem
from kernels.build import meta_inputs
from kernels.problem import Case, check_core_inputs, make_inputs

CASE = Case("test", 2, 65, 2, 4, initial_state=True)


def test_suites_are_the_documented_ones():
    assert len(problem.SUITES["lab"]) == 8
    assert len(problem.SUITES["qwen"]) == 20
    assert problem.CASES["wide_gva_state"].shape == "B=1 T=8192 Hq=16 Hv=64 S0"
    assert problem.CASES["q16_64_4x8192"] == Case("q16_64_4x8192", 4, 8192, 16, 64, True, "quarter_off")
    assert len(problem.CASES) == 28


def test_select_takes_suites_and_names_once_each():
    assert problem.select("lab") == problem.SUITES["lab"]
    assert problem.select("wide_gva_state,lab")[0].name == "wide_gva_state"
    assert len(problem.select("wide_gva_state,lab,wide_gva_state")) == 8
    with pytest.raises(problem.UnknownCase, match=r"lab, qwen.*found 'big'"):
        problem.select("lab,big")


def test_a_case_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Hv a multiple of Hq"):
        Case("bad", 1, 64, 3, 4)
    with pytest.raises(ValueError, match="gates must be one of random, mixed"):
        Case("bad", 1, 64, 1, 1, gates="odd")


def test_inputs_are_seeded_and_as_documented():
    one, two = make_inputs(CASE, "cpu"), make_inputs(CASE, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one.v, make_inputs(CASE, "cpu", seed=1).v)
    assert one.q.shape == one.k.shape == (2, 65, 2, 128)
    assert one.v.shape == (2, 65, 4, 128)
    assert one.q.dtype == one.k.dtype == one.v.dtype == torch.bfloat16
    torch.testing.assert_close(one.k.float().norm(dim=-1), torch.ones(2, 65, 2), rtol=1e-2, atol=0)
    assert one.g.max() <= 0
    assert 0 < one.beta.min() < one.beta.max() < 1
    assert one.initial_state.shape == (2, 4, 128, 128)


def test_gates_do_what_they_are_called():
    def g(gates):
        return make_inputs(Case("test", 1, 8, 1, 8, gates=gates), "cpu").g

    assert torch.all(g("mixed")[:, 1::2] == 0)
    assert torch.all(g("mixed")[:, ::2] < 0)
    assert torch.all(g("quarter_off")[..., ::4] == 0)
    assert (g("quarter_off") == 0).float().mean() == 0.25
    assert torch.all(g("zero") == 0)
    assert torch.all(g("steep") == -20)


def test_core_inputs_are_accepted_with_and_without_state():
    assert check_core_inputs(*meta_inputs(CASE)) == (2, 65, 2, 4)
    assert check_core_inputs(*meta_inputs(CASE)[:-1], None) == (2, 65, 2, 4)


NAMES = ("q", "k", "v", "g_cumsum", "beta", "A", "initial_state")


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shape_dtype_and_layout_are_refused_by_name(name):
    def call(change):
        inputs = dict(zip(NAMES, meta_inputs(CASE), strict=True))
        inputs[name] = change(inputs[name])
        check_core_inputs(**inputs)

    with pytest.raises(ValueError, match=r"must|expected"):
        call(lambda x: x[:, :-1])
    with pytest.raises(TypeError, match=f"^{name} must be torch"):
        call(lambda x: x.half())
    with pytest.raises(ValueError, match=f"^{name} must be contiguous.*pass {name}.contiguous"):
        call(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match=r"one CUDA device, found .* on cpu"):
        call(lambda x: torch.empty(x.shape, dtype=x.dtype))


def test_heads_that_do_not_group_and_missing_dimensions_are_refused():
    q, k, v, g, beta, A, state = meta_inputs(CASE)
    with pytest.raises(ValueError, match="Hv a multiple of Hq, found B=2 T=65 Hq=2 Hv=3"):
        check_core_inputs(q, k, v[:, :, :3], g, beta, A, state)
    with pytest.raises(ValueError, match=r"q and v must be \[B,T,H,128\]"):
        check_core_inputs(q[0], k, v, g, beta, A, state)


def test_tensors_that_are_all_on_the_cpu_are_refused():
    inputs = (None if x is None else torch.empty(x.shape, dtype=x.dtype) for x in meta_inputs(CASE))
    with pytest.raises(ValueError, match=r"one CUDA device, found q on cpu.*use kernels\.reference"):
        check_core_inputs(*inputs)
