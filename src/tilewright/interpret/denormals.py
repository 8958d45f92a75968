"""Numbers below the smallest normal one, which a program may have told its processor to flush.

A GPU keeps them whatever `torch.set_flush_denormal` says. Some kernels need them: an e2m1 code is
an fp32 number times 2**-126.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LEAST_NORMAL = sys.float_info.min


@contextmanager
def denormals_kept() -> Iterator[None]:
    """Inside, results do not depend on `torch.set_flush_denormal(True)` in this thread."""
    if LEAST_NORMAL * 0.5 != 0.0:  # torch has no question for it
        yield
        return
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)
