#!/usr/bin/env python3
"""Two threads compile a function of plain torch, nothing of this package: torch 2.11.0 ends with a
segmentation fault in its compiler (torch/_subclasses/fake_tensor.py, called by torch/_dynamo).

python3 tests/python/compile_on_threads.py [BACKEND]
"""

import faulthandler
import sys
import threading

import torch

EXPERTS, TOKENS, TOPK, HIDDEN = 3, 5, 3, 8
together = threading.Barrier(2)


def rank(number: int, backend: str) -> None:
    draw = torch.Generator().manual_seed(number)
    wide = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=draw)

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = x.repeat_interleave(TOPK, 0)
        out = torch.stack([rows @ wide[i] for i in range(EXPERTS)]).sum(0)
        return (out.view(TOKENS, TOPK, -1) * weights.unsqueeze(-1)).sum(1)

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=False)
    x = torch.randn(TOKENS, HIDDEN, generator=draw).requires_grad_()
    weights = torch.rand(TOKENS, TOPK, generator=draw)
    layer(x, weights).sum().backward()
    together.wait()
    compiled(x, weights).sum().backward()


if __name__ == "__main__":
    faulthandler.enable()
    asked = sys.argv[1] if len(sys.argv) > 1 else "aot_eager"
    threads = [threading.Thread(target=rank, args=(number, asked)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"torch {torch.__version__}: no crash this time")
