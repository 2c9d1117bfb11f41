"""Ridge regression from sums over batches, none of which is kept.

Shapes: N rows of a batch, I inputs (one more with a bias), O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor


@dataclass
class NormalEquations:
    """What a least-squares problem needs of its rows, which have a column of ones behind them. float64"""

    xx: Tensor  # [I, I]
    xy: Tensor  # [I, O]
    y: Tensor  # [O]
    yy: Tensor  # [O]
    count: int = 0

    @classmethod
    def zeros(cls, inputs: int, outputs: int, device: torch.device) -> Self:
        """Of no rows yet, with so many inputs beside the bias."""
        inputs += 1
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        return cls(torch.zeros(inputs, inputs, **options), torch.zeros(inputs, outputs, **options),
                   torch.zeros(outputs, **options), torch.zeros(outputs, **options))  # fmt: skip

    def add(self, x: Tensor, y: Tensor) -> None:
        """Rows [N, I] without the bias, and what is wanted of them [N, O]."""
        x, y = torch.nn.functional.pad(x.double(), (0, 1), value=1.0), y.double()
        self.xx += x.T @ x
        self.xy += x.T @ y
        self.y += y.sum(0)
        self.yy += y.pow(2).sum(0)
        self.count += len(x)

    def solve(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Weights [I, O], the bias last, and R2 of every output [O]. `ridge` is the penalty on weights."""
        penalty = torch.full_like(self.xx.diagonal(), ridge)
        penalty[-1] = 0.0
        solution = torch.linalg.solve(self.xx + penalty.diag(), self.xy)
        residual = self.yy - 2 * (solution * self.xy).sum(0) + (solution * (self.xx @ solution)).sum(0)
        spread = (self.yy - self.y.pow(2) / self.count).clamp_min(1e-12)
        return solution, 1 - residual / spread
