"""Runs many programs in each of a few worlds of processes or threads, and compares what the ranks saw; knows no pytest.

``python -m tests.semantics.worlds shm/00/on/replay --seeds 0-99`` runs the programs of these seeds on two ranks of
one host by shared memory; ``--seed 17 --show`` prints one of them. It imports torch once, and forks each world from
there. What happens in a world is told apart from what was to happen by the process that started it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import ddl_torch as ddl
import torch

from ddlcore.control.liveness import describe_exit
from ddlcore.control.server import Server
from ddlcore.errors import DdlInternalError
from ddlcore.messages.ranks import LaunchedRank
from ddlcore.plug.settings import settings_of
from ddlcore.process.build import build_sessions
from ddlcore.process.environment import Environment
from ddlcore.testing import World
from ddlcore.types import Placement
from tests.semantics.acting import Entry, differ
from tests.semantics.acts import act
from tests.semantics.choices import Seeded
from tests.semantics.oracle import expected
from tests.semantics.program import Program, Surroundings, make

__all__ = ["Spec", "check", "main", "program_of", "run_function", "run_in_threads", "warm_up"]

PROGRAM_S = 120.0  # of one program, however busy the machine is
THREADS_S = 60.0  # the same in a world of threads, where hypothesis repeats what hangs
OTHERS_S = 20.0  # for the other ranks to say what they saw of one that failed
ENDS_S = 60.0  # for a world to end

_context = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Spec:
    """A kind of world, written ``backend/hosts/overlap/replay[/interrupts]``: ``shm+gloo/0011/on/replay``."""

    backend: str
    hosts: tuple[int, ...]
    overlap: bool
    replay: bool
    interrupts: bool = False

    @staticmethod
    def parse(text: str) -> Spec:
        backend, hosts, overlap, replay, *more = text.split("/")
        return Spec(backend, tuple(map(int, hosts)), overlap == "on", replay == "replay", more == ["interrupts"])

    def __str__(self) -> str:
        words = [self.backend, "".join(map(str, self.hosts)), "on" if self.overlap else "off"]
        words += ["replay" if self.replay else "negotiated", *(["interrupts"] if self.interrupts else [])]
        return "/".join(words)

    @property
    def surroundings(self) -> Surroundings:
        return Surroundings(len(self.hosts), self.overlap, self.interrupts)

    @property
    def settings(self) -> dict[str, object]:
        return {"overlap": "on" if self.overlap else "off", "replay": self.replay}


def warm_up() -> None:
    """Have torch import what it imports at first use, some seconds of work, before there are ranks that wait for each other."""
    torch.set_num_threads(1)
    spec = Spec.parse("threads/0/off/replay")
    for seed in range(3):
        expected(program_of(spec, seed))


def program_of(spec: Spec, seed: int) -> Program:
    return make(Seeded(f"{spec.surroundings} {seed}"), spec.surroundings)


def check(program: Program, traces: Sequence[Sequence[Entry]], wanted: Sequence[Sequence[Entry]]) -> str:
    """What is wrong with what the ranks saw; "" where nothing is."""
    found = (differ(want, traces.__getitem__, rank) for rank, want in enumerate(wanted))
    return next(filter(None, found), "")


def run_in_threads(spec: Spec, programs: Sequence[Program]) -> str:
    """Runs them one after the other in one world of threads of this process; what is wrong with the first that fails."""
    with World(len(spec.hosts), backend=spec.backend, settings=spec.settings, hosts=spec.hosts) as world:
        for program in programs:
            wanted = expected(program)
            traces = world.run(functools.partial(_in_thread, program), deadline_s=THREADS_S)
            wrong = check(program, traces, wanted)
            if wrong:
                return f"{wrong}\n{program}"
    return ""


def _in_thread(program: Program, rank: int, job: Any) -> list[Entry]:
    return act(program, rank)


# --- worlds of processes


class _Processes:
    """The ranks of one world, and the server they meet at. Made by a process that has no threads yet."""

    def __init__(self, spec: Spec, play: Callable[[int, Connection], None]) -> None:
        """Each rank calls ``play(rank, pipe)`` when it has been told where to meet."""
        self.ranks: list[tuple[Any, Connection]] = []
        size = len(spec.hosts)
        pipes = [_context.Pipe() for _ in range(size)]  # (the rank's end, ours)
        for rank in range(size):
            process = _context.Process(target=_begin, args=(play, rank, pipes))
            process.start()
            self.ranks.append((process, pipes[rank][1]))
        for theirs, _ in pipes:
            theirs.close()
        os.environ.update(_variables(spec))
        settings, registry = settings_of(os.environ)
        self.server = Server(size, build_sessions(size, settings, registry))
        self.server.start()
        for rank, (_, mine) in enumerate(self.ranks):
            environment = Environment(Placement(rank, spec.hosts), self.server.job_file)
            mine.send({**_variables(spec), **environment.variables()})

    def hear(self, seed: int | None) -> list[tuple[str, Any]]:
        """What each rank says of this seed: ("trace", entries), ("error", (text, is named)), or ("hangs", "")."""
        said: dict[int, tuple[str, Any]] = {}
        by_pipe = {mine: rank for rank, (_, mine) in enumerate(self.ranks)}
        until_s = time.monotonic() + PROGRAM_S
        while by_pipe and (ready := wait(list(by_pipe), max(0.0, until_s - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = by_pipe.pop(pipe)
                try:
                    word, about, what = pipe.recv()
                except (EOFError, OSError):
                    process = self.ranks[rank][0]
                    process.join(5.0)
                    self.server.rank_ended(LaunchedRank(rank), describe_exit(process.exitcode or 0))
                    word, about, what = "error", seed, (f"ended with {process.exitcode}", False)
                assert about == seed, f"rank {rank} told of {about}, not of {seed}"
                said[rank] = word, what
                if word == "error":
                    until_s = min(until_s, time.monotonic() + OTHERS_S)
        return [said.get(rank, ("hangs", "")) for rank in range(len(self.ranks))]

    def close(self, kill: bool) -> str:
        """Ends all; which ranks did not end by themselves, where they should have."""
        hung = []
        until_s = time.monotonic() + (0.0 if kill else ENDS_S)
        for rank, (process, mine) in enumerate(self.ranks):
            while not kill and process.is_alive() and time.monotonic() < until_s:
                process.join(0.05)
                for other, (one, _) in enumerate(self.ranks):
                    if not one.is_alive():
                        self.server.rank_ended(LaunchedRank(other), describe_exit(one.exitcode))
            if process.is_alive():
                hung.append(rank)
                process.kill()
                process.join()
            mine.close()
        self.server.close()
        return "" if kill or not hung else f"ranks {hung} did not end"

    def stacks(self) -> None:
        """Every rank that lives prints its threads' stacks."""
        for process, _ in self.ranks:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR2)
        time.sleep(1.0)


def _variables(spec: Spec) -> dict[str, str]:
    return {
        "DDL_BACKEND": spec.backend,
        "DDL_OVERLAP": "on" if spec.overlap else "off",
        "DDL_REPLAY": str(int(spec.replay)),
        "DDL_CONTROL_ADDRESS": "tcp://127.0.0.1:0" if len(set(spec.hosts)) > 1 else "",
        "DDL_NETWORK_INTERFACE": "127.0.0.1" if len(set(spec.hosts)) > 1 else "",
    }


def _begin(play: Callable[[int, Connection], None], rank: int, pipes: Sequence[tuple[Connection, Connection]]) -> None:
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    # What other tests have left in the process that was forked is not for this one to destroy: destructors of frameworks may
    # wait for threads that a fork does not copy.
    gc.freeze()
    for other, (theirs, ours) in enumerate(pipes):
        ours.close()
        if other != rank:
            theirs.close()
    out = pipes[rank][0]
    os.environ.update(out.recv())
    play(rank, out)


def _play(spec: Spec, seeds: Sequence[int], rank: int, out: Connection) -> None:
    """One rank: all programs in one life of ddl. One that fails ends it, for who knows what the others wait for."""
    seed = seeds[0]
    try:
        ddl.init()
        for seed in seeds:
            out.send(("trace", seed, act(program_of(spec, seed), rank)))
        out.send(("trace", None, ddl.stats()["buckets_replayed"]))
        ddl.shutdown()
    except Exception as error:
        out.send(("error", seed, (traceback.format_exc(), isinstance(error, DdlInternalError))))
        time.sleep(OTHERS_S)  # who ends is lost to the others, which then say nothing else
        os._exit(1)


def _call(function: Callable[[int, int], Any], size: int, rank: int, out: Connection) -> None:
    try:
        out.send(("trace", None, function(rank, size)))
    except Exception:
        out.send(("error", None, (traceback.format_exc(), False)))
        raise


def run_function(spec: Spec, function: Callable[[int, int], Any]) -> list[Any]:
    """``function(rank, size)`` on every rank of a world; the results, by rank. RuntimeError where one fails."""
    mine, theirs = _context.Pipe(duplex=False)

    def world() -> None:
        ranks = _Processes(spec, functools.partial(_call, function, len(spec.hosts)))
        said = ranks.hear(None)
        failed = any(word != "trace" for word, _ in said)
        if any(word == "hangs" for word, _ in said):
            ranks.stacks()
        theirs.send((said, ranks.close(kill=failed)))

    process = _context.Process(target=world)
    process.start()
    theirs.close()
    said, hung = mine.recv()
    process.join()
    mine.close()
    wrong = [f"rank {rank} {word}: {what}" for rank, (word, what) in enumerate(said) if word != "trace"]
    if wrong or hung:
        raise RuntimeError("\n".join([f"{spec}: {hung}", *wrong]))
    return [what for _, what in said]


def _world(spec: Spec, seeds: Sequence[int], out: Connection) -> None:
    """One world, from its first program to the first that fails."""
    world = _Processes(spec, functools.partial(_play, spec, seeds))
    size = len(spec.hosts)
    for place, seed in enumerate(seeds):
        program = program_of(spec, seed)
        wanted = expected(program)
        said = world.hear(seed)
        words = [word for word, _ in said]
        if words == ["trace"] * size:
            out.send(("done", seed, check(program, [trace for _, trace in said], wanted)))
            continue
        if "hangs" in words:
            world.stacks()
        told = [f"rank {rank} {word}: {what[0] if word == 'error' else ''}" for rank, (word, what) in enumerate(said)]
        world.close(kill=True)
        named = spec.interrupts and all(word == "error" and what[1] for word, what in said)
        if named:
            lines = [what[0].strip().splitlines()[-1] for _, what in said]
            print(f"{spec}, seed {seed} ended with named errors, as an interrupt may: {lines}", file=sys.stderr)
        out.send(("over", place, "" if named else "\n".join(told)))
        return
    replayed = world.hear(None)[0][1]
    out.send(("ends", replayed, world.close(kill=False)))


def _run(spec: Spec, seeds: Sequence[int]) -> Iterator[tuple[str, int, str]]:
    """(what, seed or number, what is wrong), as long as there are programs: a world that is over is followed by another."""
    left = list(seeds)
    while left:
        mine, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_world, args=(spec, left, theirs))
        process.start()
        theirs.close()
        over = len(left)
        last, done = "", 0
        try:
            while True:
                what, number, wrong = mine.recv()
                last = what
                done += what == "done"
                if what == "over":
                    over = number + 1
                    number = left[number]
                yield what, number, wrong
        except EOFError:
            pass
        process.join()
        mine.close()
        if last not in ("over", "ends"):
            yield "over", left[min(done, len(left) - 1)], f"the world's process ended with {process.exitcode}"
            return
        left = left[over:]


def _threads(spec: Spec, seeds: Sequence[int]) -> Iterator[tuple[str, int, str]]:
    """As ``_run``, with a thread for each rank."""
    left = list(seeds)
    while left:
        over = len(left)
        with World(len(spec.hosts), backend=spec.backend, settings=spec.settings, hosts=spec.hosts) as world:
            for place, seed in enumerate(left):
                program = program_of(spec, seed)
                try:
                    traces = world.run(functools.partial(_in_thread, program), deadline_s=THREADS_S)
                except Exception:
                    yield "over", seed, traceback.format_exc()
                    over = place + 1
                    break
                yield "done", seed, check(program, traces, expected(program))
            else:
                yield "ends", world.jobs[0].stats()["buckets_replayed"], ""
        left = left[over:]


def main(arguments: Sequence[str]) -> int:
    """Prints one line of JSON for each kind of world: how many programs ran, and those that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="+", help="backend/hosts/overlap/replay[/interrupts][@FIRST-LAST], seeds")
    parser.add_argument("--seeds", default="0-19", help="FIRST-LAST, where a world does not say")
    parser.add_argument("--seed", type=int, help="one alone")
    parser.add_argument("--show", action="store_true", help="print the programs, and run none")
    given = parser.parse_args(arguments)
    warm_up()
    failed = 0
    for text in given.specs:
        world, _, own = text.partition("@")
        spec = Spec.parse(world)
        first, last = (given.seed, given.seed) if given.seed is not None else map(int, (own or given.seeds).split("-"))
        seeds = range(first, last + 1)
        if given.show:
            print(*(f"# {seed}\n{program_of(spec, seed)}" for seed in seeds), sep="\n")
            continue
        began_s = time.monotonic()
        ran, replayed, worlds, failures = 0, 0, 0, []
        for what, number, wrong in _threads(spec, seeds) if "threads" in spec.backend else _run(spec, seeds):
            ran += what != "ends"
            worlds += what != "done"
            replayed += number if what == "ends" else 0
            if wrong:
                failures.append(number)
                again = f"python -m tests.semantics.worlds {spec} --seed {number}"
                print(
                    f"--- {spec}, seed {number}: {wrong}\n{program_of(spec, number)}\nagain: {again}", file=sys.stderr
                )
        failed += len(failures)
        report: dict[str, object] = {"spec": str(spec), "programs": ran, "failed": failures, "worlds": worlds}
        report |= {"replayed": replayed, "seconds": round(time.monotonic() - began_s, 1)}
        print(json.dumps(report), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
