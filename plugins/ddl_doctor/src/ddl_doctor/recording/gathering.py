"""Provide a directory for the ranks' parts of a timeline, and merge the parts into one trace at the end of the job."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ddl_doctor.recording.merge import merge
from ddl_doctor.recording.part_writer import MADE_HERE, make_directory, parts_beside, remove_directory
from ddl_doctor.recording.starting import wanted_file
from ddlcore.config.loading import Settings
from ddlcore.launch.job.watch import RunningRanks, Watch, WatchedJob
from ddlcore.observe.timeline_parts import parts_in

log = logging.getLogger("ddl")


class Gathering(Watch):
    """The timeline of one job: the file of the trace, and the directory for the parts that the ranks write.

    Nothing happens if no timeline is wanted, because the setting is "dynamic".
    """

    @classmethod
    def check(cls, settings: Settings) -> None:
        file = wanted_file(settings)
        if file is not None and file.is_dir():
            raise ValueError(f"--timeline {settings.text('timeline')} is a directory; name a file")

    def __init__(self, job: WatchedJob) -> None:
        """Prepare the directory for the parts.

        Parts that an earlier job has left in the directory are removed. Raises ValueError, with a message of one line,
        if the directory cannot be used, for example because it contains files that ddl did not write.
        """
        self._size = sum(map(bool, job.hosts))  # of the ranks that are started at first
        self._begun = self._told = False
        self._file = wanted_file(job.settings)
        if self._file is None:
            return
        wanted = f"--timeline {job.settings.text('timeline')}"
        directory = parts_beside(self._file)
        try:
            remove_directory(directory)
            make_directory(directory)
            if directory.is_symlink() or any(path.name != MADE_HERE for path in directory.iterdir()):
                raise ValueError(
                    f"{wanted}: the ranks' parts would stand in {directory}, "
                    "which holds what ddl did not write; move that away, or name another file"
                )
        except OSError as error:
            raise ValueError(f"{wanted}: {error.strerror} ({error.filename})") from None
        self.timeline_dir = directory

    def begin(self, ranks: RunningRanks) -> None:
        self._begun = True

    def finished(self, say: Callable[[str], None]) -> None:
        """Merge the parts into the trace file, and remove the directory."""
        if self._file is None or self.timeline_dir is None:
            return
        self._told = True
        parts = parts_in(self.timeline_dir)
        if not parts:
            remove_directory(self.timeline_dir)
            say("no timeline was written: no rank has called init(), or ddl-doctor is off on their hosts")
            return
        try:
            problems = merge(parts, self._file)
        except OSError as error:
            say(f"timeline {self._file}: {error.strerror}; the ranks' parts are in {self.timeline_dir}")
            return
        for problem in problems:
            say(f"timeline: {problem}")
        ranks = {part.name.split(".")[0] for part in parts}
        some = "" if len(ranks) >= self._size else f" of {len(ranks)} ranks out of {self._size}"
        file = self._file
        say(f"timeline{some} in {file}; `ddl timeline summary {file}` reads it, ui.perfetto.dev shows it")
        remove_directory(self.timeline_dir)

    def close(self) -> None:
        """Remove the directory if no rank has written to it. Otherwise keep parts that were not merged."""
        if self.timeline_dir is None or not self.timeline_dir.exists():
            return
        if not self._begun or not parts_in(self.timeline_dir):
            remove_directory(self.timeline_dir)
        elif not self._told:  # the job was interrupted
            log.warning("timeline: the ranks' parts are in %s; `ddl timeline merge` merges them", self.timeline_dir)
