"""Module-level compositions of kernels, and the registry of fusions."""

from voxfuse.fusions.registry import FUSIONS, fusion

__all__ = ["FUSIONS", "fusion"]
