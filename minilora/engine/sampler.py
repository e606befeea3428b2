"""`sample`: choose one token for each row of logits.

The steps and their order are those of vLLM's V1 sampler (`vllm/v1/sample/sampler.py` and
`vllm/v1/sample/ops/topk_topp_sampler.py`): log probabilities of the raw logits; banned tokens;
repetition penalty; greedy rows take the most likely token; the others temperature, min_p,
top_k, top_p over what top_k left, and a draw.

What a row gets depends on that row alone, bit for bit; `minilora.engine.exact` says how.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minilora.config.sampling import SamplingParams
from minilora.engine import exact

_NUCLEUS_GUESS = 256  # tokens looked at first for top_p


@dataclass
class SamplingRow:
    """What one row of logits needs.

    Attributes:
        rng: gives one uniform number for each token drawn, so that a seeded row never depends
            on its neighbours. Greedy rows leave it alone.
        banned_token_ids: tokens that cannot be chosen now.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    rng: np.random.Generator
    banned_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Logprob:
    """One token's log probability under the raw logits (fields as in vLLM).

    Attributes:
        logprob: natural logarithm.
        rank: 1 is the most likely token; of equal ones the lower id comes first.
        decoded_token: the token's text, where somebody with a tokenizer filled it in.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class SampledToken:
    """The outcome for one row.

    Attributes:
        token_id: -1 where no token could be chosen.
        logprobs: the sampled token and the most likely ones, if the row asked for them.
        finite: False where the logits had a NaN or +inf, or left no token to choose.
    """

    token_id: int
    logprobs: dict[int, Logprob] | None
    finite: bool


def make_rng(seed: int | Sequence[int]) -> np.random.Generator:
    """Return the generator of a request's draws; NumPy keeps the stream of PCG64 the same."""
    return np.random.Generator(np.random.PCG64(seed))


class Drawn:
    """Tokens that the device has chosen and that are on their way to the host.

    Attributes:
        token_ids: int64 ``[R]`` on the device; -1 where no token could be chosen.
    """

    def __init__(self, token_ids: torch.Tensor) -> None:
        self.token_ids = token_ids
        self._host, self._arrived = token_ids, None
        if token_ids.is_cuda:
            self._host = torch.empty(len(token_ids), dtype=torch.int64, pin_memory=True)
            self._host.copy_(token_ids, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> list[int]:
        """Return the ids, once they have arrived; ids and flags of failure travel together."""
        if self._arrived is not None:
            self._arrived.synchronize()
        ids: list[int] = self._host.tolist()
        return ids


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Choose a token for every row, and wait for them.

    Args:
        logits: [R, vocab] float32, on any device; not changed.
        rows: one a row of `logits`.
    """
    return collect(logits, rows, draw(logits, rows))


@torch.no_grad()
def draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> Drawn:
    """Choose a token for every row on the device; arguments are those of `sample`.

    A greedy step waits for nothing here.
    """
    if not rows:
        return Drawn(torch.empty(0, dtype=torch.int64))
    scores = _without_banned(logits, rows)
    scores = _penalised(scores, rows)
    best, token_ids = scores.max(dim=-1)  # [R]; of equal ones the lowest id, as torch promises
    finite = torch.isfinite(best)
    if scores is not logits:
        finite &= torch.isfinite(logits.amax(dim=-1))  # a ban may have covered a NaN
    drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        token_ids[drawn] = _draw(scores[drawn], [rows[index] for index in drawn])
    return Drawn(torch.where(finite, token_ids, -1))


@torch.no_grad()
def collect(
    logits: torch.Tensor | None, rows: Sequence[SamplingRow], drawn: Drawn
) -> list[SampledToken]:
    """Wait for what `draw` chose, and add the log probabilities that rows asked for.

    `logits` may be None if no row did.
    """
    ids = drawn.wait()
    logprobs = {} if logits is None else _logprobs(logits, rows, ids)
    return [SampledToken(token, logprobs.get(i), token >= 0) for i, token in enumerate(ids)]


def _without_banned(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    if not any(row.banned_token_ids for row in rows):
        return logits
    banned = _mask([row.banned_token_ids for row in rows], logits)
    return logits.masked_fill(banned, -math.inf)


def _penalised(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Apply the repetition penalty of CTRL (arXiv:1909.05858) once to each token seen."""
    where = [i for i, row in enumerate(rows) if row.params.repetition_penalty != 1.0]
    if not where:
        return scores
    seen = _mask([[*rows[i].prompt_token_ids, *rows[i].output_token_ids] for i in where], scores)
    penalties = [[rows[i].params.repetition_penalty] for i in where]
    penalty = torch.tensor(penalties, dtype=scores.dtype, device=scores.device)  # [P, 1]
    old = scores[where]
    new = torch.where(old > 0, old / penalty, old * penalty)
    scores = scores.clone()
    scores[where] = torch.where(seen, new, old)
    return scores


def _mask(token_ids: Sequence[Sequence[int]], like: torch.Tensor) -> torch.Tensor:
    """Return bool [rows, vocab], true at each row's tokens; ids outside the vocabulary are none."""
    vocab = like.shape[-1]
    rows = np.repeat(np.arange(len(token_ids)), [len(ids) for ids in token_ids])
    columns = np.fromiter(itertools.chain.from_iterable(token_ids), np.int64)
    known = (columns >= 0) & (columns < vocab)
    cells = torch.from_numpy(rows[known] * vocab + columns[known]).to(like.device)
    mask = torch.zeros(len(token_ids) * vocab, dtype=torch.bool, device=like.device)
    mask[cells] = True
    return mask.view(len(token_ids), vocab)


# ---- the draw


def _draw(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    parts = [_draw_chunk(scores[part], rows[part]) for part in exact.chunks(len(rows), scores)]
    return torch.cat(parts)


def _draw_chunk(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Draw from each row's filtered distribution by inverting its cumulative sum.

    The target lies in ``0..total-1`` and the first sum above it belongs to a token of weight
    1 or more, so that a filtered token cannot be drawn, whatever the uniform number.
    """
    settings = [
        [row.params.temperature, row.params.min_p, row.params.top_p, row.rng.random()]
        for row in rows
    ]
    columns = torch.tensor(settings, dtype=torch.float64, device=scores.device)  # [R, 4]
    temperature, min_p, top_p, uniform = columns.split(1, dim=1)  # [R, 1] each
    likelihood = exact.likelihood(scores, temperature)
    likelihood.masked_fill_(likelihood < min_p, 0.0)
    likelihood.masked_fill_(scores < _least_of_top_k(scores, rows), 0.0)
    weights = exact.weights(likelihood)
    narrowed = [i for i, row in enumerate(rows) if row.params.top_p < 1.0]
    if narrowed:
        inside = _nucleus(exact.order(scores[narrowed]), weights[narrowed], top_p[narrowed])
        weights[narrowed] = weights[narrowed].masked_fill_(~inside, 0)
    ends = weights.cumsum(dim=-1)  # [R, vocab]
    total = ends[:, -1:]
    target = torch.minimum((uniform * total.double()).long(), total - 1)
    return torch.searchsorted(ends, target, right=True).squeeze(1)


def _least_of_top_k(scores: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return [R, 1]: the k-th largest score. Tokens equal to it stay, as in vLLM."""
    vocab = scores.shape[-1]
    least = scores.new_full((len(rows), 1), -math.inf)
    where = [i for i, row in enumerate(rows) if 0 < row.params.top_k < vocab]
    if where:
        places = torch.tensor([[rows[i].params.top_k - 1] for i in where], device=scores.device)
        top = scores[where].topk(int(places.max()) + 1).values
        least[where] = top.gather(1, places)
    return least


def _nucleus(order: torch.Tensor, weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return bool [R, vocab]: the most likely tokens that together just reach `top_p`.

    A token is inside if those before it have less than `top_p` of the weight. Few tokens are
    inside as a rule, so a full sort is put off until it is needed.
    """
    vocab = order.shape[-1]
    needed = top_p * weights.sum(dim=-1, keepdim=True).double()
    count = min(_NUCLEUS_GUESS, vocab)
    while True:
        top = order.topk(count)
        own = weights.gather(1, top.indices)
        inside = (own.cumsum(dim=-1) - own).double() < needed  # true, then false, along a row
        if count == vocab or not bool(inside[:, -1].any()):
            break
        count = min(16 * count, vocab)
    last = (inside.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    return order >= top.values.gather(1, last)


# ---- log probabilities


def _logprobs(
    logits: torch.Tensor, rows: Sequence[SamplingRow], ids: Sequence[int]
) -> dict[int, dict[int, Logprob]]:
    """Return what each row that asked for log probabilities gets, by the row's index."""
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None and ids[i] >= 0]
    found: dict[int, dict[int, Logprob]] = {}
    for part in exact.chunks(len(asked), logits):
        counts = [rows[i].params.logprobs or 0 for i in asked[part]]
        chosen = [ids[i] for i in asked[part]]
        entries = _logprob_rows(logits[asked[part]], counts, chosen)
        found.update(zip(asked[part], entries, strict=True))
    return found


def _logprob_rows(
    logits: torch.Tensor, counts: Sequence[int], chosen: Sequence[int]
) -> Iterator[dict[int, Logprob]]:
    """Yield each row's sampled token, then its `counts` most likely ones."""
    order = exact.order(logits)
    best = order.topk(min(max(counts), logits.shape[-1])).indices
    sampled = torch.tensor(chosen, device=logits.device).unsqueeze(1)
    ranks = (order > order.gather(1, sampled)).sum(dim=-1) + 1
    tokens = torch.cat([sampled, best], dim=1)  # [R, 1 + k]
    total = exact.weights(exact.likelihood(logits, 1.0)).sum(dim=-1, keepdim=True).double()
    shifted = logits.gather(1, tokens).double() - logits.amax(dim=-1, keepdim=True).double()
    values = shifted - (total.log() - exact.bits(logits) * math.log(2.0))
    columns = zip(counts, ranks.tolist(), tokens.tolist(), values.tolist(), strict=True)
    for count, rank, ids, logprobs in columns:
        places = itertools.chain([rank], range(1, count + 1))
        yield {
            token: Logprob(logprob, place)
            for token, logprob, place in zip(ids, logprobs, places, strict=False)
        }
