"""What the tests have for `pip`: installs projects that lie on this disk, by a link and the metadata, and no others.

Nothing is built and nothing is fetched; `make release-check` does so, from wheels.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ddlcore.config.file import read_toml


def install(folder: Path, site: Path) -> None:
    """Puts the packages in ``folder``/src where ``site`` is looked through."""
    project: Any = read_toml(folder / "pyproject.toml")["project"]
    for source in (folder / "src").iterdir() if (folder / "src").is_dir() else ():
        link = site / source.name
        if not link.exists():
            link.symlink_to(source.resolve())
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = project.get("entry-points", {}).get("ddlcore.plugins.v2", {})
    (info / "entry_points.txt").write_text(
        "[ddlcore.plugins.v2]\n" + "".join(f"{name} = {module}\n" for name, module in points.items())
    )


def main() -> None:
    for word in sys.argv[1:]:
        name = word.partition("[")[0]
        if name.startswith("."):
            here = Path(os.environ["PAGE_FOLDER"])
            if not (here / "pyproject.toml").is_file():
                here = Path(__file__).parents[2]  # a page of docs/ means the clone
            folder = (here if name == "." else Path(name)).resolve()
            install(folder, Path(os.environ["PAGE_SITE"]))


if __name__ == "__main__":
    main()
