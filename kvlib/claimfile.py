"""Reads `claims.toml`: the paper's claims, and the rules that test them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvlib import intervals, metrics

STATUSES = ("ok", "oom", "timeout", "refused", "noisy")


@dataclass(frozen=True)
class Rule:
    """One test of a claim; its fields are explained at the head of `claims.toml`."""

    name: str
    kind: str  # ratio, difference, value, status
    of: metrics.Selector
    against: metrics.Selector = field(default_factory=dict)
    region: intervals.Region | None = None
    interval: str = "t"
    emulated: bool = False
    of_status: str = ""
    against_status: str = ""
    machine: tuple[str, ...] = ()
    parameters: float = 0
    magnitude: Rule | None = None


@dataclass(frozen=True)
class Claim:
    """A claim as reported, and the rules that test it."""

    id: str
    text: str
    value: str
    source: tuple[str, ...]
    checked_against_paper: bool
    figures: tuple[str, ...]
    combine: str
    rule: tuple[Rule, ...]


_FORMS = {  # kind -> the fields that it must have, and may have
    "ratio": ("against", "side bound"),
    "difference": ("against", "side bound interval"),
    "equivalence": ("against", "factor margin interval"),
    "value": ("", "side bound"),
    "status": ("against of_status against_status", ""),
}
_PLAIN = {
    str: "id text value name",
    list: "claim rule source figures machine",
    int | float: "bound claimed margin factor parameters",
    dict: "of against at magnitude",
    bool: "checked_against_paper emulated",
}
_TYPES: dict[str, Any] = {  # field -> its type, or the words it may be
    **{name: kind for kind, names in _PLAIN.items() for name in names.split()},
    "of_status": STATUSES[:-1],
    "against_status": STATUSES[:-1],
    "kind": tuple(_FORMS),
    "combine": ("all", "any"),
    "side": ("<", ">"),
    "interval": ("t", "binary", "welch"),
}


@contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def load(path: str | Path | None = None) -> list[Claim]:
    """Read the claims; ValueError, in one line, names the claim and the field at fault."""
    source = Path(path) if path else Path(__file__).with_name("claims.toml")
    with _at(source.name):
        tables = _fields(tomllib.loads(source.read_text(encoding="utf-8")), "claim")["claim"]
        claims = [_claim(table, n) for n, table in enumerate(tables, 1)]
        ids = [claim.id for claim in claims]
        if len(set(ids)) < len(ids):
            raise ValueError(f"claim {max(ids, key=ids.count)}: id: given twice")
    return claims


def _claim(table: dict[str, Any], number: int) -> Claim:
    with _at(f"claim {table.get('id', f'number {number}')}"):
        f = _fields(table, "id text value source checked_against_paper figures combine rule")
        rules = tuple(_rule(t, n) for n, t in enumerate(f.pop("rule"), 1))
        if not any(rule.region or rule.kind == "status" for rule in rules):
            raise ValueError("rule: none of them tests a direction")
    return Claim(**f, rule=rules)


def _fields(table: dict[str, Any], needed: str, extra: str = "") -> dict[str, Any]:
    """The table, lists as tuples, once every field is known, present and of its type."""
    for name in [name for name in needed.split() if name not in table]:
        raise ValueError(f"{name}: missing")
    for name, value in table.items():
        if name not in f"{needed} {extra}".split():
            raise ValueError(f"{name}: unknown here")
        kind, item = _TYPES[name], dict if name in ("claim", "rule") else str
        if isinstance(kind, tuple):
            if value not in kind:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(kind)}")
        elif not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise ValueError(f"{name}: {value!r} is of the wrong type")
        if isinstance(value, list) and not all(isinstance(v, item) for v in value):
            raise ValueError(f"{name}: an item of it is of the wrong type")
    return {name: tuple(v) if isinstance(v, list) else v for name, v in table.items()}


def _rule(table: dict[str, Any], number: int) -> Rule:
    with _at(f"rule {number}"):
        needed, extra = _FORMS.get(str(table.get("kind")), ("", "against"))
        f = _fields(table, f"name kind of {needed}", f"{extra} emulated claimed magnitude")
        claimed, size = f.pop("claimed", None), f.pop("magnitude", None)
        bounds = {name: f.pop(name) for name in ["side", "bound"] if name in f}
        if f["kind"] == "equivalence":
            f["kind"] = "ratio" if "factor" in f else "difference"
            middle = float(f["kind"] == "ratio") if claimed is None else claimed
            f["region"] = _around(f, middle, f["kind"])
        elif bounds or (f["kind"] != "status" and size is None):
            _fields(bounds, "side bound")
            f["region"] = intervals.Region.beyond(
                **bounds, claimed=claimed, log=f["kind"] == "ratio"
            )
        rule = Rule(**f)
        return replace(rule, magnitude=_magnitude(rule, size, claimed)) if size else rule


def _magnitude(rule: Rule, table: dict[str, Any], claimed: float | None) -> Rule:
    """The rule once more: in the paper's class, and within a tolerance of the value it reports."""
    with _at("magnitude"):
        f = _fields(table, "machine parameters", "factor margin at of against")
        if claimed is None:
            raise ValueError("claimed: missing in the rule")
        f["region"], at = _around(f, claimed, rule.kind), f.pop("at", {})
    f["of"] = {**rule.of, **at, **f.get("of", {})}
    f["against"] = {**rule.against, **at, **f.get("against", {})}
    return replace(rule, name=f"{rule.name}, as published", emulated=False, **f)


def _around(f: dict[str, Any], middle: float, kind: str) -> intervals.Region:
    tolerance = f.pop("factor", 0), f.pop("margin", 0)
    return intervals.Region.around(middle, *tolerance, log=kind == "ratio")
