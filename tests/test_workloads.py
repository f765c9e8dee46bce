"""Workloads: arrivals, lengths, recorded traces, and prompts that share what they should."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlib.engines import Request
from kvlib.models import Loaded
from kvlib.papers import qasper
from kvlib.texts import wikipedia
from kvlib.workloads import (
    CHATS,
    Lengths,
    arrivals,
    chat_lengths,
    conversations,
    fixed,
    requests,
    trace,
)

seeds = st.integers(0, 2**40)


class Letters:
    """A token a letter of the text's beginning; counts how often it is called."""

    def __init__(self, limit: int = 20_000) -> None:
        self.limit, self.calls = limit, 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.calls += 1
        return {"input_ids": [ord(letter) for letter in text[: self.limit]]}


LETTERS = Letters()


# -- when --------------------------------------------------------------------------------------


@given(
    seed=seeds,
    count=st.integers(0, 50),
    how=st.sampled_from(["together", "poisson", "gamma"]),
    rate=st.floats(0.01, 1000),
    burstiness=st.floats(0.05, 20),
)
def test_arrivals_are_sorted_and_seeded(
    seed: int, count: int, how: str, rate: float, burstiness: float
) -> None:
    found = arrivals(count, how, rate=rate, burstiness=burstiness, seed=seed)
    assert len(found) == count
    assert found == sorted(found)
    assert found[:1] == [0.0] * min(count, 1)
    assert found == arrivals(count, how, rate=rate, burstiness=burstiness, seed=seed)
    if how == "together":
        assert not any(found)
    elif count > 1:
        assert found != arrivals(count, how, rate=rate, burstiness=burstiness, seed=seed + 1)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(5))
def test_the_mean_rate_is_the_asked_one(seed: int, burstiness: float) -> None:
    count, rate = 4001, 8.0
    found = arrivals(count, "gamma", rate=rate, burstiness=burstiness, seed=seed)
    error = 1 / np.sqrt(burstiness * (count - 1))  # of the mean gap, relative
    assert found[-1] / (count - 1) * rate == pytest.approx(1, abs=4 * error)


@pytest.mark.parametrize("seed", range(3))
def test_less_is_burstier_and_one_is_poisson(seed: int) -> None:
    spread = []
    for burstiness in (0.25, 1.0, 4.0):
        gaps = np.diff(arrivals(8001, "gamma", rate=5, burstiness=burstiness, seed=seed))
        spread.append(gaps.var() / gaps.mean() ** 2)
    assert spread == pytest.approx([4, 1, 0.25], rel=0.25)
    poisson = arrivals(50, "poisson", rate=5, burstiness=0.1, seed=seed)
    assert poisson == arrivals(50, "gamma", rate=5, seed=seed)


@pytest.mark.parametrize(
    ("how", "wrong", "match"),
    [
        ("poisson", {}, "poisson arrivals need a rate"),
        ("gamma", {"rate": 0.0}, "rate"),
        ("poisson", {"rate": -1.0}, "rate"),
        ("poisson", {"rate": float("inf")}, "rate"),
        ("gamma", {"rate": 1.0, "burstiness": 0.0}, "burstiness"),
        ("uniform", {"rate": 1.0}, "together, poisson, gamma"),
    ],
)
def test_bad_arrivals(how: str, wrong: dict[str, float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        arrivals(3, how, seed=0, **wrong)


# -- how long ----------------------------------------------------------------------------------


@given(
    seed=seeds,
    count=st.integers(0, 40),
    limit=st.integers(4, 5000),
    dataset=st.sampled_from(sorted(CHATS)),
)
def test_chat_lengths_keep_to_the_limits(seed: int, count: int, limit: int, dataset: str) -> None:
    found = chat_lengths(count, seed, limit, dataset)
    assert len(found) == count
    assert all(4 <= length <= limit for pair in found for length in pair)
    assert found == chat_lengths(count, seed, limit, dataset)


@pytest.mark.parametrize(
    ("dataset", "prompt", "answer"),
    [("sharegpt", 161.31, 337.99), ("alpaca", 19.31, 58.45), ("lmsys", 69.5, 214.5)],
)
def test_chat_lengths_have_the_published_means(dataset: str, prompt: float, answer: float) -> None:
    found = np.array(chat_lengths(200_000, 1, 10**7, dataset))
    assert found.mean(axis=0) == pytest.approx([prompt, answer], rel=0.03)
    assert (np.median(found, axis=0) < found.mean(axis=0)).all()


def test_chat_lengths_are_as_documented() -> None:
    found = np.array(chat_lengths(200_000, 1, 10**7))
    assert (found > [1650, 2100]).mean(axis=0) == pytest.approx([0.01, 0.01], rel=0.1)
    assert np.mean(chat_lengths(200_000, 1, 1024), axis=0) == pytest.approx([114, 260], rel=0.01)
    assert chat_lengths(9, 1, 256) == chat_lengths(9, 1, 256, "sharegpt")
    assert chat_lengths(9, 1, 256) != chat_lengths(9, 2, 256)


def test_long_chats_are_cut_off_and_not_clipped() -> None:
    short = np.array(chat_lengths(4000, 1, 256))
    assert (short == 256).mean() < 0.01
    with pytest.raises(ValueError, match="limit 3"):
        chat_lengths(1, 0, 3)
    with pytest.raises(ValueError, match="dataset must be one of sharegpt, alpaca, lmsys"):
        chat_lengths(1, 0, 100, "orca")


def test_lengths_and_arrivals_of_a_seed_are_independent() -> None:
    gaps = np.diff(arrivals(4001, "poisson", rate=1, seed=7))
    lengths = np.array(chat_lengths(4000, 7, 1000))
    found = np.corrcoef(np.vstack([gaps, lengths.T]))
    assert np.abs(found - np.eye(3)).max() < 0.08


# -- as recorded -------------------------------------------------------------------------------

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
40,GPT-4,300,0,300,API log
45,GPT-4,1087,230,1317,Conversation log
"""
OURS = """{"arrival": 1.5, "prompt_tokens": 10, "output_tokens": 2}

{"arrival": 3, "prompt_tokens": 5, "output_tokens": 4.0}
"""
MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47]}
"""


@pytest.mark.parametrize(
    ("name", "text", "unit", "lengths", "last"),
    [
        ("a.csv", AZURE, 1, [(374, 44), (396, 109)], 4.314579),
        ("b.csv", "\ufeff" + AZURE_2024, 1, [(2162, 5), (2399, 6)], 0.007405),
        ("c.csv", BURST, 1, [(472, 18), (1087, 230)], 40),
        ("d.jsonl", OURS, 1, [(10, 2), (5, 4)], 1.5),
        ("e.jsonl", MOONCAKE, 1e-3, [(6955, 52), (6472, 26)], 3.053),
    ],
)
def test_traces_in_each_format(
    tmp_path: Path, name: str, text: str, unit: float, lengths: Lengths, last: float
) -> None:
    (tmp_path / name).write_text(text)
    found, seconds = trace(tmp_path / name, unit, skip_empty=text == BURST)
    assert found == lengths
    assert seconds == pytest.approx([0, last], abs=1e-6)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1)
)
def test_a_trace_comes_back_sorted_from_zero(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[float, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "some.jsonl"
    keys = ("arrival", "prompt_tokens", "output_tokens")
    path.write_text("\n".join(json.dumps(dict(zip(keys, row, strict=True))) for row in rows))
    lengths, seconds = trace(str(path), sort=True)
    times = [row[0] for row in rows]
    rows = sorted(rows, key=lambda row: row[0])
    if times == sorted(times):
        assert trace(path) == (lengths, seconds)
    else:
        with pytest.raises(ValueError, match=r"line \d+: arrival is .* sort=True"):
            trace(path)
    assert lengths == [row[1:] for row in rows]
    assert seconds == [row[0] - rows[0][0] for row in rows]


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("t.csv", "", r"t\.csv has no requests"),
        ("t.csv", HEAD, r"t\.csv has no requests"),
        ("t.jsonl", "\n", r"t\.jsonl has no requests"),
        ("t.csv", HEAD + "1,0,5\n", r"t\.csv, line 2: ContextTokens is '0': give skip_empty=True"),
        ("t.csv", HEAD + "1,2,3\n2,5,0\n", "line 3: GeneratedTokens is '0': give skip_empty=True"),
        ("t.csv", HEAD + "5,2,3\n6,2,3\n4.5,2,3\n", "line 4: TIMESTAMP is '4.5': before the one"),
        ("t.txt", HEAD, r"t\.txt: give a \.jsonl or a \.csv"),
        ("t.csv", "TIMESTAMP,GeneratedTokens\n1,2\n", r"t\.csv, line 2: .*ContextTokens"),
        ("t.csv", HEAD + "1,2,3\n4,5\n", r"t\.csv, line 3: .*GeneratedTokens"),
        ("t.csv", HEAD + ",2,3\n", "line 2: no value .*TIMESTAMP"),
        ("t.csv", HEAD + "1,2,3\n2,x,3\n", "line 3: ContextTokens is 'x'"),
        ("t.csv", HEAD + "1,2,-3\n", "line 2: GeneratedTokens is '-3'"),
        ("t.csv", HEAD + "1,2.5,3\n", "line 2: ContextTokens is '2.5'"),
        ("t.csv", HEAD + "1,inf,3\n", "line 2: ContextTokens is 'inf'"),
        ("t.csv", HEAD + "yesterday,2,3\n", "line 2: TIMESTAMP is 'yesterday'"),
        ("t.jsonl", '{"arrival": NaN, "prompt_tokens": 1, "output_tokens": 1}', "line 1: arrival"),
        ("t.jsonl", '{"arrival": 0, "prompt_tokens": [], "output_tokens": 1}', "'\\[\\]'"),
        ("t.jsonl", "\n{]", r"t\.jsonl, line 2: not JSON at character 2: "),
        ("t.jsonl", "[1, 2, 3]", r"t\.jsonl, line 1: not an object"),
        ("t.csv", HEAD + '1,"2,3\n' + "4,5,6\n" * 3, r"t\.csv, line \d: unexpected end of data"),
        ("t.csv", HEAD + "1,\udc80,3\n", "line 2: ContextTokens is"),
    ],
)
def test_bad_traces(tmp_path: Path, name: str, text: str, match: str) -> None:
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=match):
        trace(tmp_path / name)


def test_what_a_trace_may_be_forgiven(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEAD + "9,1,0\n5,2,3\n1,0,4\n5,6,7\n4,8,9\n")
    assert trace(path, skip_empty=True, sort=True) == ([(8, 9), (2, 3), (6, 7)], [0, 1, 1])
    with pytest.raises(ValueError, match="line 6: TIMESTAMP"):  # rows left out do not count
        trace(path, skip_empty=True)
    with pytest.raises(ValueError, match="line 2: GeneratedTokens"):
        trace(path, sort=True)
    path.write_text(HEAD + "9,1,0\n5,x,0\n")
    with pytest.raises(ValueError, match="line 3: ContextTokens is 'x'"):
        trace(path, skip_empty=True)
    path.write_text(HEAD + "9,1,0\n")
    with pytest.raises(ValueError, match="no requests"):
        trace(path, skip_empty=True)
    with pytest.raises(ValueError, match="unit"):
        trace(path, 0)


# -- what they say -----------------------------------------------------------------------------


def beginnings(made: list[Request]) -> set[tuple[int, ...]]:
    return {tuple(request.prompt[:4]) for request in made}


@given(seed=seeds, lengths=st.lists(st.tuples(st.integers(4, 900), st.integers(1, 9)), max_size=30))
def test_prompts_have_their_lengths_and_share_no_beginning(seed: int, lengths: Lengths) -> None:
    seconds = arrivals(len(lengths), "poisson", rate=3, seed=seed)
    made = requests(LETTERS, lengths, seconds, seed)
    assert [(len(r.prompt), r.max_new_tokens) for r in made] == lengths
    assert [r.arrival for r in made] == seconds
    assert all(r.temperature == 0 and not r.stop for r in made)
    assert len(beginnings(made)) == len(made)
    assert made == requests(LETTERS, lengths, seconds, seed)


def test_seeds_differ_and_the_text_is_tokenised_once() -> None:
    tokenizer, lengths = Letters(), fixed(20, 300, 5)
    points = [requests(tokenizer, lengths, [0.0] * 20, seed) for seed in range(4)]
    assert len({tuple(r.prompt) for point in points for r in point}) == 80
    assert tokenizer.calls == 1
    shown = "".join(map(chr, points[0][0].prompt))
    assert " the " in shown


def text_of(made: list[Request]) -> str:
    return "".join(map(chr, made[0].prompt))


def test_papers_are_long_texts_of_their_own() -> None:
    papers = qasper()
    assert len(papers) == 260
    assert list(papers) == sorted(papers)
    assert all(text.startswith(title) for title, text in papers.items())
    assert sum(map(len, papers.values())) > 6_000_000
    with_heading = sum("\n\nIntroduction\n\n" in text for text in papers.values())
    assert with_heading > 200
    assert not papers.keys() & wikipedia().keys()


def test_prompts_are_cut_from_the_source_asked_for() -> None:
    whole, lengths = Letters(10**8), fixed(1, 400, 1)
    texts = {
        "wikipedia": "\n\n".join(wikipedia().values()),
        "qasper": "\n\n".join(qasper().values()),
    }
    for source, text in texts.items():
        made = requests(whole, lengths, [0.0], 1, source=source)
        assert text_of(made) in text
        (talk,) = conversations(whole, 1, 2, 1, source=source)
        assert text_of(talk[1:]) in text
    assert requests(whole, lengths, [0.0], 1) == requests(
        whole, lengths, [0.0], 1, source="wikipedia"
    )
    with pytest.raises(ValueError, match="source must be one of wikipedia, qasper, got 'c4'"):
        requests(LETTERS, lengths, [0.0], 1, source="c4")


def test_prompts_longer_than_wikipedia_come_from_the_papers() -> None:
    whole = Letters(10**8)
    long = len("\n\n".join(wikipedia().values())) + 1
    (made,) = requests(whole, [(long, 1)], [0.0], 1)
    assert text_of([made]) in "\n\n".join(qasper().values())
    assert whole.calls == 2
    with pytest.raises(ValueError, match=f"give 1 to {long - 1}, the whole text"):
        requests(whole, [(long, 1)], [0.0], 1, source="wikipedia")


def test_sampling_is_passed_on_with_a_seed_for_each() -> None:
    made = requests(LETTERS, fixed(9, 5, 2), [0.0] * 9, 3, temperature=0.7, stop=(2,))
    assert {(r.temperature, r.stop) for r in made} == {(0.7, (2,))}
    assert len({r.seed for r in made}) == 9


def test_a_text_too_short_for_so_many_beginnings_repeats_some() -> None:
    made = requests(Letters(12), fixed(20, 5, 1), [0.0] * 20, 0)
    assert len(beginnings(made)) == 8


@pytest.mark.parametrize(
    ("lengths", "seconds", "match"),
    [
        ([(5, 1)], [], "1 lengths, but 0 arrivals"),
        ([(20_001, 1)], [0.0], "20001 tokens: give 1 to 20000"),
        ([(0, 1)], [0.0], "0 tokens"),
        ([(-3, 1)], [0.0], "-3 tokens"),
        ([(5, 0)], [0.0], "max_new_tokens"),
        ([(5, 1)], [-1.0], "arrival"),
    ],
)
def test_bad_requests(lengths: Lengths, seconds: list[float], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        requests(LETTERS, lengths, seconds, 0)


@given(
    seed=seeds, count=st.integers(1, 6), turns=st.integers(1, 5),
    user=st.integers(4, 30), answer=st.integers(1, 30), pause=st.floats(0, 10),
)  # fmt: skip
def test_conversations_grow(
    seed: int, count: int, turns: int, user: int, answer: int, pause: float
) -> None:
    made = conversations(LETTERS, count, turns, seed, user=user, answer=answer, pause=pause)
    assert [len(talk) for talk in made] == [turns] * count
    for talk in made:
        assert talk[0].arrival == 0
        assert len(talk[0].prompt) == user
        for before, after in itertools.pairwise(talk):
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert len(after.prompt) == len(before.prompt) + answer + user
            assert after.arrival >= before.arrival
        assert {turn.max_new_tokens for turn in talk} == {answer}
    assert len(beginnings([talk[0] for talk in made])) == count
    assert made == conversations(LETTERS, count, turns, seed, user=user, answer=answer, pause=pause)


@pytest.mark.parametrize(
    "wrong", [{"count": 0}, {"turns": 0}, {"user": 0}, {"answer": 0}, {"pause": -1.0}]
)
def test_bad_conversations(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {"count": 2, "turns": 2}
    with pytest.raises(ValueError, match="at least"):
        conversations(LETTERS, seed=0, **(good | wrong))


@pytest.mark.slow
def test_with_a_real_tokenizer(smollm2: Loaded) -> None:
    lengths = chat_lengths(96, 5, 1024)
    made = requests(smollm2.tokenizer, lengths, arrivals(96, "together", seed=5), 5)
    assert [(len(r.prompt), r.max_new_tokens) for r in made] == lengths
    assert len(beginnings(made)) == 96
    special = set(smollm2.tokenizer.all_special_ids)
    assert not any(special & set(r.prompt) for r in made)
    other = requests(smollm2.tokenizer, lengths, arrivals(96, "together", seed=6), 6)
    assert not beginnings(made) & beginnings(other)
