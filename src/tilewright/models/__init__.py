"""Where in a model: our kernels inside transformers models, and the ways to load one."""

from .patch import Kept, Replaced, Report, patch

__all__ = ["Kept", "Replaced", "Report", "patch"]
