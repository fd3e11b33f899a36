"""Check, then time: every variant on every case, and on request the public libraries, with both clocks.

    python -m profiling.bench [--variant all] [--case lab] [--peers] [--out FOLDER]

A case is run in one process on one GPU. Each implementation must first match the FP64 reference, on outputs that
were poisoned with NaN where torch allocates them; a variant's wrong result ends the run with a non-zero exit code, a
library's is noted and not timed. Then all of a phase are timed, interleaved round by round, so that drift hits all
alike:

- graph: a CUDA graph holds one call per copy of the inputs, and there are enough copies that a replay reads
  at least four times the L2 cache; a sample is one replay's time divided by its calls;
- eager: one CUDA-event pair and one synchronize around each call, after 10 warm-ups; this includes Python,
  allocation and launch.

With peers there are more phases than the core. full is from log-gates per token, ours as the public function, under the
last rung's name. cumsum and A are what comes before the core, see kernels.peers; ours is one kernel, and is in A. Of a
full forward the peak of memory is measured too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import variants
from kernels import peers, problem, work
from kernels.errors import command
from kernels.preprocess import core_inputs, prepare
from kernels.problem import Case, Implementation, Inputs, UnsupportedCase
from kernels.reference import WrongResult, check, preprocessing, recurrence
from profiling import run, schema

GRAPH_SAMPLES = 20
EAGER_WARMUPS = 10
EAGER_SAMPLES = 100
EAGER_SAMPLES_OF_MANY = 10  # of an implementation with many launches: one call takes a tenth of a second
L2_MULTIPLE = 4  # a replay touches this many times the L2 cache

PROTOCOL = {
    "graph": f"median of {GRAPH_SAMPLES} CUDA-graph replays; input copies rotated over {L2_MULTIPLE}x the L2 cache",
    "eager": f"median of {EAGER_SAMPLES} calls (of the token loop {EAGER_SAMPLES_OF_MANY}) after {EAGER_WARMUPS} "
    "warm-ups, one event pair and one synchronize each",
    "order": "one process, all implementations of a phase interleaved round by round",
    "correctness": "before timing, against the FP64 token recurrence: relative L2 <= 5e-3; rtol = atol = 5e-3 on every "
    "element where all heads decay, of libraries on lab alone; cumsum and A: relative L2 <= 5e-3, FP64 formulas",
    "memory": "peak of what one full forward, not the first, asks of torch's allocator, less what it returns; what a "
    "library keeps between calls is not in it",
}

# What each `convert` made of a case's inputs. Implementations that want the same share it.
Arguments = dict[Callable[[Inputs], tuple], tuple]


@contextmanager
def poisoned_memory():
    """While active, torch fills newly allocated tensors with NaN, so an element nobody writes shows up."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def implementations(names: tuple[str, ...]) -> dict[str, dict[str, Implementation]]:
    """By phase: the core of every rung; what prepares it, and the public function, as the last one's."""
    last, label = names[-1], variants.label(names[-1])

    def full(q, k, v, g, beta, state, cu_seqlens):
        return variants.chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=state, output_final_state=True, cu_seqlens=cu_seqlens
        )

    def gates(inputs: Inputs) -> tuple:
        return inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens

    return {
        "core": {
            name: Implementation(variants.label(name), variants.core_forward(name), core_inputs) for name in names
        },
        "cumsum": {},
        "A": {last: Implementation(label, prepare, gates, lambda prepared, _: prepared[1:])},
        "full": {last: Implementation(label, full, tuple)},
    }


@dataclass(frozen=True)
class Gate:
    """Who passed on one case, with which arguments and errors, and who was left out, and why."""

    arguments: Arguments
    errors: dict[str, dict[str, float]]  # relative L2 error of every tensor, by implementation
    skipped: dict[str, str]


def gate(
    ours: dict[str, Implementation],
    guests: dict[str, Implementation],
    case: Case,
    inputs: Inputs,
    expected: tuple[torch.Tensor, ...],
    phase: str = "core",
) -> Gate:
    """Compare every implementation of a phase with the reference. A guest that is wrong or fails is left out, not the
    end, and off the lab suite its relative error alone decides: of millions of elements one may well be out by chance.

    Raises:
        WrongResult: one of ours is wrong; names it, the case, the tensor and the error.
    """
    passed = Gate({}, {}, {})
    for name, each in (ours | guests).items():
        try:
            arguments = passed.arguments.get(each.convert) or each.convert(inputs)
            with poisoned_memory():
                actual = each.result(each.forward(*arguments), inputs)
            strict = name in ours or case in problem.SUITES["lab"]
            elementwise = strict and case.decays and phase in work.WORK
            passed.errors[name] = check(actual, expected, elementwise, schema.CHECKED[phase])
            passed.arguments[each.convert] = arguments
        except UnsupportedCase as reason:
            passed.skipped[name] = str(reason)
        except WrongResult as error:
            if name in ours:
                raise WrongResult(
                    f"{name} on {case.name} ({case.shape}) is wrong, so nothing was timed: {error}; correct the variant"
                ) from None
            passed.skipped[name] = f"wrong: {error}"
        except Exception as error:
            if name in ours:
                raise
            passed.skipped[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return passed


def time_implementations(chosen: dict[str, Implementation], arguments: Arguments) -> dict[str, dict[str, list[float]]]:
    """Seconds of every sample, by implementation and metric."""
    copies = {convert: input_copies(made) for convert, made in arguments.items()}
    graphs = {name: _capture(each, copies[each.convert]) for name, each in chosen.items()}
    samples = {name: {"latency_graph": [], "latency_eager": []} for name in chosen}
    for _ in range(GRAPH_SAMPLES):
        for name, (graph, calls) in graphs.items():
            samples[name]["latency_graph"].append(timed(graph.replay) / len(calls))
    graphs.clear()
    torch.cuda.empty_cache()
    for i in range(-EAGER_WARMUPS, EAGER_SAMPLES):
        for name, each in chosen.items():
            if each.many_launches and i >= EAGER_SAMPLES_OF_MANY:
                continue
            own = copies[each.convert]
            seconds = timed(lambda f=each.forward, j=i, own=own: f(*own[j % len(own)]))
            if i >= 0:
                samples[name]["latency_eager"].append(seconds)
    return samples


def input_copies(arguments: tuple) -> list[tuple]:
    """Enough copies of the tensors among the arguments that reading each once moves L2_MULTIPLE times the L2 cache.

    Offsets are the same in all: they are small, and libraries know them again by their identity.
    """
    size = sum(x.numel() * x.element_size() for x in arguments if isinstance(x, torch.Tensor))
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    extra = -(-L2_MULTIPLE * l2 // size) - 1
    return [arguments] + [
        tuple(x.clone() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments)
        for _ in range(extra)
    ]


def _capture(implementation: Implementation, copies: list[tuple]):
    """A graph of one call per copy, and what the calls return: kept, so that each has outputs of its own."""
    forward, copies = implementation.forward, copies[: 1 if implementation.many_launches else None]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        forward(*copies[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [forward(*inputs) for inputs in copies]
    graph.replay()  # the first replay uploads the graph
    return graph, results


def timed(call: Callable[[], object]) -> float:
    """Seconds on the GPU's clock from before to after `call`."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def peak_memory(forward: Callable[..., tuple], arguments: tuple) -> int:
    """Bytes that a call has allocated at its peak beyond what was there before, less those of the tensors it returns.

    As they were asked for: how far the allocator rounds depends on what it holds already.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    returned = forward(*arguments)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return peak - before - sum(x.numel() * x.element_size() for x in returned)


def measure_ceilings() -> work.Ceilings:
    """Sustained rates of this device: an 8192^3 BF16 matrix product, and a 2 GiB copy, bytes read plus written."""
    n, size = 8192, 2**31
    a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
    c = torch.empty_like(a)
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)

    def median(call: Callable[[], object]) -> float:
        return statistics.median([timed(call) for _ in range(13)][3:])

    product = median(lambda: torch.matmul(a, b, out=c))
    copy = median(lambda: target.copy_(source))
    return work.Ceilings(flops_per_second=2 * n**3 / product, bytes_per_second=2 * size / copy)


def bench(names: tuple[str, ...], cases: tuple[Case, ...], folder: Path, info: dict, with_peers: bool) -> None:
    """Check and time rungs on `cases`, and the libraries if asked for; print a table per case and phase.

    Leaves measurements.csv and run.json in `folder` and adds to them, so that a run can hold several calls.

    Raises:
        WrongResult: a variant is wrong; what was measured before stays in the folder.
    """
    if not info["ceilings"]:
        info["ceilings"] = vars(measure_ceilings())
        info["protocol"] |= PROTOCOL
    ceilings = work.Ceilings(**info["ceilings"])
    print(
        f"{info['gpu']['name']}: {ceilings.flops_per_second / 1e12:.0f} TFLOP/s BF16, "
        f"{ceilings.bytes_per_second / 1e12:.2f} TB/s copy, measured"
    )
    ours, theirs = implementations(names), {}
    if with_peers:
        theirs, info["missing"] = peers.find()
        info["peers"] = {name: next(iter(phases.values())).label for name, phases in theirs.items()}
        info["versions"] |= {package: run.version(package) for package in peers.PACKAGES}
        for name, reason in info["missing"].items():
            print(f"  {name} is left out: {reason}")
    for number, case in enumerate(cases, 1):
        started = time.perf_counter()
        print(f"\n[{number}/{len(cases)}] {case.name}  {case.shape}", flush=True)
        inputs = problem.make_inputs(case)
        expected = {"core": recurrence(*inputs)}
        if with_peers:
            g_cumsum, A = preprocessing(inputs.k, inputs.g, inputs.beta, inputs.cu_seqlens)
            expected |= {"cumsum": (g_cumsum,), "A": (A,), "full": expected["core"]}
        for phase in expected:
            guests = {name: phases[phase] for name, phases in theirs.items() if phase in phases}
            chosen = ours[phase] | guests
            passed = gate(ours[phase], guests, case, inputs, expected[phase], phase)
            peaks = {
                name: peak_memory(chosen[name].forward, passed.arguments[chosen[name].convert])
                for name in passed.errors
                if phase == "full"
            }
            samples = time_implementations({name: chosen[name] for name in passed.errors}, passed.arguments)
            info["planned"].append({"case": case.name, "phase": phase, "variants": list(chosen)})
            info["skipped"] += [
                {"variant": name, "case": case.name, "phase": phase, "reason": reason}
                for name, reason in passed.skipped.items()
            ]
            if rows := _rows(info, case, phase, passed.errors, peaks, samples):
                run.add_rows(folder, rows)
            _print_phase(case, phase, passed, peaks, samples, ceilings)
        info["clocks"]["seen"].append({"case": case.name, **run.clocks()})
        run.write_info(folder, info)
        print(f"  {time.perf_counter() - started:.0f} s", flush=True)


def _rows(info: dict, case: Case, phase: str, errors: dict, peaks: dict, samples: dict) -> list[dict]:
    def row(variant: str, metric: str, sample: int, value: float) -> dict:
        where = (info["run"], info["gpu"]["name"], "bench", variant, case.name, phase)
        return schema.row(*where, metric, schema.BENCH_METRICS[metric], value, sample=sample)

    rows = [row(name, f"error_{tensor}", 0, e) for name, by in errors.items() for tensor, e in by.items()]
    rows += [row(name, "peak_memory", 0, peak) for name, peak in peaks.items()]
    for name, by_metric in samples.items():
        for metric, values in by_metric.items():
            rows += [row(name, metric, i, value) for i, value in enumerate(values)]
    return rows


def _print_phase(case: Case, phase: str, passed: Gate, peaks: dict, samples: dict, ceilings: work.Ceilings) -> None:
    floor = work.speed_of_light(work.WORK[phase](case), ceilings) if phase in work.WORK else None
    heads = f"{'graph':>11}{'eager':>11}{'speed-up':>10}" + (f"{'of light':>10}" if floor else "")
    heads += "".join(f"{tensor + ' err':>17}" for tensor in schema.CHECKED[phase])
    print(f"  {phase:<16}{heads}{'peak memory' if peaks else '':>15}")
    first = None
    for name, by_metric in samples.items():
        graph, eager = (statistics.median(by_metric[f"latency_{clock}"]) for clock in ("graph", "eager"))
        first = first or graph
        light = f"{floor / graph:>10.1%}" if floor else ""
        errors = "".join(f"{error:>17.1e}" for error in passed.errors[name].values())
        memory = f"{peaks[name] / 2**20:>11.1f} MiB" if peaks else ""
        print(f"  {name:<16}{graph * 1e6:>8.1f} µs{eager * 1e6:>8.1f} µs{first / graph:>9.2f}x{light}{errors}{memory}")
    for name, reason in passed.skipped.items():
        print(f"  {name:<16}not timed: {reason}")


@command
def main() -> None:
    """Run the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="all", help="all, or names separated by commas")
    parser.add_argument("--case", default="lab", help="suites and cases separated by commas")
    parser.add_argument("--peers", action="store_true", help="the public libraries too, in all phases")
    parser.add_argument("--out", help="a new folder; results/<time>-bench if left out")
    options = parser.parse_args()
    names, cases = variants.select(options.variant), problem.select(options.case)
    run.require_gpu()
    folder = run.new_folder("bench", options.out)
    bench(names, cases, folder, run.describe({name: variants.label(name) for name in names}), options.peers)
    print(f"\nrows and environment: {folder}")


if __name__ == "__main__":
    main()
