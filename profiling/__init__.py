"""Measures the variants: correctness, latency, Nsight Compute and Nsight Systems, all into one tidy table."""
