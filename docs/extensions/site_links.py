"""The links of the site: to the reference from names in backticks, and none to files that are not part of the site."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

__all__ = ["LinkedNames", "setup", "without_links_outward"]


class LinkedNames(SphinxPostTransform):
    """Literals that begin with the name of an entry of the reference become links to it."""

    default_priority = 400

    def run(self, **kwargs: Any) -> None:
        entries = self.env.domains["py"].data["objects"]
        for literal in list(self.document.findall(nodes.literal)):
            if isinstance(literal.parent, nodes.reference):
                continue
            match = re.match(r"(?:spmd|spt)(?:\.\w+)+", literal.astext())
            entry = entries.get(match[0]) if match else None
            if entry is None:
                continue
            link = nodes.reference("", "", internal=True)
            link["refuri"] = f"{self.app.builder.get_relative_uri(self.env.docname, entry.docname)}#{entry.node_id}"
            literal.replace_self(link)
            link += literal


def without_links_outward(app: Any, docname: str, source: list[str]) -> None:
    """Name files of the repository that are not part of the site, to which documents in the repository have links."""
    folder = Path(app.srcdir)
    here = (folder / docname).parent

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], match[2].partition("#")[0]
        if "://" in target or not target:
            return match[0]
        path = Path(os.path.normpath(here / target))
        if path.is_relative_to(folder) or not path.exists():
            return match[0]
        name = f"`{path.relative_to(folder.parent)}`"
        return name if text.strip("`") in name else f"{text} ({name})"

    source[0] = re.sub(r"(?<![!\]])\[([^\]]+)\]\((\.\.?/[^)\s]+)\)", replaced, source[0])


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", without_links_outward)
    app.add_post_transform(LinkedNames)
    return {"parallel_read_safe": True}
