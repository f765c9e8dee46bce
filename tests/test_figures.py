"""Figures: equal rows make equal files, and the look says what the rows are."""

import csv
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import pytest

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from kvlib import axes, comparison, figures


def rows(*records: dict[str, Any], **common: Any) -> pd.DataFrame:
    """Long rows; whatever is not given is the same for all."""
    always = {"strategy": "h2o", "metric": "ttft", "value": 1.0, "unit": "s", "source": "measured"}
    always |= {"status": "ok", "tokens": 128, "repeat": 0, "machine": "here", "figure": "01_x"}
    keys = ({"key": str(number)} for number in range(len(records)))
    frame = pd.DataFrame([always | common | key | r for r, key in zip(records, keys, strict=True)])
    frame.attrs["parameters"] = ["strategy", "tokens", "repeat"]
    return frame


@pytest.fixture
def ax() -> Iterator[Axes]:
    with figures.style():
        figure, made = plt.subplots()
        yield made
        plt.close(figure)


def three_repeats(**common: Any) -> pd.DataFrame:
    values = itertools.product((128, 256), enumerate((1.0, 2.0, 9.0)))
    return rows(*({"tokens": t, "repeat": r, "value": v * t} for t, (r, v) in values), **common)


# -- look -----------------------------------------------------------------------------------------


def test_looks_are_distinct() -> None:
    looks = [*figures.STRATEGIES.values(), *figures.OTHERS]
    assert len(set(looks)) == len(looks)
    assert len({look.marker for look in figures.STRATEGIES.values()}) == 8
    for one, two in itertools.combinations({look.colour for look in looks}, 2):
        assert sum(abs(a - b) for a, b in zip(to_rgb(one), to_rgb(two), strict=True)) > 0.2


def test_every_strategy_has_a_look_and_others_keep_theirs() -> None:
    names = {"full", "h2o", "paged", "vllm", "infinigen", "offload", "streaming", "blend"}
    assert set(figures.STRATEGIES) == names
    assert figures.look("mine.py:Mine") == figures.look("mine.py:Mine")
    assert figures.colour("mine.py:Mine") not in {figures.colour(name) for name in names}


def test_style_leaves_no_trace() -> None:
    before = dict(mpl.rcParams)
    with figures.style():
        assert mpl.rcParams["axes.grid"]
        assert dict(mpl.rcParams) != before
    assert dict(mpl.rcParams) == before


# -- curves ---------------------------------------------------------------------------------------


def test_a_curve_is_the_median_in_its_range(ax: Axes) -> None:
    figures.curve(ax, three_repeats(), x="tokens", y="ttft")
    (line,) = ax.lines
    assert list(line.get_xdata()) == [128, 256]
    assert list(line.get_ydata()) == [256, 512]
    assert ax.collections[0].get_datalim(ax.transData).intervaly.tolist() == [128, 9 * 256]
    assert line.get_color() == figures.colour("h2o")
    assert line.get_label() == "h2o"


@pytest.mark.parametrize(
    ("source", "line", "fill", "marker"),
    [
        ("measured", "-", "full", "s"),
        ("emulated", "--", "left", "s"),
        ("modelled", ":", "full", "None"),
    ],
)
def test_the_line_says_the_source(ax: Axes, source: str, line: str, fill: str, marker: str) -> None:
    figures.curve(ax, three_repeats(source=source), x="tokens", y="ttft")
    (drawn,) = ax.lines
    assert (drawn.get_linestyle(), drawn.get_fillstyle()) == (line, fill)
    assert drawn.get_marker() == marker
    assert drawn.get_label() == ("h2o" if source == "measured" else f"h2o ({source})")


def test_sources_and_strategies_have_curves_of_their_own(ax: Axes) -> None:
    frame = pd.concat([three_repeats(strategy=s, source=o) for s in "ab" for o in figures.LINES])
    figures.curve(ax, frame, x="tokens", y="ttft")
    assert len(ax.lines) == 6


def test_disturbed_points_are_hollow_and_do_not_count_where_others_are(ax: Axes) -> None:
    frame = rows(
        {"tokens": 1, "value": 1.0},
        {"tokens": 1, "value": 50.0, "status": "noisy"},
        {"tokens": 2, "value": 3.0, "status": "noisy"},
    )
    figures.curve(ax, frame, x="tokens", y="ttft")
    line, hollow = ax.lines
    assert list(line.get_ydata()) == [1.0, 3.0]
    assert line.get_markevery() == [0]
    assert (list(hollow.get_xdata()), hollow.get_markerfacecolor()) == ([2], "white")


def test_rows_of_different_settings_are_not_mixed(ax: Axes) -> None:
    frame = rows({"budget": 0.1}, {"budget": 0.5})
    frame.attrs["parameters"].append("budget")
    with pytest.raises(ValueError, match="budget varies within a curve"):
        figures.curve(ax, frame, x="tokens", y="ttft")
    two = rows({"strategy": "full"}, {"strategy": "h2o"}, prefill="eager")
    with pytest.raises(ValueError, match="strategy varies within a curve"):
        figures.curve(ax, two, x="tokens", y="ttft", hue="prefill")


def test_an_unknown_metric_names_the_known(ax: Axes) -> None:
    frame = rows({}, {"metric": "tpot"}, {"metric": None, "value": None, "status": "oom"})
    with pytest.raises(ValueError, match="unknown metric 'itl': the rows have tpot, ttft"):
        figures.curve(ax, frame, x="tokens", y="itl")


def test_out_of_memory_is_a_cross_where_it_happened(ax: Axes) -> None:
    frame = rows({}, {"tokens": 512, "status": "oom", "metric": None, "value": None})
    figures.curve(ax, frame.astype({"value": object}), x="tokens", y="ttft")
    figures.mark_oom(ax, frame, x="tokens")
    curve, cross = ax.lines
    assert list(curve.get_xdata()) == [128]
    assert (list(cross.get_xdata()), cross.get_marker()) == ([512], "x")
    assert cross.get_label() == "h2o: out of memory"


# -- axes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (axes.bytes_text, 0, "0 B"),
        (axes.bytes_text, 1000, "1000 B"),
        (axes.bytes_text, 1536, "1.5 KiB"),
        (axes.bytes_text, 3 * 2**20, "3 MiB"),
        (axes.bytes_text, 2**31, "2 GiB"),
        (axes.bytes_text, -1024, "-1 KiB"),
        (axes.seconds_text, 0, "0 s"),
        (axes.seconds_text, 0.02, "20 ms"),
        (axes.seconds_text, 2.5e-5, "25 µs"),
        (axes.seconds_text, 90, "90 s"),
        (axes.tokens_text, 128, "128"),
        (axes.tokens_text, 1000, "1k"),
        (axes.tokens_text, 1023, "1023"),
        (axes.tokens_text, 1024, "1k"),
        (axes.tokens_text, 1536, "1.5k"),
        (axes.tokens_text, 10_000, "10k"),
        (axes.tokens_text, 131_072, "128k"),
    ],
)
def test_numbers_as_text(function: Any, value: float, text: str) -> None:
    assert function(value) == text


def test_axes_use_the_units(ax: Axes) -> None:
    figures.curve(ax, three_repeats(), x="tokens", y="ttft")
    axes.tokens_axis(ax)
    axes.bytes_axis(ax)
    assert ax.get_xscale() == "log"
    assert list(ax.get_xticks()) == [128, 256]
    assert ax.xaxis.get_major_formatter()(2048) == "2k"
    assert ax.yaxis.get_major_formatter()(2048) == "2 KiB"
    axes.seconds_axis(ax)
    assert ax.yaxis.get_major_formatter()(0.5) == "500 ms"


# -- what a figure says and keeps -----------------------------------------------------------------


def test_the_caption_says_what_is_drawn_and_what_is_not() -> None:
    frame = rows(
        {},
        {"source": "modelled", "strategy": "full"},
        {"status": "oom", "value": None},
        {"status": "refused", "value": 9.0},
        {"status": "noisy"},
    )
    frame.attrs |= {"shed": ["repeat 4 of every point"], "missing": 2, "stale": 0}
    text = figures.caption(frame)
    for part in (
        "Measured: h2o.",
        "Modelled: full.",
        "Machine: here.",
        "Out of memory (×): 1 point.",
        "Refused as too large: 1 point.",
        "Disturbed (hollow): 1 point.",
        "Left out to save time: repeat 4 of every point.",
        "Not measured: 2 points.",
    ):
        assert part in text
    assert "older code" not in text


def drawn(frame: pd.DataFrame, folder: Path) -> dict[str, bytes]:
    with figures.style():
        figure, made = plt.subplots()
        figures.curve(made, frame, x="tokens", y="ttft")
        made.legend()
        figures.note(figure, figures.caption(frame))
        paths = figures.save(figure, frame, "01_x", folder)
        plt.close(figure)
    assert [path.name for path in paths] == ["01_x.svg", "01_x.png", "01_x.csv", "01_x.json"]
    assert sorted(folder.iterdir()) == sorted(paths)
    return {path.suffix: path.read_bytes() for path in paths}


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    frame = pd.concat([three_repeats(strategy=s) for s in ("full", "mine")], ignore_index=True)
    frame.attrs["provenance"] = {"seconds": 1.5, "commits": ["abc"]}
    first = drawn(frame, tmp_path / "a")
    assert drawn(frame.copy(), tmp_path / "b") == first
    shuffled = frame.sample(frac=1, random_state=0)
    assert drawn(shuffled, tmp_path / "c")[".csv"] == first[".csv"]
    other = drawn(frame.assign(value=frame["value"] + 1), tmp_path / "d")
    assert all(other[ending] != first[ending] for ending in (".svg", ".png", ".csv"))


def test_pictures_carry_no_date_and_no_text_that_needs_a_font(tmp_path: Path) -> None:
    files = drawn(three_repeats(), tmp_path)
    assert b"<dc:date>" not in files[".svg"]
    assert b"<text" not in files[".svg"]
    assert b"Software" not in files[".png"]


def test_the_csv_has_its_columns_and_order(tmp_path: Path) -> None:
    frame = rows(
        {"tokens": 1024, "budget": 0.5},
        {"tokens": 128, "budget": "full"},
        {"tokens": None, "strategy": "full", "status": "oom", "value": None},
        nothing=None,
    )
    lines = drawn(frame, tmp_path)[".csv"].decode().split("\n")
    head = "strategy,metric,value,unit,source,status,tokens,repeat,machine,budget"
    assert lines[0] == head
    read = list(csv.DictReader(io.StringIO("\n".join(lines))))
    assert [(r["strategy"], r["tokens"]) for r in read] == [
        ("full", ""),
        ("h2o", "128"),
        ("h2o", "1024"),
    ]


def test_the_json_says_where_the_rows_came_from(tmp_path: Path) -> None:
    frame = three_repeats()
    frame.attrs |= {"provenance": {"commits": ["abc"]}, "shed": ["x"]}
    about = json.loads(drawn(frame, tmp_path)[".json"])
    assert about["figure"] == "01_x"
    assert about["provenance"] == {"commits": ["abc"]}
    assert about["shed"] == ["x"]


def test_a_figure_needs_its_columns(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="01_x: the rows lack unit, source"):
        figures.save(plt.figure(), rows({}).drop(columns=["unit", "source"]), "01_x", tmp_path)
    assert not list(tmp_path.iterdir())


# -- comparing ------------------------------------------------------------------------------------


def test_compare_takes_medians_over_repeats() -> None:
    old, new = three_repeats(), three_repeats()
    new["value"] *= 2
    table = comparison.compare(old, new)
    assert list(table["point"]) == ["strategy=h2o tokens=128", "strategy=h2o tokens=256"]
    assert list(table["old"]) == [256, 512]
    assert list(table["ratio"]) == [2, 2]
    assert table["reproduced"].all()  # 1 to 9 and 2 to 18 overlap


@pytest.mark.parametrize(
    ("old", "new", "reproduced"),
    [
        ([10.0], [11.9], True),
        ([10.0], [12.1], False),
        ([10.0], [8.1], True),
        ([10.0], [7.9], False),
        ([10.0, 20.0, 30.0], [29.0, 60.0, 70.0], True),
        ([10.0, 20.0, 30.0], [31.0, 60.0, 70.0], False),
        ([0.0], [0.0], True),
        ([0.0], [1.0], False),
    ],
)
def test_reproduced_within_the_repeats_or_a_fifth(
    old: list[float], new: list[float], reproduced: bool
) -> None:
    frames = [rows(*({"value": v, "repeat": i} for i, v in enumerate(x))) for x in (old, new)]
    assert list(comparison.compare(*frames)["reproduced"]) == [reproduced]


def test_compare_leaves_out_what_is_not_in_both_or_not_ok() -> None:
    old = rows({}, {"tokens": 256}, {"tokens": 512, "status": "noisy"}, {"tokens": 1024})
    new = rows({}, {"tokens": 512}, {"tokens": 1024, "status": "oom", "value": None})
    assert list(comparison.compare(old, new)["point"]) == ["strategy=h2o tokens=128"]


def test_seeds_and_realised_values_do_not_part_a_point() -> None:
    old, new = rows({"seed": 1, "kept": 0.31}), rows({"seed": 2, "kept": 0.29})
    assert len(comparison.compare(old, new)) == 1


def test_two_folders_are_held_against_each_other(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new" / "figures"
    frame = pd.concat([three_repeats(), rows({"budget": 0.5, "strategy": "blend"})])
    frame.attrs["parameters"] = ["strategy", "tokens", "budget", "repeat"]
    drawn(frame, old)
    drawn(frame.assign(value=frame["value"] * 1.1), new)
    claims = "id,direction,magnitude,verdict\nC1,holds,m,holds\nC2,undecided,m,{}\n"
    (old / "claims.csv").write_text(claims.format("holds"))
    (new / "claims.csv").write_text(claims.format("undecided"))
    text = comparison.comparison(old, tmp_path / "new")
    assert text.endswith("flipped: C2 verdict: holds -> undecided\nreproduced 3 of 3")
    assert "strategy=blend tokens=128 budget=0.5" in text
    assert "1.1" in text
