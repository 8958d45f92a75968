"""Registration of `<op>_out` functions as torch ops.

`torch.library.Library` and not `torch.library.custom_op`: the latter costs 2 to 4 times the host time per call.
"""

from collections.abc import Callable

import torch

from .run import is_tracing

_LIBRARY = torch.library.Library("tilewright", "DEF")


def torch_op(*, mutates: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function that returns None and writes only into the arguments named by `mutates`.

    Makes `torch.ops.tilewright.<name>` for CPU and CUDA tensors, with a fake implementation (the op allocates nothing its caller sees, so there
    is nothing to infer), so that it may stand inside torch.compile(fullgraph=True), torch.export and CUDA graph capture.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, key)

        def fake(*args, **kwargs) -> None:
            if is_tracing():
                function(*args, **kwargs)

        torch.library.register_fake(f"tilewright::{name}", fake, lib=_LIBRARY)
        return getattr(torch.ops.tilewright, name).default

    return register
