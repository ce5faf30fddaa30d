"""Drawing tokens. Shapes: S rows, V vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rondo.engines.sampling import Draws, inverse_cdf, sample, uniforms


def draws(
    seeds: list[int] | np.ndarray,
    steps: int | np.ndarray = 0,
    temperature: float | list[float] = 1.0,
    top_p: float | list[float] = 1.0,
) -> Draws:
    count = len(seeds)
    return Draws(
        seeds=np.asarray(seeds, np.uint64),
        steps=np.broadcast_to(np.asarray(steps, np.int64), count),
        temperatures=np.broadcast_to(np.asarray(temperature, np.float32), count),
        top_ps=np.broadcast_to(np.asarray(top_p, np.float32), count),
    )


def some_logits(rows: int, vocabulary: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + vocabulary)
    return torch.randn(rows, vocabulary, generator=generator) * 2


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("over", ["seeds", "steps"])
def test_frequencies_match_the_softmax(temperature: float, over: str) -> None:
    count = 60_000
    logits_V = some_logits(1, 20)[0]
    varying = np.arange(count)
    asked = draws(varying if over == "seeds" else np.full(count, 7), varying if over == "steps" else 3, temperature)
    tokens, _ = sample(logits_V.expand(count, -1), asked)
    expected = (logits_V.double() / temperature).softmax(-1).numpy() * count
    got = np.bincount(tokens.numpy(), minlength=20)
    chi_square = ((got - expected) ** 2 / expected).sum()
    assert chi_square < 50  # 19 degrees of freedom: exceeded once in 8,000 when the two agree


def test_logps_are_those_of_the_distribution_drawn_from() -> None:
    logits_SV = some_logits(64, 300)
    temperatures = [0.3 + 0.05 * row for row in range(64)]
    tokens, logps = sample(logits_SV, draws(list(range(64)), temperature=temperatures))
    expected_SV = (logits_SV.double() / torch.tensor(temperatures).unsqueeze(-1)).log_softmax(-1)
    torch.testing.assert_close(
        logps.double(), expected_SV.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), atol=2e-6, rtol=0
    )


def test_a_row_does_not_depend_on_its_mates() -> None:
    logits_SV = some_logits(40, 257)
    temperatures = [0.0 if row % 7 == 0 else 0.5 + row / 40 for row in range(40)]
    top_ps = [0.6 if row % 3 == 0 else 1.0 for row in range(40)]
    together = sample(logits_SV, draws(list(range(40)), np.arange(40), temperature=temperatures, top_p=top_ps))
    for row in range(40):
        alone = sample(logits_SV[row : row + 1], draws([row], row, temperature=temperatures[row], top_p=top_ps[row]))
        assert together[0][row] == alone[0][0]
        assert together[1][row] == alone[1][0]


def test_neighbouring_seeds_and_steps_are_uncorrelated() -> None:
    count = 100_000
    numbers = np.arange(count)
    by_seed = uniforms(numbers.astype(np.uint64), np.zeros(count, np.int64))
    by_step = uniforms(np.zeros(count, np.uint64), numbers)
    next_step = uniforms(numbers.astype(np.uint64), np.ones(count, np.int64))
    for left, right in [
        (by_seed[1:], by_seed[:-1]),
        (by_step[1:], by_step[:-1]),
        (by_seed, next_step),
        (by_seed[1:], next_step[:-1]),
    ]:
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.016  # five deviations
    for numbers_ in (by_seed, by_step):
        assert abs(numbers_.mean() - 0.5) < 0.005
        assert numbers_.min() >= 0
        assert numbers_.max() < 1


def test_a_seed_is_not_another_seeds_stream_shifted() -> None:
    steps = np.arange(1000, dtype=np.int64)
    streams = [set(uniforms(np.full(1000, seed, np.uint64), steps).tolist()) for seed in range(20)]
    assert len(set.union(*streams)) == 20 * 1000


def test_all_62_bits_of_a_seed_count() -> None:
    seeds = np.asarray([1 << bit for bit in range(62)], np.uint64)
    assert len(set(uniforms(seeds, np.zeros(62, np.int64)).tolist())) == 62


def test_numbers_stay_as_they_are() -> None:
    """Runs are reproduced by seed: a changed hash would silently change every recorded run."""
    got = uniforms(np.asarray([0, 1, 2**62 - 1], np.uint64), np.asarray([0, 5, 1_000_000]))
    assert got.tolist() == [0.6524484863740322, 0.7743991716672016, 0.6723797772166556]


def test_temperature_zero_takes_the_most_probable_token() -> None:
    logits_SV = some_logits(16, 100)
    tokens, logps = sample(logits_SV, draws(list(range(16)), temperature=0.0, top_p=0.5))
    assert torch.equal(tokens, logits_SV.argmax(-1))
    torch.testing.assert_close(logps, logits_SV.log_softmax(-1).amax(-1))


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass(top_p: float) -> None:
    count = 20_000
    logits_V = some_logits(1, 30)[0]
    tokens, logps = sample(logits_V.expand(count, -1), draws(np.arange(count), top_p=top_p))
    probs, order = logits_V.double().softmax(-1).sort(descending=True)
    kept = int((probs.cumsum(-1) < top_p).sum()) + 1
    assert set(tokens.tolist()) == set(order[:kept].tolist())
    expected_V = torch.full((30,), float("nan"), dtype=torch.float64)
    expected_V[order[:kept]] = (probs[:kept] / probs[:kept].sum()).log()
    torch.testing.assert_close(logps.double(), expected_V[tokens], atol=2e-6, rtol=0)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits_SV = torch.full((5000, 50), float("-inf"))
    logits_SV[:, 10:13] = 0.0
    tokens, logps = sample(logits_SV, draws(np.arange(5000)))
    assert set(tokens.tolist()) == {10, 11, 12}
    assert torch.isfinite(logps).all()


def test_the_ends_of_the_unit_interval_meet_the_first_and_the_last_possible_token() -> None:
    probs_SV = torch.tensor([[0.0, 0.0, 0.3, 0.0, 0.7, 0.0]]).expand(2, -1)
    assert inverse_cdf(probs_SV, np.asarray([0.0, 1 - 2.0**-53])).tolist() == [2, 4]


def test_nan_logits_are_told_by_their_logp() -> None:
    tokens, logps = sample(torch.full((2, 8), float("nan")), draws([1, 2]))
    assert tokens.max() < 8
    assert logps.isnan().all()
