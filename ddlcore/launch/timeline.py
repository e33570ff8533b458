"""The launcher's part of a timeline: a place for the ranks' parts, and one trace made of them at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddlcore.config import Settings
from ddlcore.observe.merge import merge, parts_in
from ddlcore.observe.timeline import MADE_HERE, make_directory, remove_directory
from ddlcore.runtime.timeline_switch import parts_beside

__all__ = ["Gathering"]


@dataclass(frozen=True)
class Gathering:
    """Of one job, from before its ranks start until they have ended."""

    file: Path
    directory: Path  # where the parts of this host's ranks are written, and those of others' put

    @classmethod
    def of(cls, settings: Settings) -> Gathering | None:
        """None where no timeline is asked for. Parts that an earlier job has left in its place are taken away.

        Raises ValueError in one line where the file could not be written, or the place of its parts holds what is not ours.
        """
        wanted = settings.text("timeline")
        if not wanted or wanted.upper() == "DYNAMIC":
            return None
        file = Path(wanted).absolute()
        if file.is_dir():
            raise ValueError(f"--timeline {wanted} is a directory; name a file")
        directory = parts_beside(file)
        try:
            remove_directory(directory)
            make_directory(directory)
            if directory.is_symlink() or any(path.name != MADE_HERE for path in directory.iterdir()):
                raise ValueError(
                    f"--timeline {wanted}: the ranks' parts would stand in {directory}, which holds what ddl did not write; "
                    "move that away, or name another file"
                )
        except OSError as error:
            raise ValueError(f"--timeline {wanted}: {error.strerror} ({error.filename})") from None
        return cls(file, directory)

    def drop(self) -> None:
        """No rank was started."""
        remove_directory(self.directory)

    def finish(self, say: Callable[[str], None], size: int) -> None:
        """All ranks have ended, well or not: makes the trace of what they have written."""
        parts = parts_in(self.directory)
        if not parts:
            self.drop()
            say("no timeline was written: no rank has called init()")
            return
        try:
            problems = merge(parts, self.file)
        except OSError as error:
            say(f"timeline {self.file}: {error.strerror}; the ranks' parts are in {self.directory}")
            return
        for problem in problems:
            say(f"timeline: {problem}")
        ranks = {part.name.split(".")[0] for part in parts}
        some = "" if len(ranks) == size else f" of {len(ranks)} ranks out of {size}"
        say(f"timeline{some} in {self.file}; `ddl timeline summary {self.file}` reads it, ui.perfetto.dev shows it")
        self.drop()
