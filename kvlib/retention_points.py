"""The points of the retention study: first what the full cache can answer, then only that."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvlib.decoding import sweep
from kvlib.facts import check

PASS = 0.8  # share that the full cache must recall
BLIND = ("streaming",)  # strategies that keep by position alone
SELECTION = 1_000_003  # added to the seed where kinds and contexts are chosen


def selection(
    *, contexts: Sequence[int], kinds: Sequence[str], conversations: int, facts: int, model: str,
    device: str, seed: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """The points that show which kinds the full cache answers: all of them, on other seeds."""
    points = []
    for context in contexts:
        check(kinds, context, facts, conversations)
        point = {"strategy": "full", "budget": 1.0, "knobs": "", "variant": "selection"}
        point |= {"context": context, "kinds": ",".join(sorted(kinds)), "facts": facts}
        points.append(point | {"each": facts, "conversations": conversations})
    at = {"model": model, "device": device, "repeat": 0, "seed": seed + SELECTION}
    return [point | at for point in points]


def shares(frame: pd.DataFrame) -> pd.DataFrame:
    """What the full cache recalled on the selection's seeds: mean and count, kind by context."""
    rows = frame[frame["variant"].eq("selection") & frame["metric"].eq("recalled")]
    rows = rows[rows["status"].isin(["ok", "noisy"])].astype({"value": float})
    return rows.groupby(["context", "kind"])["value"].agg(["mean", "count"])


def chosen(frame: pd.DataFrame) -> dict[int, list[str]]:
    """The kinds of which the full cache recalled 80 %, by context; those without any are left out.

    ValueError where there are none at all.
    """
    table, asked = shares(frame), dict[int, list[str]]()
    for context, kind in table.index[table["mean"] >= PASS - 1e-9]:
        asked.setdefault(int(context), []).append(str(kind))
    if not asked:
        raise ValueError(f"the full cache recalls no kind of fact in {PASS:.0%} of the cases")
    return asked


def scoring(
    *, asked: Mapping[int, Sequence[str]], strategies: Sequence[str], budgets: Sequence[float],
    conversations: int, facts: int, single: int, needles: Mapping[int, int], model: str,
    device: str, seed: int, repeats: int = 1, further: Sequence[str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """The points that are scored: turn by turn, with the question in the prompt, and needles.

    asked    kinds by context, as from `chosen`
    single   facts of each chat that are asked within the prompt as well, at the first budget, under
             strategies that choose by attention
    needles  how many, by length
    further  strategies that are measured at more than the first budget; None: all

    What evicts whatever is said (streaming) has one budget, and neither of the last two.
    """
    points = []
    for s in strategies:
        for n, (budget, knobs) in enumerate(sweep(s, budgets, [])):
            if n and (s in BLIND or (further is not None and s not in further)):
                continue
            at = {"strategy": s, "budget": budget, "knobs": knobs}
            extra = not n and s not in BLIND
            for context, kinds in asked.items():
                told = min(facts, len(kinds))
                chat = at | {"context": context, "kinds": ",".join(sorted(kinds)), "facts": told}
                chat |= {"conversations": conversations}
                points.append(chat | {"variant": "turns", "each": told})
                if extra and single and knobs:
                    points.append(chat | {"variant": "single", "each": min(single, told)})
            more = needles.items() if extra else ()
            points += [at | {"variant": "needle", "context": c, "needles": k} for c, k in more]
    also = {"model": model, "device": device}
    return [p | also | {"repeat": r, "seed": seed + r} for r in range(repeats) for p in points]


def needle_missing() -> str:
    """Why lm-eval cannot generate needles here; "" where it can."""
    gone = [n for n in ("wonderwords", "nltk") if importlib.util.find_spec(n) is None]
    return f"{' and '.join(gone)} not installed" if gone else ""


def recall_seconds(point: Mapping[str, Any]) -> float:
    """Rough seconds that `recall` takes on two cores, for the estimate before a run."""
    if point["variant"] == "needle":
        return 4 + float(point["context"] * point["needles"]) / 600
    count, context = point["conversations"], point["context"]
    rows, single = count * point["each"], point["variant"] == "single"
    step = 0.06 + rows * (0.0012 + context * 4e-6)
    return float(2 + (12 if single else 30) * step + (rows if single else count) * context / 700)
