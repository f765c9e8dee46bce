"""The paper's claims, held against stored rows by rules written before measuring.

A rule of `claims.toml` selects rows, pairs them on the parameters they share, reduces each repeat
(or question) to one effect, and asks whether the interval of the mean effect lies in the region
that the claim names: wholly inside it *holds*, wholly outside it *does not hold*, else it is
*undecided*; so it is, too, where half the interval is wider than the effect claimed.

- A modelled row is never evidence, an emulated one only where the rule says so; rows that are not
  `ok`, or that give a reason in the column `excluded`, are left out.
- The rules of a claim share its 5 % error by Holm's procedure, carried over to the intervals: each
  is drawn at the level at which it leaves a border out exactly where Holm rejects
  (`intervals.holm`). Results without spread cannot err by chance and take no share.
- A rule is judged apart in each setting (model and machine); where these disagree it is undecided.
  Magnitude is judged only on the paper's class of model and machine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from kvlib import intervals, metrics
from kvlib.claimfile import STATUSES, Rule
from kvlib.claimfile import Claim as Claim
from kvlib.claimfile import load as load

HOLDS, DOES_NOT, UNDECIDED = "holds", "does not hold", "undecided"
UNMEASURED, UNTESTABLE, UNCLAIMED = "not yet measured", "cannot be tested here", "none claimed"
COLUMNS = ["id", "claim", "direction", "magnitude", "measured", "projected", "verdict", "reason"]
REQUIRED = ["strategy", "metric", "value", "unit", "source", "status", "figure"]
SETTING, REPLICATES = ["model", "machine"], ["repeat", "task", "item"]
# What two rows must share to be a pair, unless the two selectors speak of it differently.
SHARED = ["figure", "strategy", "tokens", "output_tokens", "batch", "rate", "budget", "context"]
SHARED += ["link", "capacity", *SETTING, *REPLICATES]
SOURCES = ("measured", "emulated", "modelled")
LEAST_REPEATS = 3


@dataclass(frozen=True)
class _Finding:
    """What a rule found in one setting; `verdict` is set where no interval decides."""

    setting: str = ""
    estimate: intervals.Estimate | None = None
    unit: str = ""
    verdict: str = ""
    note: str = ""


def judge(
    rows: pd.DataFrame, claims: Sequence[Claim] | None = None, only: Sequence[str] | None = None
) -> pd.DataFrame:
    """One row a claim, in the columns COLUMNS, from long rows (one value a row).

    Raises ValueError for missing columns, unknown sources or statuses, and unknown ids in `only`.
    """
    claims = load() if claims is None else claims
    chosen = [claim for claim in claims if only is None or claim.id in only]
    if strange := set(only or []) - {claim.id for claim in claims}:
        raise ValueError(f"unknown claims: {', '.join(sorted(strange))}")
    rows = _checked(rows)
    return pd.DataFrame([_judge(claim, rows) for claim in chosen], columns=COLUMNS)


def table(rows: pd.DataFrame, ids: Sequence[str]) -> pd.DataFrame:
    """The verdicts on a notebook's claims, one line each, for its last cell."""
    return judge(rows, only=ids).set_index("id").drop(columns="verdict")


def save(frame: pd.DataFrame, path: str | Path) -> None:
    """Write the verdicts as CSV, whole or not at all; equal frames give equal bytes."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    draft.write_bytes(frame.to_csv(index=False, lineterminator="\n").encode())
    draft.replace(target)


def _checked(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that may be looked at, with every column that a rule may ask for."""
    if (missing := [column for column in REQUIRED if column not in rows]) and len(rows):
        raise ValueError(f"rows lack the columns {', '.join(missing)}")
    extra = [*SHARED, "parameters", "excluded", "target"]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *REQUIRED, *extra])))
    for column, known in (("source", SOURCES), ("status", STATUSES)):
        if strange := set(rows[column]) - set(known):
            raise ValueError(f"rows have an unknown {column}: {strange}")
    modelled = rows["source"].eq("modelled") & rows["target"].notna()
    rows["machine"] = rows["machine"].astype(object).mask(modelled, rows["target"])
    excluded = rows["excluded"].notna() & rows["excluded"].ne("")
    return rows[~excluded]


def _judge(claim: Claim, rows: pd.DataFrame) -> dict[str, str]:
    rows = rows[rows["figure"].isin(claim.figures)]
    tests = [rule for rule in claim.rule if rule.region or rule.kind == "status"]
    sizes = [rule.magnitude for rule in claim.rule if rule.magnitude]
    testable = any(len(_evidence(rows, rule)) for rule in sizes)
    tested, sized = _decide(tests, rows), _decide(sizes if testable else [], rows)
    direction = _combine([verdict for verdict, _, _ in tested], claim.combine)
    magnitude = _combine([verdict for verdict, _, _ in sized], "all") if sized else UNTESTABLE
    if not sizes:
        magnitude = UNCLAIMED
    told = {HOLDS: "holds in direction and magnitude", DOES_NOT: "holds in direction only"}
    return {
        "id": claim.id,
        "claim": claim.text,
        "direction": direction,
        "magnitude": magnitude,
        "measured": "; ".join(text for _, text, _ in tested + sized if text),
        "projected": "; ".join(filter(None, (_projected(rule, rows) for rule in claim.rule))),
        "verdict": told.get(magnitude, direction) if direction == HOLDS else direction,
        "reason": "; ".join(reason for _, _, reason in tested + sized),
    }


def _combine(verdicts: Sequence[str], how: str) -> str:
    decisive, other = (DOES_NOT, HOLDS) if how == "all" else (HOLDS, DOES_NOT)
    if decisive in verdicts:
        return decisive
    return verdicts[0] if set(verdicts) in ({other}, {UNMEASURED}) else UNDECIDED


def _decide(rules: Sequence[Rule], rows: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Verdict, measured values and reason of each rule, at the levels that Holm gives them."""
    tests = [(rule, _findings(rule, _evidence(rows, rule))) for rule in rules]
    chances = {}
    for n, (rule, findings) in enumerate(tests):
        estimates = [f.estimate for f in findings if f.estimate and not f.verdict]
        if rule.region and any(estimate.error for estimate in estimates):
            chances[n] = max(estimate.p_value(rule.region) for estimate in estimates)
    levels = dict(zip(chances, intervals.holm(list(chances.values())), strict=True))
    return [_outcome(*test, levels.get(n, 0.95)) for n, test in enumerate(tests)]


def _evidence(rows: pd.DataFrame, rule: Rule, sources: Sequence[str] = ()) -> pd.DataFrame:
    """The rows that may speak on a rule: by their source, status and class."""
    sources = sources or SOURCES[: 1 + rule.emulated]
    rows = rows[rows["source"].isin(sources)]
    if rule.kind != "status":
        rows = rows[rows["status"].eq("ok") & np.isfinite(rows["value"].astype(float))]
    if rule.machine:
        named = [any(m in str(name) for m in rule.machine) for name in rows["machine"]]
        rows = rows[np.array(named, dtype=bool) & rows["parameters"].ge(rule.parameters)]
    return rows


def _findings(rule: Rule, rows: pd.DataFrame) -> list[_Finding]:
    """What the rule finds in each setting that has rows on every side."""
    selectors, found = [rule.of] if rule.kind == "value" else [rule.of, rule.against], []
    for setting, part in rows.groupby(SETTING, dropna=False):
        sides = [_asked_once(side) for side in metrics.select(part, *selectors)]
        if not any(side.empty for side in sides):
            label = " on ".join(name for name in setting if isinstance(name, str))
            finding = _status(rule, sides) if rule.kind == "status" else _measure(rule, sides)
            found.append(replace(finding, setting=label))
    return found


def _asked_once(side: pd.DataFrame) -> pd.DataFrame:
    """The first answer to each question: asked again in a later repeat, it is no new question."""
    alike = [key for key in SHARED if key != "repeat"]
    first = side.groupby(alike, dropna=False)["repeat"].transform("min")
    return side[side["item"].isna() | side["repeat"].isna() | side["repeat"].eq(first)]


def _keys(rule: Rule, sides: list[pd.DataFrame]) -> list[str]:
    shared = [key for key in SHARED if all(side[key].notna().any() for side in sides)]
    return [k for k in shared if len(sides) == 1 or rule.of.get(k) == rule.against.get(k)]


def _status(rule: Rule, sides: list[pd.DataFrame]) -> _Finding:
    """Holds where `of` fails at a point that `against` passes; not where `against` fails, too."""
    keys = [key for key in _keys(rule, sides) if key not in REPLICATES]
    left, right = (side[[*keys, "status"]].drop_duplicates() for side in sides)
    both = left.merge(right, on=keys, suffixes=("", "_against"))
    hits = both["status"].eq(rule.of_status) & both["status_against"].eq(rule.against_status)
    note = f"{rule.of_status} against {rule.against_status} at {hits.sum()} of {len(both)} points"
    counter = both["status_against"].eq(rule.of_status).any()
    return _Finding(verdict=HOLDS if hits.any() else DOES_NOT if counter else UNDECIDED, note=note)


def _measure(rule: Rule, sides: list[pd.DataFrame]) -> _Finding:
    try:
        estimate = _estimate(rule, sides)
    except ValueError as error:
        return _Finding(verdict=UNDECIDED, note=str(error))
    unit, repeats = str(sides[0]["unit"].iloc[0]), [side["repeat"].nunique() for side in sides]
    least = min(estimate.n, *repeats)
    if least < LEAST_REPEATS and (unit in ("s", "ms") or "/s" in unit):
        return _Finding("", estimate, unit, UNDECIDED, f"too few repeats ({least})")
    return _Finding("", estimate, unit)


def _estimate(rule: Rule, sides: list[pd.DataFrame]) -> intervals.Estimate:
    """The mean effect over repeats or questions; points within a repeat are averaged first."""
    if len({unit for side in sides for unit in side["unit"]}) > 1:
        raise ValueError("units differ")
    if rule.interval == "welch":
        return intervals.welch(*(side["value"].to_numpy(dtype=np.float64) for side in sides))
    keys = _keys(rule, sides)
    pairs = metrics.pair(sides[0], sides[-1], keys)
    if rule.interval == "binary":
        return intervals.paired_binary(pairs["value"].to_numpy(), pairs["value_against"].to_numpy())
    return intervals.mean_effect(pairs, rule.kind, [key for key in REPLICATES if key in keys])


def _outcome(rule: Rule, findings: list[_Finding], level: float) -> tuple[str, str, str]:
    if not findings:
        return UNMEASURED, "", f"{rule.name}: no usable rows"
    labels = [f"{rule.name} ({f.setting})" if len(findings) > 1 else rule.name for f in findings]
    verdicts = [_verdict(f, rule.region, level) for f in findings]
    common = verdicts[0][0] if len({verdict for verdict, _ in verdicts}) == 1 else UNDECIDED
    named = [(name, f.estimate, f.unit) for name, f in zip(labels, findings, strict=True)]
    texts = [f"{name}: {found.text(unit, level)}" for name, found, unit in named if found]
    reasons = [f"{name}: {', '.join(v)}" for name, v in zip(labels, verdicts, strict=True)]
    return common, "; ".join(texts), "; ".join(reasons)


def _verdict(f: _Finding, region: intervals.Region | None, level: float) -> tuple[str, str]:
    if f.verdict or not f.estimate or not region:
        return f.verdict, f.note
    why = f"smallest effect to be seen {f.estimate.smallest(f.unit, level)} at {100 * level:.4g} %"
    if f.estimate.half_width(level) > region.size:
        return UNDECIDED, f"{why}, above the size claimed"
    return {True: HOLDS, False: DOES_NOT, None: UNDECIDED}[f.estimate.lies(region, level)], why


def _projected(rule: Rule, rows: pd.DataFrame) -> str:
    """What the cost model says of the rule, of its published point where it can: no evidence."""
    for candidate in filter(None, (rule.magnitude, rule)):
        found = _findings(candidate, _evidence(rows, candidate, ["modelled"]))
        if texts := [f"{f.setting}: {f.estimate.amount(f.unit)}" for f in found if f.estimate]:
            return f"{candidate.name}: {', '.join(texts)}"
    return ""
