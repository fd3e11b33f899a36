"""The references against each other, and against the token recurrence written out in NumPy loops."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from kernels import preprocess, reference
from kernels.problem import Case, Inputs, make_inputs

LENGTHS = [1, 63, 64, 65, 127, 200]
# Short chunks, one token, none at either end and in the middle, and one length twice, apart from each other.
PACKINGS = [(65, 1, 0, 64, 200, 1, 65), (0, 130), (130, 0), (7,)]
FORMS = [reference.recurrence, reference.chunkwise, reference.affine_scan]
GATES = ["random", "mixed", "zero", "steep"]


def inputs_of(T, gates="random", initial_state=True, B=1, Hq=1, Hv=2):
    return make_inputs(Case("test", B, T, Hq, Hv, initial_state, gates), device="cpu")


def packed_inputs(lengths, gates="random", initial_state=True, Hq=1, Hv=2):
    return make_inputs(Case("test", 1, sum(lengths), Hq, Hv, initial_state, gates, lengths), device="cpu")


def alone(inputs):
    """The inputs of each packed sequence."""
    offsets = inputs.cu_seqlens.tolist()
    for n, (begin, end) in enumerate(pairwise(offsets)):
        state = None if inputs.initial_state is None else inputs.initial_state[n : n + 1]
        yield Inputs(*(x[:, begin:end] for x in inputs[:5]), state)


def token_loop(inputs):
    """One head and one token at a time, in NumPy: shares no code with kernels.reference."""
    q, k, v, g, beta, S0, _ = (None if x is None else x.double().numpy() for x in inputs)
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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("initial_state", [False, True])
@pytest.mark.parametrize("lengths", PACKINGS)
def test_packed_sequences_are_each_computed_alone(form, lengths, initial_state):
    inputs = packed_inputs(lengths, initial_state=initial_state, Hq=2, Hv=4)
    each = [token_loop(one) for one in alone(inputs)]
    output, states = (torch.cat([result[i] for result in each], dim=1 - i) for i in range(2))
    for cu_seqlens in (inputs.cu_seqlens, inputs.cu_seqlens.long()):
        assert_same(form(*inputs[:6], cu_seqlens), (output, states))


@pytest.mark.parametrize("form", FORMS)
def test_tokens_of_no_sequence_give_zero_and_change_nothing(form):
    inputs = packed_inputs((70, 0, 5))
    more = Inputs(*(torch.cat([x, x[:, :9]], dim=1) for x in inputs[:5]), *inputs[5:])
    output, states = form(*more)
    assert_same((output[:, :75], states), form(*inputs))
    assert torch.all(output[:, 75:] == 0)
    assert torch.equal(states[1], inputs.initial_state[1].double())


def test_packed_sequences_keep_the_precision_that_is_asked_for():
    inputs = packed_inputs((3, 2))
    output, states = reference.recurrence(*inputs, dtype=torch.float32)
    assert output.dtype == states.dtype == torch.float32


@pytest.mark.parametrize("inputs", [inputs_of(65), packed_inputs((65, 0, 65))], ids=["one length", "packed"])
def test_references_leave_their_inputs_alone(inputs):
    before = [None if x is None else x.clone() for x in inputs]
    for form in FORMS:
        form(*inputs)
    reference.preprocessing(inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens)
    for now, then in zip(inputs, before, strict=True):
        assert now is then is None or torch.equal(now, then)


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


# What makes g_cumsum and A, and how exact it is: PyTorch in FP32 rounds A to BF16.
PREPARATIONS = [(reference.preprocessing, 1e-12), (preprocess.prepare, 3e-3)]


def assert_prepared(inputs, g_cumsum, A, error):
    """Both are what the definitions say of one sequence."""
    T, Hv = inputs.g.shape[1:]
    assert A.shape == (1, T, Hv, 64)
    for h in range(Hv):
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
            assert reference.relative_error(block[:, :length], expected) < error
            assert torch.all(block[:, length:] == 0)


@pytest.mark.parametrize(("prepare", "error"), PREPARATIONS)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("T", LENGTHS)
def test_preprocessing_matches_the_definitions(T, gates, prepare, error):
    inputs = inputs_of(T, gates)
    assert_prepared(inputs, *prepare(inputs.k, inputs.g, inputs.beta), error)


@pytest.mark.parametrize(("prepare", "error"), PREPARATIONS)
@pytest.mark.parametrize("lengths", PACKINGS[:2])
def test_chunks_begin_anew_with_every_packed_sequence(lengths, prepare, error):
    inputs = packed_inputs(lengths)
    g_cumsum, A = prepare(inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens)
    for one, (begin, end) in zip(alone(inputs), pairwise(inputs.cu_seqlens), strict=True):
        assert_prepared(one, g_cumsum[:, begin:end], A[:, begin:end], error)
