"""Class statistics that add up: counts, means and one shared scatter, and the linear classifier they give.

Adding a class, or more examples of one, needs the statistics and the new examples, never the old ones, and
gives what one pass over all examples would have given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Moments:
    """count (E,), mean (E, F), scatter (F, F) = sum over all x of (x - mean)(x - mean)^T; all float64."""

    count: Tensor
    mean: Tensor
    scatter: Tensor

    @classmethod
    def empty(cls, classes: int, width: int) -> Moments:
        return cls(
            torch.zeros(classes, dtype=torch.float64),
            torch.zeros(classes, width, dtype=torch.float64),
            torch.zeros(width, width, dtype=torch.float64),
        )

    def add(self, label: int, x: Tensor) -> None:
        """Add examples x (N, F) float64 of class `label`, in place.

        Chan, Golub, LeVeque, Algorithms for computing the sample variance (1983): with n old and m new
        examples the scatter grows by the new examples' own and n m / (n + m) (difference of means)^2.
        """
        m = len(x)
        if m == 0:
            return
        n = float(self.count[label])
        mean = x.mean(0)
        centred = x - mean
        step = mean - self.mean[label]
        self.scatter += centred.T @ centred + (n * m / (n + m)) * torch.outer(step, step)
        self.mean[label] += step * (m / (n + m))
        self.count[label] += m

    def with_classes(self, more: int) -> Moments:
        """A copy with `more` classes without examples after the present ones."""
        width = self.mean.shape[1]
        return Moments(
            torch.cat([self.count, self.count.new_zeros(more)]),
            torch.cat([self.mean, self.mean.new_zeros(more, width)]),
            self.scatter.clone(),
        )

    def classifier(self, shrinkage: float) -> tuple[Tensor, Tensor]:
        """Linear discriminant analysis with equal priors: weight (F, E), bias (E,); scores = x weight + bias.

        The covariance is pooled and shrunk towards a multiple of the identity: (1 - s) C + s tr(C)/F I.
        """
        return self.columns(self.mean, shrinkage, float(self.count.sum()))

    def columns(self, mean: Tensor, shrinkage: float, tokens: float) -> tuple[Tensor, Tensor]:
        """As `classifier`, for class means (E, F) alone; the scatter is that of `tokens` examples."""
        pooled = self.scatter / tokens
        level = pooled.diagonal().mean().clamp(min=1e-12)
        eye = torch.eye(len(pooled), dtype=pooled.dtype)
        weight = torch.linalg.solve((1 - shrinkage) * pooled + shrinkage * level * eye, mean.T)
        return weight, -0.5 * (mean.T * weight).sum(0)

    def tensors(self) -> dict[str, Tensor]:
        """As a router file keeps them: the scatter's lower triangle, row by row, in float32."""
        rows, columns = torch.tril_indices(*self.scatter.shape)
        return {
            "statistics.count": self.count,
            "statistics.mean": self.mean,
            "statistics.scatter": self.scatter[rows, columns].float(),
        }

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor]) -> Moments:
        """The statistics that `tensors` wrote."""
        count, mean = tensors["statistics.count"].double(), tensors["statistics.mean"].double()
        width = mean.shape[1]
        rows, columns = torch.tril_indices(width, width)
        scatter = torch.zeros(width, width, dtype=torch.float64)
        scatter[rows, columns] = tensors["statistics.scatter"].double()
        scatter[columns, rows] = scatter[rows, columns]
        return cls(count.clone(), mean.clone(), scatter)
