"""Ops in a CUDA graph: captured once, replayed without Python. Needs a GPU.

python examples/cuda_graph.py
"""

import sys

import torch

import tilewright


def main() -> int:
    if not torch.cuda.is_available():
        print("a CUDA graph needs an NVIDIA GPU, got none", file=sys.stderr)
        return 2
    x, weight = torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16), torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    tilewright.rms_norm(x, weight, out=out)  # the first call compiles; a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tilewright.rms_norm(x, weight, out=out)
    x.copy_(torch.randn_like(x))  # new inputs, at the same addresses
    graph.replay()
    torch.testing.assert_close(out, tilewright.rms_norm(x, weight))
    print("replayed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
