"""A hook of MkDocs: pages link to source files, which the site does not hold; there, such a link is only its text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page without links that lead out of the folder of pages. A link to nothing stays, and MkDocs warns."""
    folder, here = Path(config.docs_dir), Path(page.file.abs_src_path).parent

    def text_alone(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        leaves = "://" not in link[2] and not target.is_relative_to(folder) and target.exists()
        return link[1] if leaves else link[0]

    return LINK.sub(text_alone, markdown)
