"""Short metric names for Nsight Compute's: the counter, our base unit, and what it says in words.

Names are those of ncu 2022 to 2026 on Hopper (`ncu --query-metrics --chip gh100`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A counter of Nsight Compute and how we keep it."""

    counter: str  # Nsight Compute's name
    unit: str  # a unit of profiling.schema
    label: str  # for table heads
    meaning: str
    details: tuple[str, str] | None = None  # section and name on ncu's details page, where its sections show it


def _stall(reason: str, meaning: str) -> Metric:
    return Metric(
        f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio",
        "count",
        reason.replace("_", " "),
        meaning,
    )


def _limit(counter: str, words: str) -> Metric:
    return Metric(
        f"launch__occupancy_limit_{counter}", "count", f"CTAs by {words}", f"CTAs for which an SM has {words}"
    )


_LIMITS = {
    "registers": ("registers", "registers"),
    "shared_memory": ("shared_mem", "shared memory"),
    "barriers": ("barriers", "barriers"),
    "warps": ("warps", "warps"),
    "blocks": ("blocks", "CTA slots"),
}
_ELAPSED, _ACTIVE = "avg.pct_of_peak_sustained_elapsed", "avg.pct_of_peak_sustained_active"
_LIGHT, _LAUNCH = "GPU Speed Of Light Throughput", "Launch Statistics"  # sections of the details page

METRICS: dict[str, Metric] = {
    "duration": Metric(
        "gpu__time_duration.sum",
        "second",
        "Duration",
        "time of the launch, caches flushed before it",
        (_LIGHT, "Duration"),
    ),
    "sm_throughput": Metric(
        f"sm__throughput.{_ELAPSED}",
        "ratio",
        "SM",
        "busiest part of the SM, share of its peak",
        (_LIGHT, "Compute (SM) Throughput"),
    ),
    "dram_throughput": Metric(
        f"gpu__dram_throughput.{_ELAPSED}",
        "ratio",
        "DRAM",
        "device memory, share of its peak",
        (_LIGHT, "DRAM Throughput"),
    ),
    "l2_throughput": Metric(
        f"lts__throughput.{_ELAPSED}",
        "ratio",
        "L2",
        "L2 cache, share of its peak",
        (_LIGHT, "L2 Cache Throughput"),
    ),
    "tensor_pipe": Metric(
        f"sm__pipe_tensor_cycles_active.{_ACTIVE}", "ratio", "Tensor pipe", "cycles in which the tensor cores work"
    ),
    "occupancy": Metric(
        f"sm__warps_active.{_ACTIVE}",
        "ratio",
        "Occupancy",
        "resident warps, share of what an SM can hold",
        ("Occupancy", "Achieved Occupancy"),
    ),
    "l2_hit": Metric(
        "lts__t_sector_hit_rate.pct",
        "ratio",
        "L2 hits",
        "sectors found in the L2 cache",
        ("Memory Workload Analysis", "L2 Hit Rate"),
    ),
    "dram_read": Metric("dram__bytes_read.sum", "byte", "DRAM read", "bytes read from device memory"),
    "dram_write": Metric("dram__bytes_write.sum", "byte", "DRAM written", "bytes written to device memory"),
    "tensor_flops": Metric(
        "sm__ops_path_tensor_src_bf16_dst_fp32.sum", "count", "Tensor FLOPs", "BF16 operations of the tensor cores"
    ),
    "bank_conflicts": Metric(
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
        "count",
        "Bank conflicts",
        "extra shared-memory cycles because lanes of a warp hit one bank",
    ),
    "shared_wavefronts": Metric(
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
        "count",
        "Shared-memory cycles",
        "cycles in which shared memory serves loads and stores, conflicts included",
    ),
    "l2_sectors": Metric("lts__t_sectors.sum", "count", "L2 sectors", "32-byte pieces that the L2 cache serves"),
    "issue_active": Metric(
        f"smsp__issue_active.{_ACTIVE}", "ratio", "Issue slots", "cycles in which a scheduler issues an instruction"
    ),
    "instructions": Metric("smsp__inst_executed.sum", "count", "Instructions", "of warps, all kinds"),
    "shared_loads": Metric(
        "smsp__sass_inst_executed_op_shared_ld.sum", "count", "Shared loads", "warp instructions that load from it"
    ),
    "shared_stores": Metric(
        "smsp__sass_inst_executed_op_shared_st.sum", "count", "Shared stores", "warp instructions that store to it"
    ),
    "global_loads": Metric(
        "smsp__sass_inst_executed_op_global_ld.sum", "count", "Global loads", "warp instructions, TMA not counted"
    ),
    "global_stores": Metric(
        "smsp__sass_inst_executed_op_global_st.sum", "count", "Global stores", "warp instructions, TMA not counted"
    ),
    "tma_loads": Metric(
        "smsp__inst_executed_op_tma_ld.sum", "count", "TMA loads", "tile copies that one thread asks for"
    ),
    **{f"limit_{name}": _limit(counter, words) for name, (counter, words) in _LIMITS.items()},
    "registers": Metric(
        "launch__registers_per_thread",
        "count",
        "Registers",
        "registers of a thread",
        (_LAUNCH, "Registers Per Thread"),
    ),
    "shared_memory": Metric(
        "launch__shared_mem_per_block_dynamic",
        "byte",
        "Shared memory",
        "dynamic shared memory of a CTA",
        (_LAUNCH, "Dynamic Shared Memory Per Block"),
    ),
    "waves": Metric(
        "launch__waves_per_multiprocessor",
        "count",
        "Waves",
        "how often the CTAs fill the GPU",
        (_LAUNCH, "Waves Per SM"),
    ),
    "sm_clock": Metric("sm__cycles_elapsed.avg.per_second", "count", "SM clock", "cycles a second while profiled"),
    "stall_barrier": _stall("barrier", "for other threads at a CTA barrier"),
    "stall_branch_resolving": _stall("branch_resolving", "for a branch target"),
    "stall_dispatch": _stall("dispatch_stall", "the dispatcher is held up"),
    "stall_drain": _stall("drain", "for stores to finish before exit"),
    "stall_gmma": _stall("gmma", "for a warpgroup matrix instruction"),
    "stall_imc_miss": _stall("imc_miss", "for a constant that is not in its cache"),
    "stall_lg_throttle": _stall("lg_throttle", "the queue for global memory is full"),
    "stall_long_scoreboard": _stall("long_scoreboard", "for data from global or local memory, or at an mbarrier"),
    "stall_math_pipe_throttle": _stall("math_pipe_throttle", "the arithmetic pipe is busy"),
    "stall_membar": _stall("membar", "at a memory barrier"),
    "stall_mio_throttle": _stall("mio_throttle", "the queue for shared memory and special functions is full"),
    "stall_misc": _stall("misc", "other reasons"),
    "stall_no_instruction": _stall("no_instruction", "for instructions to be fetched"),
    "stall_not_selected": _stall("not_selected", "ready, but another warp was chosen"),
    "stall_short_scoreboard": _stall("short_scoreboard", "for data from shared memory or special functions"),
    "stall_sleeping": _stall("sleeping", "in nanosleep"),
    "stall_tex_throttle": _stall("tex_throttle", "the texture queue is full"),
    "stall_wait": _stall("wait", "the fixed latency of the previous instruction"),
}
STALLS = tuple(name for name in METRICS if name.startswith("stall_"))  # warps waiting, per issued instruction
LIMITS = {f"limit_{name}": words for name, (_, words) in _LIMITS.items()}
