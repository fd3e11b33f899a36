"""Check, then time: every variant on every case, with both clocks.

    python -m profiling.bench [--variant all] [--case lab] [--out FOLDER]

A case is run in one process on one GPU. Each variant must first match the FP64 recurrence on outputs that
were poisoned with NaN; a wrong result ends the run with a non-zero exit code. Then all are timed,
interleaved round by round, so that drift hits all alike:

- graph: a CUDA graph holds one call per copy of the inputs, and there are enough copies that a replay reads
  at least four times the L2 cache; a sample is one replay's time divided by its calls;
- eager: one CUDA-event pair and one synchronize around each call, after 10 warm-ups; this includes Python,
  allocation and launch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch

import variants
from kernels import problem, work
from kernels.errors import command
from kernels.preprocess import CoreInputs, core_inputs
from kernels.problem import Case, UnsupportedCase
from kernels.reference import WrongResult, check, recurrence
from profiling import run, schema

GRAPH_SAMPLES = 20
EAGER_WARMUPS = 10
EAGER_SAMPLES = 100
L2_MULTIPLE = 4  # a replay touches this many times the L2 cache

PROTOCOL = {
    "graph": f"median of {GRAPH_SAMPLES} CUDA-graph replays; input copies rotated over {L2_MULTIPLE}x the L2 cache",
    "eager": f"median of {EAGER_SAMPLES} calls after {EAGER_WARMUPS} warm-ups, one event pair and one synchronize each",
    "order": "one process, variants interleaved round by round",
    "correctness": "before timing, against the FP64 token recurrence: relative L2 <= 5e-3; rtol = atol = 5e-3 on every "
    "element where all heads decay",
}

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def poisoned_memory():
    """While active, torch fills newly allocated tensors with NaN, so an element nobody writes shows up."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


def check_variants(
    forwards: dict[str, Forward], case: Case, core: CoreInputs, expected
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Compare each variant with the reference; return the errors of those that match, and who skips, and why.

    Raises:
        WrongResult: names case, variant, tensor and error.
    """
    errors, skipped = {}, {}
    for name, forward in forwards.items():
        try:
            with poisoned_memory():
                actual = forward(*core)
            errors[name] = check(actual, expected, elementwise=case.decays)
        except UnsupportedCase as reason:
            skipped[name] = str(reason)
        except WrongResult as error:
            raise WrongResult(
                f"{name} on {case.name} ({case.shape}) is wrong, so nothing was timed: {error}; correct the variant"
            ) from None
    return errors, skipped


def time_variants(forwards: dict[str, Forward], core: CoreInputs) -> dict[str, dict[str, list[float]]]:
    """Seconds of every sample, by variant and metric."""
    copies = input_copies(core)
    graphs = {name: _capture(forward, copies) for name, forward in forwards.items()}
    samples = {name: {"latency_graph": [], "latency_eager": []} for name in forwards}
    for _ in range(GRAPH_SAMPLES):
        for name, (graph, _) in graphs.items():
            samples[name]["latency_graph"].append(_timed(graph.replay) / len(copies))
    graphs.clear()
    torch.cuda.empty_cache()
    for i in range(-EAGER_WARMUPS, EAGER_SAMPLES):
        for name, forward in forwards.items():
            seconds = _timed(lambda f=forward, j=i: f(*copies[j % len(copies)]))
            if i >= 0:
                samples[name]["latency_eager"].append(seconds)
    return samples


def input_copies(core: CoreInputs) -> list[CoreInputs]:
    """Enough copies of the inputs that reading each once moves L2_MULTIPLE times the L2 cache."""
    size = sum(x.numel() * x.element_size() for x in core if x is not None)
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    extra = -(-L2_MULTIPLE * l2 // size) - 1
    return [core] + [tuple(None if x is None else x.clone() for x in core) for _ in range(extra)]


def _capture(forward: Forward, copies: list[CoreInputs]):
    """A graph of one call per copy, and the outputs it writes: kept, so that each call has its own."""
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


def _timed(call: Callable[[], object]) -> float:
    """Seconds on the GPU's clock from before to after `call`."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def measure_ceilings() -> work.Ceilings:
    """Sustained rates of this device: an 8192^3 BF16 matrix product, and a 2 GiB copy, bytes read plus written."""
    n, size = 8192, 2**31
    a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
    c = torch.empty_like(a)
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)

    def median(call: Callable[[], object]) -> float:
        return statistics.median([_timed(call) for _ in range(13)][3:])

    product = median(lambda: torch.matmul(a, b, out=c))
    copy = median(lambda: target.copy_(source))
    return work.Ceilings(flops_per_second=2 * n**3 / product, bytes_per_second=2 * size / copy)


def bench(forwards: dict[str, Forward], cases: tuple[Case, ...], folder: Path, info: dict) -> None:
    """Check and time `forwards` on `cases`; leave measurements.csv and run.json in `folder`; print a table.

    Raises:
        WrongResult: a variant is wrong; what was measured before stays in the folder.
    """
    ceilings = measure_ceilings()
    info["ceilings"] = vars(ceilings)
    info["protocol"] |= PROTOCOL
    print(
        f"{info['gpu']['name']}: {ceilings.flops_per_second / 1e12:.0f} TFLOP/s BF16, "
        f"{ceilings.bytes_per_second / 1e12:.2f} TB/s copy, measured"
    )
    for number, case in enumerate(cases, 1):
        started = time.perf_counter()
        print(f"\n[{number}/{len(cases)}] {case.name}  {case.shape}", flush=True)
        inputs = problem.make_inputs(case)
        core = core_inputs(inputs)
        expected = recurrence(*inputs)
        errors, skipped = check_variants(forwards, case, core, expected)
        del inputs, expected
        samples = time_variants({name: forwards[name] for name in errors}, core)
        info["clocks"]["seen"].append({"case": case.name, **run.clocks()})
        info["skipped"] += [{"variant": name, "case": case.name, "reason": reason} for name, reason in skipped.items()]
        run.add_rows(folder, _rows(info, case, errors, samples))
        run.write_info(folder, info)
        _print_case(case, errors, samples, skipped, ceilings)
        print(f"  {time.perf_counter() - started:.0f} s", flush=True)


def _rows(info: dict, case: Case, errors: dict, samples: dict) -> list[dict]:
    def row(variant: str, metric: str, sample: int, value: float) -> dict:
        unit = schema.BENCH_METRICS[metric]
        where = (info["run"], info["gpu"]["name"], "bench", variant, case.name, "core")
        return schema.row(*where, metric, unit, value, sample=sample)

    rows = [row(name, f"error_{tensor}", 0, e) for name, by in errors.items() for tensor, e in by.items()]
    for name, by_metric in samples.items():
        for metric, values in by_metric.items():
            rows += [row(name, metric, i, value) for i, value in enumerate(values)]
    return rows


def _print_case(case: Case, errors: dict, samples: dict, skipped: dict, ceilings: work.Ceilings) -> None:
    floor = work.speed_of_light(work.core(case), ceilings)
    heads = f"{'graph':>11}{'eager':>11}{'speed-up':>10}{'of light':>10}{'output err':>12}{'state err':>11}"
    print(f"  {'variant':<12}{heads}")
    first = None
    for name, by_metric in samples.items():
        graph, eager = (statistics.median(by_metric[f"latency_{clock}"]) for clock in ("graph", "eager"))
        first = first or graph
        print(
            f"  {name:<12}{graph * 1e6:>8.1f} µs{eager * 1e6:>8.1f} µs{first / graph:>9.2f}x{floor / graph:>10.1%}"
            f"{errors[name]['output']:>12.1e}{errors[name]['final_state']:>11.1e}"
        )
    for name, reason in skipped.items():
        print(f"  {name:<12}skipped: {reason}")


@command
def main() -> None:
    """Run the command line that the module describes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="all", help="all, or names separated by commas")
    parser.add_argument("--case", default="lab", help="suites and cases separated by commas")
    parser.add_argument("--out", help="a new folder; results/<time>-bench if left out")
    options = parser.parse_args()
    names, cases = variants.select(options.variant), problem.select(options.case)
    run.require_gpu()
    folder = run.new_folder("bench", options.out)
    forwards = {name: variants.load(name).gdn_prefill_forward for name in names}
    bench(forwards, cases, folder, run.describe({name: variants.label(name) for name in names}))
    print(f"\nrows and environment: {folder}")


if __name__ == "__main__":
    main()
