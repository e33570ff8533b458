"""Provide a directory for the ranks' parts of a timeline, and merge the parts into one trace at the end of the job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddlcore.config.loading import Settings
from ddlcore.observe.merge import merge, parts_in
from ddlcore.observe.timeline import MADE_HERE, make_directory, parts_beside, remove_directory


@dataclass(frozen=True)
class Gathering:
    """The timeline of one job: the file of the trace, and the directory for the parts that the ranks write."""

    file: Path
    directory: Path  # for the parts of all ranks; agents send the parts of the ranks on their hosts

    @classmethod
    def of(cls, settings: Settings) -> Gathering | None:
        """Prepare the directory for the parts, and return a Gathering. Return None if no timeline is wanted.

        Parts that an earlier job has left in the directory are removed. Raises ValueError, with a message of one line,
        if the directory cannot be used, for example because it contains files that ddl did not write.
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
                    f"--timeline {wanted}: the ranks' parts would stand in {directory}, "
                    "which holds what ddl did not write; move that away, or name another file"
                )
        except OSError as error:
            raise ValueError(f"--timeline {wanted}: {error.strerror} ({error.filename})") from None
        return cls(file, directory)

    def drop(self) -> None:
        """Remove the directory, because no rank was started or because the trace was written."""
        remove_directory(self.directory)

    def finish(self, say: Callable[[str], None], size: int) -> None:
        """Merge the parts into the trace file, and remove the directory. Call this after all ranks have ended.

        ``size`` is the number of ranks that were started at first.
        """
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
        some = "" if len(ranks) >= size else f" of {len(ranks)} ranks out of {size}"
        say(f"timeline{some} in {self.file}; `ddl timeline summary {self.file}` reads it, ui.perfetto.dev shows it")
        self.drop()
