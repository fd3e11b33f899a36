"""The references against each other, and against the token recurrence written out in NumPy loops."""

import numpy as np
import pytest
import torch

from kernels import preprocess, reference
from kernels.problem import Case, make_inputs

LENGTHS = [1, 63, 64, 65, 127, 200]
GATES = ["random", "mixed", "zero", "steep"]


def inputs_of(T, gates="random", initial_state=True, B=1, Hq=1, Hv=2):
    return make_inputs(Case("test", B, T, Hq, Hv, initial_state, gates), device="cpu")


def token_loop(inputs):
    """One head and one token at a time, in NumPy: shares no code with kernels.reference."""
    q, k, v, g, beta, S0 = (None if x is None else x.double().numpy() for x in inputs)
    B, T, Hv, D = v.shape
    group = Hv // q.shape[2]
    output = np.empty(v.shape)
    state = np.zeros((B, Hv, D, D)) if S0 is None else S0.copy()
    for b in range(B):
        for h in range(Hv):
            S = state[b, h]
            for t in range(T):
                key = k[b, t, h // group]
                S *= np.exp(g[b, t, h])
                S += np.outer(key, beta[b, t, h] * (v[b, t, h] - key @ S))
                output[b, t, h] = q[b, t, h // group] @ S / np.sqrt(D)
    return torch.from_numpy(output), torch.from_numpy(state)


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("initial_state", [False, True])
@pytest.mark.parametrize("T", LENGTHS)
def test_recurrence_equals_a_numpy_loop(T, initial_state):
    inputs = inputs_of(T, initial_state=initial_state, B=2, Hq=2, Hv=4)
    assert_same(reference.recurrence(*inputs), token_loop(inputs))


@pytest.mark.parametrize("form", [reference.chunkwise, reference.affine_scan])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("T", LENGTHS)
def test_chunked_forms_equal_the_recurrence(form, gates, T):
    for initial_state in (False, True):
        inputs = inputs_of(T, gates, initial_state)
        assert_same(form(*inputs), reference.recurrence(*inputs))


def test_references_leave_their_inputs_alone():
    inputs = inputs_of(65)
    before = [x.clone() for x in inputs]
    for form in (reference.recurrence, reference.chunkwise, reference.affine_scan):
        form(*inputs)
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))


def test_check_returns_errors_and_refuses_wrong_results():
    output, state = torch.ones(2, 3), torch.full((2, 2), 2.0)
    assert reference.check((output, state), (output, state), elementwise=True) == {"output": 0.0, "final_state": 0.0}
    with pytest.raises(reference.WrongResult, match=r"output: relative L2 error 2.00e\+00"):
        reference.check((-output, state), (output, state), elementwise=True)
    with pytest.raises(reference.WrongResult, match="final_state"):
        reference.check((output, state * float("nan")), (output, state), elementwise=False)


def test_check_sees_a_single_wrong_element():
    expected = torch.ones(1000)
    actual = expected.clone()
    actual[7] += 0.1
    assert reference.check((actual, expected), (expected, expected), elementwise=False)["output"] < 5e-3
    with pytest.raises(reference.WrongResult, match="output"):
        reference.check((actual, expected), (expected, expected), elementwise=True)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("T", LENGTHS)
def test_pytorch_preprocessing_matches_the_definition_of_A(T, gates):
    inputs = inputs_of(T, gates)
    g_cumsum = preprocess.chunk_cumsum(inputs.g)
    A = preprocess.kkt_inverse(inputs.k, g_cumsum, inputs.beta)
    assert A.shape == (1, T, 2, 64)
    for h in range(2):
        for start in range(0, T, 64):
            chunk = slice(start, min(start + 64, T))
            length = chunk.stop - start
            g = inputs.g[0, chunk, h].double().cumsum(0)
            torch.testing.assert_close(g_cumsum[0, chunk, h].double(), g, rtol=1e-5, atol=1e-5)
            k, beta = inputs.k[0, chunk, 0].double(), inputs.beta[0, chunk, h].double()
            strict = torch.zeros(length, length, dtype=torch.float64)
            for i in range(length):
                for j in range(i):
                    strict[i, j] = beta[i] * torch.exp(g[i] - g[j]) * (k[i] @ k[j])
            expected = torch.linalg.inv(torch.eye(length, dtype=torch.float64) + strict)
            block = A[0, chunk, h]
            assert reference.relative_error(block[:, :length], expected) < 3e-3
            assert torch.all(block[:, length:] == 0)
