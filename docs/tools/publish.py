"""Add a built site to the folder of all published versions: `python docs/tools/publish.py build/site pages v0.1`.

The folder then holds pages/v0.1, pages/versions.json with the names of all versions, newest first, for the selector in
the sidebar, and pages/index.html, which leads to the newest release, or to "latest" before the first one.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

__all__ = ["publish"]


def _order(name: str) -> tuple[int, ...]:
    """Newest releases first; what is no release after them."""
    return tuple(-int(n) for n in re.findall(r"\d+", name)) if re.fullmatch(r"v\d+(\.\d+)*", name) else (1,)


def publish(site: Path, folder: Path, name: str) -> list[str]:
    """Put the site into `folder` as version `name`, in place of one of that name. Returns the names of all versions."""
    if not (site / "index.html").exists():
        raise SystemExit(f"{site} has no index.html: build the site first")
    if not re.fullmatch(r"[\w.]+", name):
        raise SystemExit(f"got the name {name!r}, needed letters, digits and dots, as in v0.1")
    if (folder / name).exists():
        shutil.rmtree(folder / name)
    shutil.copytree(site, folder / name)
    names = sorted((path.parent.name for path in folder.glob("*/index.html")), key=lambda n: (_order(n), n))
    (folder / "versions.json").write_text(json.dumps(names))
    target = f"{names[0]}/index.html"
    (folder / "index.html").write_text(
        f'<!doctype html><meta charset="utf-8"><title>spmd</title><meta http-equiv="refresh" content="0; url={target}">'
        f'<a href="{target}">The documentation of spmd</a>\n'
    )
    (folder / ".nojekyll").touch()
    return names


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    print(*publish(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
