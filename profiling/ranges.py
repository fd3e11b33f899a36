"""The NVTX ranges by which profiles are joined to the benchmark: variant/case/phase, in a domain of our own."""

DOMAIN = "gdn"
PHASES = ("preprocess", "core")  # a range each, in this order


def range_name(variant: str, case: str, phase: str) -> str:
    """The name of one phase's range."""
    return f"{variant}/{case}/{phase}"
