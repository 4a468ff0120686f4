"""A hook of mkdocs: ARCHITECTURE.md and CONTRIBUTING.md stand at the top of the repository and are pages of the site as well."""

from pathlib import Path
from typing import Any

TOP = {"architecture.md": "ARCHITECTURE.md", "contributing.md": "CONTRIBUTING.md"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page: for these two that of the file at the top, with links as they are from docs/."""
    name = TOP.get(page.file.src_uri)
    if name is None:
        return markdown
    text = (Path(__file__).parents[1] / name).read_text()
    for page_name, file in TOP.items():
        text = text.replace(f"]({file})", f"]({page_name})")
    return text.replace("](docs/", "](")
