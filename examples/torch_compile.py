"""Ops inside torch.compile: one graph, no break. Runs on a CPU too.

python examples/torch_compile.py
"""

import torch

import tilewright


def mlp(x: torch.Tensor, norm: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    h = tilewright.rms_norm(x, norm)
    h = tilewright.silu_mul(tilewright.matmul(h, gate, trans_b=True), tilewright.matmul(h, up, trans_b=True))
    return x + tilewright.matmul(h, down, trans_b=True)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, norm = torch.randn(16, 64, device=device), torch.ones(64, device=device)
    gate, up, down = (torch.randn(shape, device=device) * 0.1 for shape in ((96, 64), (96, 64), (64, 96)))
    with torch.inference_mode():
        compiled = torch.compile(mlp, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
        torch.testing.assert_close(compiled(x, norm, gate, up, down), mlp(x, norm, gate, up, down))
    print("one graph, the same result")


if __name__ == "__main__":
    main()
