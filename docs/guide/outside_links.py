"""A preprocessor of mdBook: keeps links to pages outside the book, such as `../../hosts.md`, as links to Markdown files.

mdBook replaces `.md` in relative links by `.html`. It does not recognise `%2Emd`, which browsers read as `.md`.
"""

import json
import re
import sys


def keep_outside_links(items: list[dict]) -> None:
    for chapter in (item["Chapter"] for item in items if "Chapter" in item):
        chapter["content"] = re.sub(r"(\]\(\.\./[^)#]*)\.md\b", r"\1%2Emd", chapter["content"])
        keep_outside_links(chapter["sub_items"])


if sys.argv[1:2] != ["supports"]:
    _, book = json.load(sys.stdin)
    keep_outside_links(book.get("items", book.get("sections")))
    json.dump(book, sys.stdout)
