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
from scipy.special import ndtr, ndtri

from kvlib.engines.base import Request
from kvlib.shapes import check_choice, check_positive
from kvlib.texts import long_text

Lengths = list[tuple[int, int]]  # tokens of the prompt, tokens to generate

SHORTEST = 4  # tokens of a chat's prompt or answer; as many tell the beginnings of prompts apart
CHAT_PROMPT = (52.0, 1.5)  # log-normal: median in tokens, sigma of its logarithm
CHAT_ANSWER = (200.0, 1.0)
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


def chat_lengths(count: int, seed: int, limit: int) -> Lengths:
    """Lengths of chat prompts and answers in tokens, each from 4 to `limit`.

    An approximation, fitted to no data: independent log-normals, chosen to resemble ShareGPT's
    short prompts with a long tail and its longer answers. Before truncation the medians are 52 and
    200, the means 160 and 330 (at a limit of 1024: 117 and 255). ValueError for a limit below 4.
    """
    if limit < SHORTEST:
        raise ValueError(f"limit {limit}: give at least {SHORTEST} tokens")
    draw = _generator(seed, _LENGTHS)
    prompts, answers = (_log_normal(draw, *of, count, limit) for of in (CHAT_PROMPT, CHAT_ANSWER))
    return list(zip(prompts, answers, strict=True))


def _log_normal(
    draw: np.random.Generator, median: float, sigma: float, count: int, limit: int
) -> list[int]:
    """Drawn from between the bounds, not clipped to them: no lengths pile up at the limit."""
    low, high = ndtr(np.log(np.array([SHORTEST, limit + 1]) / median) / sigma)
    lengths = median * np.exp(sigma * ndtri(draw.uniform(low, high, count)))
    return [int(length) for length in np.clip(lengths, SHORTEST, limit)]


# -- both, as recorded -------------------------------------------------------------------------

# Names of a column: this package's and Mooncake's, then Azure's, BurstGPT's.
ARRIVAL = ("arrival", "timestamp", "TIMESTAMP", "Timestamp")
PROMPT = ("prompt_tokens", "input_length", "ContextTokens", "Request tokens")
OUTPUT = ("output_tokens", "output_length", "GeneratedTokens", "Response tokens")


def trace(path: str | Path, unit: float = 1.0) -> tuple[Lengths, list[float]]:
    """Lengths in tokens and arrivals in seconds after the first, of a recorded workload.

    path  .jsonl, one object a line, or .csv with a header. The columns are named as above:
          as in the Azure LLM inference traces (github.com/Azure/AzurePublicDataset), BurstGPT
          (arXiv 2401.17644) and Mooncake's traces
    unit  seconds that the file's times count, unless they are dates: 1e-3 for Mooncake

    Sorted by arrival. Rows without tokens to read or to generate are left out: BurstGPT has failed
    requests so. Raises ValueError that names file, line and column for what cannot be read.
    """
    found: list[tuple[float, int, int]] = []
    for number, line in _lines(Path(path)):
        try:
            row = json.loads(line) if isinstance(line, str) else line
            prompt, output = _tokens(row, PROMPT), _tokens(row, OUTPUT)
            at = _seconds(row, unit)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if prompt and output:
            found.append((at, prompt, output))
    if not found:
        raise ValueError(f"{path} has no requests")
    found.sort(key=lambda one: one[0])
    return [one[1:] for one in found], [one[0] - found[0][0] for one in found]


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and content of each line: a dict, or JSON that is not yet parsed."""
    if path.suffix not in (".jsonl", ".csv"):
        raise ValueError(f"{path}: give a .jsonl or a .csv file")
    with path.open(encoding="utf-8-sig", newline="") as lines:
        if path.suffix == ".csv":
            reader = csv.DictReader(lines)
            yield from ((reader.line_num, row) for row in reader)
        else:
            yield from ((n, line) for n, line in enumerate(lines, 1) if line.strip())


def _cell(row: Any, names: tuple[str, ...]) -> tuple[str, str, float]:
    """The column that the row has of these, what it says, and as a number, nan if it is none."""
    if not isinstance(row, dict):
        raise ValueError(f"not an object: {row!r}")
    name = next((name for name in names if row.get(name) not in (None, "")), None)
    if name is None:
        raise ValueError(f"no value in a column {' or '.join(names)}")
    try:
        return name, str(row[name]), float(str(row[name]))
    except ValueError:
        return name, str(row[name]), math.nan


def _tokens(row: Any, names: tuple[str, ...]) -> int:
    name, text, number = _cell(row, names)
    if not (number.is_integer() and number >= 0):
        raise ValueError(f"{name} is {text!r}: not a number of tokens, 0 or more")
    return int(number)


def _seconds(row: Any, unit: float) -> float:
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
    tokenizer: Any, lengths: Lengths, arrivals: Sequence[float], seed: int, **sampling: Any
) -> list[Request]:
    """Requests whose prompts are pieces of Wikipedia, from places that the seed picks.

    Prompts have exactly the lengths asked for and no special tokens; no two share their first four
    tokens, as far as the text allows. `sampling`: temperature and stop, as in Request. Each draws
    by a seed of its own. Raises ValueError for lengths and arrivals of different number, a prompt
    longer than the text, and as Request does.
    """
    if len(lengths) != len(arrivals):
        raise ValueError(f"{len(lengths)} lengths, but {len(arrivals)} arrivals: give one for each")
    draw = _generator(seed, _PROMPTS)
    prompts = _pieces(_text(tokenizer), [prompt for prompt, _ in lengths], draw)
    return [
        Request(prompt, output, at, seed=int(draw.integers(2**32)), **sampling)
        for prompt, (_, output), at in zip(prompts, lengths, arrivals, strict=True)
    ]


def conversations(
    tokenizer: Any, count: int, turns: int, seed: int,
    *, user: int = 64, answer: int = 64, pause: float = 1.0, **sampling: Any,
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
    histories = _pieces(_text(tokenizer), [ends[-1]] * count, draw)
    pauses = draw.exponential(pause, (count, turns))
    pauses[:, 0] = 0
    return [
        [Request(history[:end], answer, float(at), seed=int(draw.integers(2**32)), **sampling)
         for end, at in zip(ends, np.cumsum(gaps), strict=True)]
        for history, gaps in zip(histories, pauses, strict=True)
    ]  # fmt: skip


@lru_cache(maxsize=2)
def _text(tokenizer: Any) -> NDArray[np.int64]:
    """The bundled text as token ids [T]: once for a tokenizer."""
    ids = tokenizer(long_text(), add_special_tokens=False, verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int64).ravel()


def _pieces(
    text: NDArray[np.int64], lengths: Sequence[int], draw: np.random.Generator
) -> list[list[int]]:
    """Pieces of the text of these lengths, which begin differently."""
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
