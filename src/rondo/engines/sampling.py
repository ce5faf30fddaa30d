"""Drawing tokens: pure functions of logits, seed and step.

One uniform number per (seed, step), made by a counter-based hash, selects the token by inverse CDF. So a
sample depends on its own seed, step and logits row only: not on its batch mates, its slot or what was drawn
before.

Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """What one row each asks for. Arrays of equal length S, on the host."""

    seeds: NDArray[np.uint64]
    steps: NDArray[np.int64]  # tokens drawn before this one
    temperatures: NDArray[np.float32]  # 0: the most probable token
    top_ps: NDArray[np.float32]  # 1: the whole vocabulary


def uniforms(seeds: NDArray[np.uint64], steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row: splitmix64 at place `step`, from a seed that is mixed first.

    Mixing the seed matters: samples of a group use neighbouring seeds, and unmixed they would be the same
    stream, shifted.
    """
    state = _mix(seeds + _GAMMA)
    bits = _mix(state + (steps.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits_SV: torch.Tensor, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [S] and their log-probs [S] under the distribution drawn from.

    That distribution is softmax(logits / temperature), renormalised after top_p. At temperature 0 the token
    is the argmax and its log-prob that of softmax(logits).
    """
    greedy_S = draws.temperatures == 0
    probs_SV = _probabilities(logits_SV, draws, greedy_S)
    tokens_S1 = inverse_cdf(probs_SV, uniforms(draws.seeds, draws.steps)).unsqueeze(-1)
    if greedy_S.any():
        greedy_S1 = torch.from_numpy(greedy_S).to(logits_SV.device).unsqueeze(-1)
        tokens_S1 = torch.where(greedy_S1, probs_SV.argmax(-1, keepdim=True), tokens_S1)
    return tokens_S1.squeeze(-1), probs_SV.gather(-1, tokens_S1).squeeze(-1).log()


def inverse_cdf(probs_SV: torch.Tensor, u_S: NDArray[np.float64]) -> torch.Tensor:
    """Per row the first token at which the cumulated probability exceeds u; never one of probability zero."""
    cdf_SV = probs_SV.cumsum(-1, dtype=torch.float64)
    total_S1 = cdf_SV[:, -1:]
    u_S1 = torch.from_numpy(u_S).to(probs_SV.device).unsqueeze(-1)
    # Strictly below the total, which a u near 1 would round to: there is always a token beyond it.
    target_S1 = torch.minimum(u_S1 * total_S1, total_S1.nextafter(torch.zeros_like(total_S1)))
    tokens_S1 = torch.searchsorted(cdf_SV, target_S1, right=True)
    # NaN finds no place; the NaN of its log-prob tells.
    return tokens_S1.clamp_(max=probs_SV.shape[-1] - 1).squeeze(-1)


def _probabilities(logits_SV: torch.Tensor, draws: Draws, greedy_S: NDArray[np.bool_]) -> torch.Tensor:
    temperatures = np.where(greedy_S, np.float32(1), draws.temperatures)
    if (temperatures != 1).any():
        logits_SV = logits_SV / torch.from_numpy(temperatures).to(logits_SV.device).unsqueeze(-1)
    probs_SV = logits_SV.softmax(-1)
    top_ps = np.where(greedy_S, np.float32(1), draws.top_ps)
    if (top_ps < 1).any():
        probs_SV = _nucleus(probs_SV, torch.from_numpy(top_ps).to(logits_SV.device).unsqueeze(-1))
    return probs_SV


def _nucleus(probs_SV: torch.Tensor, top_p_S1: torch.Tensor) -> torch.Tensor:
    """The fewest most probable tokens whose mass reaches top_p, renormalised; rows at 1 keep their bits."""
    sorted_SV, order_SV = probs_SV.sort(stable=True, dim=-1, descending=True)
    before_SV = sorted_SV.cumsum(-1, dtype=torch.float64) - sorted_SV
    kept_SV = torch.zeros_like(probs_SV).scatter(-1, order_SV, sorted_SV * (before_SV < top_p_S1))
    return torch.where(top_p_S1 < 1, kept_SV / kept_SV.sum(-1, keepdim=True), probs_SV)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
