"""Small tensors that never change, made once."""

from __future__ import annotations

import torch

from trefoil.on_device import wait_for_stream

Tensor = torch.Tensor
LEAST = 1024  # numbers; a power of two


class Fixed:
    """On the device of a buffer, for every stream there. one, zero, nobody (-1): int32 [1]; ranks:
    int32 [R], 0 to R - 1."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        self.device = device
        self.ranks = torch.arange(num_ranks, dtype=torch.int32, device=device)
        self.zero, self.one, self.nobody = (
            torch.full((1,), value, dtype=torch.int32, device=device) for value in (0, 1, -1)
        )
        self._numbers = torch.empty(0, dtype=torch.int32, device=device)
        wait_for_stream(device)

    def numbers(self, count: int) -> Tensor:
        """int32 [count], 0 to count - 1. Waits where there were never so many before."""
        if count > len(self._numbers):
            most = max(LEAST, 1 << (count - 1).bit_length())
            self._numbers = torch.arange(most, dtype=torch.int32, device=self.device)
            wait_for_stream(self.device)
        return self._numbers[:count]
