"""What requests an engine is given: when they arrive, how long they are, what they say.

Everything follows from a seed. Give each measured point a seed of its own: its prompts then begin
elsewhere in the text, but for rare chances, and a prefix cache finds nothing of earlier points.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri

from kvlib.engines.base import Request
from kvlib.papers import qasper
from kvlib.shapes import check_choice, check_positive
from kvlib.texts import long_text

Lengths = list[tuple[int, int]]  # tokens of the prompt, tokens to generate

SHORTEST = 4  # tokens of a chat's prompt or answer; as many tell the beginnings of prompts apart

# Of the prompt and of the answer: mean in tokens, as published; sigma of its logarithm, assumed.
CHATS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    # Kwon et al., SOSP 2023 (arXiv 2309.06180), Figure 11a and b
    "sharegpt": ((161.31, 1.5), (337.99, 1.0)),
    "alpaca": ((19.31, 0.5), (58.45, 1.0)),
    # Zheng et al., ICLR 2024 (arXiv 2309.11998): average tokens per prompt and per response
    "lmsys": ((69.5, 1.5), (214.5, 1.0)),
}

SOURCES = ("wikipedia", "qasper")
TRIES = 100  # draws of a place in the text until its beginning is new

_ARRIVALS, _LENGTHS, _PROMPTS, _TURNS = range(4)  # independent streams of one seed


def _generator(seed: int, stream: int) -> np.random.Generator:
    """One per purpose: from the same draws, long prompts would go with long gaps."""
    return np.random.default_rng([stream, seed])


# -- when --------------------------------------------------------------------------------------


def arrivals(
    count: int, how: str, *, rate: float | None = None, burstiness: float = 1.0, seed: int
) -> list[float]:
    """Seconds at which each of `count` requests arrives, sorted; the first one at 0.

    how         "together": all at 0; "poisson" or "gamma": `rate` requests/s on average
    burstiness  of "gamma": the shape of the gaps' distribution, whose mean is 1 / rate. 1 is a
                Poisson process, less is burstier: as in vLLM's serving benchmark

    Raises ValueError for another name, or a rate or burstiness that is missing or not positive.
    """
    check_choice("how", how, ("together", "poisson", "gamma"))
    check_positive("burstiness", burstiness)
    if how == "together":
        return [0.0] * count
    if rate is None:
        raise ValueError(f"{how} arrivals need a rate: give requests per second")
    check_positive("rate", rate)
    shape = burstiness if how == "gamma" else 1.0
    gaps = _generator(seed, _ARRIVALS).gamma(shape, 1 / (rate * shape), count)
    gaps[:1] = 0
    return [float(seconds) for seconds in np.cumsum(gaps)]


# -- how long ----------------------------------------------------------------------------------


def fixed(count: int, prompt: int, output: int) -> Lengths:
    """`count` requests of the same lengths, in tokens."""
    return [(prompt, output)] * count


def chat_lengths(count: int, seed: int, limit: int, dataset: str = "sharegpt") -> Lengths:
    """Lengths of chat prompts and answers in tokens, each from 4 to `limit`.

    Log-normals with the published means of the dataset, a key of `CHATS`; a `limit` cuts the long
    ones off, and so lowers them: ShareGPT's 161 and 338 become 114 and 260 at a limit of 1024.

    Assumed, as neither medians nor variances are published beside the means: the shape, that
    lengths are independent of each other, and sigma. Those of ShareGPT leave about 1 % of prompts
    above 1,650 tokens and of answers above 2,100, near the end of the tails in that figure. The
    others have the same, but for Alpaca's prompts, as the paper calls ShareGPT's variance the
    higher one. Each source counts with a tokenizer of its own.

    Raises ValueError for a limit below 4 or another dataset.
    """
    check_choice("dataset", dataset, CHATS)
    if limit < SHORTEST:
        raise ValueError(f"limit {limit}: give at least {SHORTEST} tokens")
    draw = _generator(seed, _LENGTHS)
    prompts, answers = (_log_normal(draw, *of, count, limit) for of in CHATS[dataset])
    return list(zip(prompts, answers, strict=True))


def _log_normal(
    draw: np.random.Generator, mean: float, sigma: float, count: int, limit: int
) -> list[int]:
    """Drawn from between the bounds, not clipped to them: no lengths pile up at the limit."""
    median = _median(mean, sigma)
    bounds = np.array([SHORTEST - 0.5, limit + 0.5])  # they are rounded
    low, high = ndtr(np.log(bounds / median) / sigma)
    lengths = median * np.exp(sigma * ndtri(draw.uniform(low, high, count)))
    return [int(length) for length in np.clip(np.rint(lengths), SHORTEST, limit)]


@lru_cache
def _median(mean: float, sigma: float) -> float:
    """Of the log-normal whose part above the shortest length has this mean.

    E[X | X > a] = median · exp(σ²/2) · Φ(σ − z) / Φ(−z), z = ln(a / median) / σ; the whole of it
    would have median = mean · exp(−σ²/2).
    """

    def excess(median: float) -> float:
        z = math.log((SHORTEST - 0.5) / median) / sigma
        return float(median * math.exp(sigma**2 / 2) * ndtr(sigma - z) / ndtr(-z) - mean)

    return float(brentq(excess, mean * math.exp(-(sigma**2) / 2) / 10, mean))


# -- both, as recorded -------------------------------------------------------------------------

# Names of a column: this package's and Mooncake's, then Azure's, BurstGPT's.
ARRIVAL = ("arrival", "timestamp", "TIMESTAMP", "Timestamp")
PROMPT = ("prompt_tokens", "input_length", "ContextTokens", "Request tokens")
OUTPUT = ("output_tokens", "output_length", "GeneratedTokens", "Response tokens")


def trace(
    path: str | Path, unit: float = 1.0, *, skip_empty: bool = False, sort: bool = False
) -> tuple[Lengths, list[float]]:
    """Lengths in tokens and arrivals in seconds after the first, of a recorded workload.

    path        .jsonl, one object a line, or .csv with a header. The columns are named as above:
                as in the Azure LLM inference traces (github.com/Azure/AzurePublicDataset),
                BurstGPT (arXiv 2401.17644) and Mooncake's traces
    unit        seconds that the file's times count, unless they are dates: 1e-3 for Mooncake
    skip_empty  leave out rows without tokens to read or to generate: BurstGPT's failed requests
    sort        by arrival, rows of the same time as in the file

    Raises ValueError that names file, line and column for what cannot be read, for a row without
    tokens unless `skip_empty`, and for one that arrives before the last unless `sort`.
    """
    check_positive("unit", unit)
    found = list(_recorded(Path(path), unit, skip_empty, sort))
    if not found:
        raise ValueError(f"{path} has no requests")
    found.sort(key=lambda one: one[0])
    return [one[1:] for one in found], [one[0] - found[0][0] for one in found]


def _recorded(
    path: Path, unit: float, skip_empty: bool, sort: bool
) -> Iterator[tuple[float, int, int]]:
    """Arrival in seconds and tokens of each request, in the order of the file."""
    last = -math.inf
    for number, line in _lines(path):
        try:
            row = _row(line)
            at = _seconds(row, unit)
            prompt, output = (_tokens(row, names, skip_empty) for names in (PROMPT, OUTPUT))
            if not (prompt and output):
                continue
            if at < last and not sort:
                name, text, _ = _cell(row, ARRIVAL)
                raise ValueError(f"{name} is {text!r}: before the one above, give sort=True")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        last = at
        yield at, prompt, output


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and content of each line: a dict, or JSON that is not yet parsed."""
    if path.suffix not in (".jsonl", ".csv"):
        raise ValueError(f"{path}: give a .jsonl or a .csv file")
    with path.open(encoding="utf-8-sig", newline="", errors="replace") as lines:
        if path.suffix == ".jsonl":
            yield from ((n, line) for n, line in enumerate(lines, 1) if line.strip())
            return
        reader = csv.DictReader(lines, strict=True)
        try:
            yield from ((reader.line_num, row) for row in reader)
        except csv.Error as error:  # a quote that is never closed, say
            raise ValueError(f"{path}, line {reader.line_num}: {error}") from None


def _row(line: Any) -> dict[str, Any]:
    if isinstance(line, str):
        try:
            line = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON at character {error.pos + 1}: {error.msg}") from None
    if not isinstance(line, dict):
        raise ValueError(f"not an object: {line!r}")
    return line


def _cell(row: dict[str, Any], names: tuple[str, ...]) -> tuple[str, str, float]:
    """The column that the row has of these, what it says, and as a number, nan if it is none."""
    name = next((name for name in names if row.get(name) not in (None, "")), None)
    if name is None:
        raise ValueError(f"no value in a column {' or '.join(names)}")
    try:
        return name, str(row[name]), float(str(row[name]))
    except ValueError:
        return name, str(row[name]), math.nan


def _tokens(row: dict[str, Any], names: tuple[str, ...], may_lack: bool) -> int:
    name, text, number = _cell(row, names)
    if number == 0 and not may_lack:
        raise ValueError(f"{name} is {text!r}: give skip_empty=True to leave out such rows")
    if not (number.is_integer() and number >= 0):
        raise ValueError(f"{name} is {text!r}: not a number of tokens")
    return int(number)


def _seconds(row: dict[str, Any], unit: float) -> float:
    """A time as a number, or a date, which is UTC where it names no zone."""
    name, text, number = _cell(row, ARRIVAL)
    if math.isfinite(number):
        return number * unit
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}: neither a number nor a date") from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


# -- what they say -----------------------------------------------------------------------------


def requests(
    tokenizer: Any, lengths: Lengths, arrivals: Sequence[float], seed: int,
    *, source: str | None = None, **sampling: Any,
) -> list[Request]:  # fmt: skip
    """Requests whose prompts are pieces of a bundled text, from places that the seed picks.

    source    "wikipedia": SQuAD's articles, 138k tokens for SmolLM2; "qasper": papers, 1.5M
              (tokenised once, in some seconds); None: Wikipedia, if no prompt is longer than it
    sampling  temperature and stop, as in Request. Each draws by a seed of its own

    Prompts have exactly the lengths asked for and no special tokens; no two share their first four
    tokens, as far as the text allows. Raises ValueError for lengths and arrivals of different
    number, another source, a prompt longer than the text, and as Request does.
    """
    if len(lengths) != len(arrivals):
        raise ValueError(f"{len(lengths)} lengths, but {len(arrivals)} arrivals: give one for each")
    draw = _generator(seed, _PROMPTS)
    prompts = _pieces(tokenizer, source, [prompt for prompt, _ in lengths], draw)
    return [
        Request(prompt, output, at, seed=int(draw.integers(2**32)), **sampling)
        for prompt, (_, output), at in zip(prompts, lengths, arrivals, strict=True)
    ]


def conversations(
    tokenizer: Any, count: int, turns: int, seed: int,
    *, user: int = 64, answer: int = 64, pause: float = 1.0, source: str | None = None,
    **sampling: Any,
) -> list[list[Request]]:  # fmt: skip
    """`count` conversations; each turn's prompt begins with the whole prompt of the one before.

    user, answer  tokens asked and answered in a turn; in the history, text of that length stands
                  for the answers, which nobody knows before they are generated
    pause         mean seconds between turns, exponential; a conversation's first turn is at 0

    Otherwise as `requests`.
    """
    if min(count, turns, user, answer) < 1 or not 0 <= pause < math.inf:
        raise ValueError("count, turns, user and answer must be at least 1, pause at least 0")
    draw = _generator(seed, _TURNS)
    ends = range(user, turns * (user + answer), user + answer)
    histories = _pieces(tokenizer, source, [ends[-1]] * count, draw)
    pauses = draw.exponential(pause, (count, turns))
    pauses[:, 0] = 0
    return [
        [Request(history[:end], answer, float(at), seed=int(draw.integers(2**32)), **sampling)
         for end, at in zip(ends, np.cumsum(gaps), strict=True)]
        for history, gaps in zip(histories, pauses, strict=True)
    ]  # fmt: skip


@lru_cache(maxsize=4)
def _text(tokenizer: Any, source: str) -> NDArray[np.int64]:
    """A bundled text as token ids [T]: once for a tokenizer."""
    text = long_text() if source == "wikipedia" else "\n\n".join(qasper().values())
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int64).ravel()


def _text_for(tokenizer: Any, source: str | None, longest: int) -> NDArray[np.int64]:
    """The text of that source, or the first one that holds the longest prompt."""
    if source is None:
        fits = (name for name in SOURCES[:-1] if longest <= len(_text(tokenizer, name)))
        source = next(fits, SOURCES[-1])
    check_choice("source", source, SOURCES)
    return _text(tokenizer, source)


def _pieces(
    tokenizer: Any, source: str | None, lengths: Sequence[int], draw: np.random.Generator
) -> list[list[int]]:
    """Pieces of a text of these lengths, which begin differently."""
    text = _text_for(tokenizer, source, max(lengths, default=0))
    seen: set[bytes] = set()
    pieces = []
    for length in lengths:
        if not 1 <= length <= len(text):
            raise ValueError(f"a prompt of {length} tokens: give 1 to {len(text)}, the whole text")
        for _ in range(TRIES):
            start = int(draw.integers(len(text) - length + 1))
            beginning = text[start : start + SHORTEST].tobytes()
            if beginning not in seen:
                break
        seen.add(beginning)
        pieces.append([int(token) for token in text[start : start + length]])
    return pieces
