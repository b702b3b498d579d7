"""Distributions of lengths and seconds, as plain data.

A law maps standard normal numbers to values by its quantile function. So
groups whose samples share part of their normal number are correlated as
strongly as asked (a Gaussian copula) while the distribution of single values
stays exactly the one that was fitted.
"""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Array = npt.NDArray[np.float64]

_GRID = np.linspace(-8.0, 8.0, 3201)
"""Standard normal numbers at which quantile functions are tabulated; between them they are interpolated."""
_POINTS = 20_000


class Law(BaseModel):
    """Base of all laws; ``cap`` censors: what would be larger is equal to it, as an answer cut at its limit is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cap: float = Field(default=math.inf, gt=0)

    def at(self, normal: Array, scale: float | Array = 1.0) -> Array:
        """Values at standard normal numbers, stretched by ``scale`` before they are capped."""
        return np.minimum(self.quantile(normal) * scale, self.cap)

    def quantile(self, normal: Array) -> Array:
        raise NotImplementedError

    def mean(self, power: int = 1, scale: float = 1.0) -> float:
        """Mean of the capped values, or of their powers."""
        density = np.exp(-(_GRID**2) / 2)
        return float(np.sum(self.at(_GRID, scale) ** power * density) / np.sum(density))


class Constant(Law):
    family: Literal["constant"] = "constant"
    value: float = Field(ge=0)

    def quantile(self, normal: Array) -> Array:
        return np.full_like(normal, self.value)


class Lognormal(Law):
    family: Literal["lognormal"]
    median: float = Field(gt=0)
    sigma: float = Field(ge=0)

    def quantile(self, normal: Array) -> Array:
        return self.median * np.exp(self.sigma * normal)


class Gamma(Law):
    family: Literal["gamma"]
    shape: float = Field(gt=0)
    scale: float = Field(gt=0)

    def quantile(self, normal: Array) -> Array:
        return np.interp(normal, _GRID, _gamma_table(self.shape)) * self.scale


class Mixture(Law):
    """``share`` of the values are of the first lognormal, the others of the second."""

    family: Literal["lognormal_mixture"]
    share: float = Field(ge=0, le=1)
    median: tuple[float, float]
    sigma: tuple[float, float]

    def quantile(self, normal: Array) -> Array:
        return np.interp(normal, _GRID, _mixture_table(self.share, self.median, self.sigma))


class Empirical(Law):
    """Values as they were measured, each as likely as the others."""

    family: Literal["empirical"]
    values: tuple[float, ...] = Field(min_length=1)

    def quantile(self, normal: Array) -> Array:
        ordered = np.sort(np.asarray(self.values))
        index = np.minimum((_below(normal) * len(ordered)).astype(int), len(ordered) - 1)
        return np.asarray(ordered[index])


def _number_is_constant(value: Any) -> Any:
    return {"family": "constant", "value": value} if isinstance(value, int | float) else value


AnyLaw = Annotated[
    Annotated[Constant | Lognormal | Gamma | Mixture | Empirical, Field(discriminator="family")],
    BeforeValidator(_number_is_constant),
]
"""A law, told apart by ``family``; a plain number is a constant."""


def _below(normal: Array) -> Array:
    """Share of a standard normal below each number."""
    return np.interp(normal, _GRID, _normal_table())


@functools.cache
def _normal_table() -> Array:
    return np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in _GRID])


@functools.cache
def _gamma_table(shape: float) -> Array:
    """Quantiles of the gamma distribution of scale 1 on the grid, from its density by the trapezoid rule."""
    x = np.geomspace(1e-9, shape + 60 * math.sqrt(shape) + 60, _POINTS)
    density = np.exp((shape - 1) * np.log(x) - x - math.lgamma(shape))
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2 * np.diff(x))])
    return np.interp(_normal_table(), below / below[-1], x)


@functools.cache
def _mixture_table(share: float, median: tuple[float, float], sigma: tuple[float, float]) -> Array:
    logs = np.linspace(
        min(math.log(m) - 8 * s for m, s in zip(median, sigma, strict=True)),
        max(math.log(m) + 8 * s for m, s in zip(median, sigma, strict=True)),
        _POINTS,
    )
    parts = [_below((logs - math.log(m)) / s) for m, s in zip(median, sigma, strict=True)]
    below = share * parts[0] + (1 - share) * parts[1]
    return np.exp(np.interp(_normal_table(), below, logs))
