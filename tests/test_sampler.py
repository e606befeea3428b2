"""The sampler: what is drawn, how often, and that it depends on its own row alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minilora.config import SamplingParams
from minilora.engine import exact, sampler
from minilora.engine.sampler import SampledToken, SamplingRow, make_rng, sample

INF = math.inf


def row(seed: int = 0, *, prompt: Sequence[int] = (), output: Sequence[int] = (),
        banned: Sequence[int] = (), **params: Any) -> SamplingRow:  # fmt: skip
    return SamplingRow(SamplingParams(**params), prompt, output, make_rng(seed), banned)


def ids(tokens: Sequence[SampledToken]) -> list[int]:
    return [token.token_id for token in tokens]


def processed(logits: np.ndarray, one: SamplingRow) -> np.ndarray:
    """Bans and penalty, in float32 as the sampler does them."""
    scores = logits.astype(np.float32).copy()
    scores[list(one.banned_token_ids)] = -INF
    penalty = np.float32(one.params.repetition_penalty)
    for token in {*one.prompt_token_ids, *one.output_token_ids}:
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    return scores


def reference(logits: np.ndarray, one: SamplingRow) -> np.ndarray:
    """The distribution of a random row, by sorting and float64 softmax."""
    params = one.params
    scores = processed(logits, one).astype(np.float64) / params.temperature
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    probs[probs < params.min_p * probs.max()] = 0.0
    if 0 < params.top_k < len(probs):
        probs[scores < np.sort(scores)[-params.top_k]] = 0.0
    order = np.lexsort((np.arange(len(probs)), -scores))  # by score, equal ones by id
    total = probs.sum()
    before = 0.0
    for token in order:
        if before >= params.top_p * total and params.top_p < 1.0:
            probs[token] = 0.0
        else:
            before += probs[token]
    return probs / probs.sum()


class FixedDraws:
    """In place of a generator: gives the numbers it is told to."""

    def __init__(self, *numbers: float) -> None:
        self._numbers: Iterator[float] = iter(numbers)

    def random(self) -> float:
        return next(self._numbers)


# ---- greedy


def test_greedy_takes_the_most_likely_and_the_lowest_id_of_equal_ones() -> None:
    vocab = 5000
    logits = torch.full((4, vocab), -3.0)
    logits[0, [4999, 17, 2500]] = 1.0
    logits[1, :] = 0.5
    logits[2, 4999] = 2.0
    logits[3, 7], logits[3, 9] = -0.0, 0.0  # equal as numbers
    assert ids(sample(logits, [row(temperature=0.0)] * 4)) == [17, 0, 4999, 7]
    mixed = [row(temperature=0.0), row(), row(temperature=0.0), row(temperature=0.0)]
    assert [ids(sample(logits, mixed))[i] for i in (0, 2, 3)] == [17, 4999, 7]


def test_a_greedy_step_reads_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name,
            lambda self, *a, _plain=plain, _name=name: reads.append(_name) or _plain(self, *a),
        )  # fmt: skip
    logits = torch.randn(3, 50)
    logits[1, 3] = math.nan
    assert ids(sample(logits, [row(temperature=0.0)] * 3))[1] == -1
    assert reads == ["tolist"]


def test_no_rows() -> None:
    assert sample(torch.empty(0, 8), []) == []


def test_logits_are_not_changed() -> None:
    logits = torch.randn(3, 40)
    before = logits.clone()
    everything = row(
        prompt=[1, 2], banned=[3], repetition_penalty=2.0, min_p=0.1, top_k=5, top_p=0.5, logprobs=3
    )
    sample(logits, [everything, row(temperature=0.0), row(temperature=0.0, banned=[1])])
    assert torch.equal(logits, before)


# ---- bans and penalty


def test_repetition_penalty_counts_each_token_of_prompt_and_answer_once() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.4]])
    assert ids(sample(logits, [row(temperature=0.0, repetition_penalty=1.2)])) == [0]
    seen = row(temperature=0.0, prompt=[0, 0, 0], repetition_penalty=1.2)  # 2 / 1.2 > 1.5
    assert ids(sample(logits, [seen])) == [0]
    seen = row(temperature=0.0, output=[0], repetition_penalty=1.4)  # 2 / 1.4 < 1.5
    assert ids(sample(logits, [seen])) == [1]
    negative = row(temperature=0.0, prompt=[2], repetition_penalty=1.5, banned=[0, 1])
    assert ids(sample(logits, [negative])) == [3]  # -1 x 1.5 < -1.4
    untouched = [row(temperature=0.0), row(temperature=0.0, prompt=[0], repetition_penalty=9.0)]
    assert ids(sample(logits.repeat(2, 1), untouched)) == [0, 1]


def test_penalty_equals_that_of_transformers() -> None:
    process = pytest.importorskip("transformers").RepetitionPenaltyLogitsProcessor(1.37)
    logits = torch.randn(8, 500)
    seen = torch.randint(0, 500, (8, 60))
    rows = [
        row(prompt=some[:40].tolist(), output=some[40:].tolist(), repetition_penalty=1.37)
        for some in seen
    ]
    assert torch.equal(sampler._penalised(logits, rows), process(seen, logits.clone()))


def test_a_ban_on_an_unknown_id_is_no_ban() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    assert ids(sample(logits, [row(temperature=0.0, banned=[2, 3, 2**31 - 1])])) == [1]


# ---- rows without a number to stand on


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("extra", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.5}])
def test_rows_that_are_not_finite_are_flagged_and_leave_others_alone(
    temperature: float, extra: dict[str, float]
) -> None:
    good = torch.randn(5, 300)
    rows = [row(i, temperature=temperature, logprobs=1, **extra) for i in range(5)]
    alone = [
        sample(good[i : i + 1], [replace(rows[i], rng=make_rng(i))])[0] for i in range(0, 5, 4)
    ]
    bad = good.clone()
    bad[1, 7], bad[2, 9], bad[3] = math.nan, INF, -INF
    tokens = sample(bad, rows)
    assert tokens[1:4] == [SampledToken(-1, None, False)] * 3
    assert [tokens[0], tokens[4]] == alone
    assert all(token.finite for token in alone)


def test_a_ban_does_not_hide_a_nan_and_banning_all_tokens_leaves_none() -> None:
    logits = torch.tensor([[1.0, math.nan], [1.0, 2.0], [1.0, -INF], [-INF, 1.0]])
    rows = [row(banned=[1]), row(banned=[0, 1]), row(banned=[0]), row(banned=[0])]
    assert ids(sample(logits, rows)) == [-1, -1, -1, 1]


# ---- the draw

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "min_p": {"min_p": 0.12},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "top_p_low": {"top_p": 0.05},
    "all": {"temperature": 1.7, "min_p": 0.03, "top_k": 20, "top_p": 0.85},
    "penalty": {"repetition_penalty": 1.6, "top_p": 0.9},
}


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """The statistic in standard deviations from its mean, over the tokens expected 5 times."""
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    return float((((observed - wanted) ** 2 / wanted).sum() - freedom) / math.sqrt(2 * freedom))


def draw_often(logits: np.ndarray, one: SamplingRow, count: int) -> np.ndarray:
    rows = [replace(one, rng=make_rng(seed)) for seed in range(count)]
    tokens = ids(sample(torch.from_numpy(logits).expand(count, -1), rows))
    return np.bincount(tokens, minlength=len(logits))


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_follow_the_distribution(name: str) -> None:
    logits = np.random.default_rng(3).normal(size=60, scale=1.5).astype(np.float32)
    one = row(**SETTINGS[name], prompt=[5, 6], output=[7, 6], banned=[11])
    counts = draw_often(logits, one, 10_000)
    expected = 10_000 * reference(logits, one)
    assert not counts[expected == 0].any()
    assert chi_square(counts, expected) < 4.5


def test_chi_square_sees_a_slightly_wrong_distribution() -> None:
    logits = np.random.default_rng(3).normal(size=60, scale=1.5).astype(np.float32)
    counts = draw_often(logits, row(temperature=1.15), 10_000)
    assert chi_square(counts, 10_000 * reference(logits, row())) > 6


def test_one_generator_gives_one_number_a_token() -> None:
    """So a request's stream is that of its seed, however its tokens were batched."""
    one = row(5, top_p=0.9)
    for _ in range(3):
        sample(torch.randn(1, 30), [one])
    fresh = make_rng(5)
    fresh.random(3)
    assert one.rng.random() == fresh.random()
    assert make_rng(5).random() == np.random.default_rng(5).random()


@pytest.mark.parametrize("number", [0.0, 2.0**-53, 0.5, 1.0 - 2.0**-53])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_ends_of_the_uniform_range_give_possible_tokens(number: float, name: str) -> None:
    logits = np.random.default_rng(4).normal(size=(40, 2000), scale=4).astype(np.float32)
    logits[:, [0, -1]] = -INF  # impossible at both ends
    logits[20:, 1000:] = -INF
    rows = [
        SamplingRow(SamplingParams(**SETTINGS[name]), [], [], FixedDraws(number))  # type: ignore[arg-type]
        for _ in logits
    ]
    for token, scores, one in zip(
        sample(torch.from_numpy(logits), rows), logits, rows, strict=True
    ):
        assert reference(scores, one)[token.token_id] > 0


def test_temperatures_near_zero_and_huge_logits() -> None:
    logits = torch.tensor([[3.0e38, 3.1e38, -3.0e38], [-1e-30, -2e-30, -3e-30]])
    rows = [row(temperature=1e-300), row(temperature=1e-40)]
    assert ids(sample(logits, rows)) == [1, 0]


def test_tokens_equal_to_the_kth_stay_and_top_p_prefers_the_lower_id() -> None:
    logits = np.array([0.0, 1.0, 0.0, 1.0, 1.0, -1.0], np.float32)
    assert np.flatnonzero(draw_often(logits, row(top_k=2), 500)).tolist() == [1, 3, 4]
    assert np.flatnonzero(draw_often(logits, row(top_p=0.3), 500)).tolist() == [1, 3]


# ---- one row, whatever else is in the batch


def many_rows(count: int) -> list[SamplingRow]:
    kinds = [*SETTINGS.values(), {"temperature": 0.0}, {"logprobs": 3}]
    return [
        row(i, **kinds[i % len(kinds)], prompt=[i % 90], banned=[i % 7] if i % 3 else [])
        for i in range(count)
    ]


@pytest.mark.parametrize("vocab", [97, 4099, 40_001])
@pytest.mark.parametrize("scale", [0.1, 5.0])
def test_a_seeded_row_gets_the_same_token_in_every_batch(
    vocab: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(vocab)
    count = 33
    logits = torch.randn(count, vocab) * scale

    def fresh(order: Sequence[int]) -> list[SampledToken]:
        rows = many_rows(count)
        tokens = sample(logits[list(order)], [rows[i] for i in order])
        return [
            token for _, token in sorted(zip(order, tokens, strict=True), key=lambda pair: pair[0])
        ]

    alone = [fresh([i])[0] for i in range(count)]
    order = np.random.default_rng(0).permutation(count).tolist()
    assert fresh(range(count)) == alone
    assert fresh(order) == alone
    for part in (order[:5], order[7:24]):
        assert fresh(part) == [alone[i] for i in sorted(part)]
    strided = torch.empty(count, vocab + 3)[:, 1:-2].copy_(logits)
    assert sample(strided, many_rows(count)) == alone
    monkeypatch.setattr(exact, "_MOST_CELLS_CPU", 3 * vocab)
    monkeypatch.setattr(sampler, "_NUCLEUS_GUESS", 2)
    assert fresh(range(count)) == alone


def test_weights_of_a_row_do_not_depend_on_its_place() -> None:
    """The step that must be exact: `exp` on vectors, and on what is left over of them."""
    likelihood = exact.likelihood(torch.randn(7, 40_003) * 5, 1.0)
    scores = likelihood.log().float()
    whole = exact.weights(exact.likelihood(scores, 0.7))
    for i in range(7):
        assert torch.equal(exact.weights(exact.likelihood(scores[i : i + 1], 0.7))[0], whole[i])


def test_weights_cannot_overflow() -> None:
    for vocab in (1, 2, 1000, 1 << 17, 1 << 20):
        total = int(exact.weights(torch.ones(1, vocab, dtype=torch.float64)).sum())
        assert 2**60 <= total <= 2**62
    assert not exact.weights(torch.full((1, 3), math.nan)).any()


# ---- properties

NUMBERS = st.floats(-20, 20, width=32) | st.sampled_from([-INF, 0.0, -0.0, 1.0])
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 5.0]),
        "top_k": st.integers(-1, 12),
        "top_p": st.sampled_from([0.01, 0.5, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.8, 1.5]),
    }
)
TOKENS = st.lists(st.integers(0, 9), max_size=4)
ROWS = st.tuples(st.lists(NUMBERS, min_size=10, max_size=10), PARAMS, TOKENS, TOKENS)


@settings(max_examples=300, deadline=None)
@given(rows=st.lists(ROWS, min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_only_possible_tokens_are_chosen(rows: list[Any], seed: int) -> None:
    logits = np.array([numbers for numbers, *_ in rows], np.float32)
    asked = [
        row(seed + i, prompt=prompt, banned=banned, **params)
        for i, (_, params, prompt, banned) in enumerate(rows)
    ]
    for token, scores, one in zip(
        sample(torch.from_numpy(logits), asked), logits, asked, strict=True
    ):
        left = processed(scores, one)
        if (left == -INF).all():
            assert token == SampledToken(-1, None, False)
        elif one.params.greedy:
            assert token.token_id == int(left.argmax())
        else:
            assert token.token_id not in one.banned_token_ids
            # A little more room than asked for: sums may round to either side of top_p.
            room = min(1.0, one.params.top_p + 1e-9)
            wider = replace(one, params=replace_params(one.params, top_p=room))
            assert reference(scores, wider)[token.token_id] > 0


def replace_params(params: SamplingParams, **changes: Any) -> SamplingParams:
    kept = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return SamplingParams(**{**{name: getattr(params, name) for name in kept}, **changes})


# ---- log probabilities


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(3, 1000) * 4
    exact = logits.double().log_softmax(-1)
    rows = [
        row(1, temperature=5.0, top_k=700, logprobs=4, banned=[int(logits[0].argmax())]),
        row(2, logprobs=0),
        row(3),
    ]
    tokens = sample(logits, rows)
    assert tokens[2].logprobs is None
    for i, count in ((0, 4), (1, 0)):
        found, token = tokens[i].logprobs, tokens[i].token_id
        assert found is not None
        top = exact[i].topk(count)
        assert set(found) == {token, *top.indices.tolist()}
        assert next(iter(found)) == token  # first, as in vLLM
        assert found[token].rank == int((exact[i] > exact[i, token]).sum()) + 1
        assert [found[t].rank for t in top.indices.tolist()] == list(range(1, count + 1))
        for t, entry in found.items():
            assert entry.logprob == pytest.approx(float(exact[i, t]), abs=1e-7)
            assert entry.decoded_token is None


def test_equal_tokens_rank_by_id_and_more_than_the_vocabulary_is_all_of_it() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, -INF], [0.0, 0.0, 0.0, 0.0]])
    found = sample(logits, [row(temperature=0.0, logprobs=2), row(temperature=0.0, logprobs=99)])
    first, second = found[0].logprobs, found[1].logprobs
    assert first is not None
    assert second is not None
    assert {token: entry.rank for token, entry in first.items()} == {1: 1, 2: 2}
    assert {token: entry.rank for token, entry in second.items()} == {0: 1, 1: 2, 2: 3, 3: 4}
    assert second[3].logprob == pytest.approx(-math.log(4), abs=1e-12)
    impossible = sample(logits[:1], [row(temperature=0.0, logprobs=4)])[0].logprobs
    assert impossible is not None
    assert impossible[3].logprob == -INF


def test_order_is_that_of_the_numbers() -> None:
    values = torch.tensor([[-INF, -1e38, -2.0, -1e-45, -0.0, 0.0, 1e-45, 2.0, 1e38, INF]])
    order = exact.order(values)[0].tolist()
    assert order[4] > order[5]  # equal numbers: the lower id first
    order[4], order[5] = order[5], order[4]
    assert order == sorted(order)
