"""Trains by elastic.run with one more part of PyTorch, which the environment names; rank KILL is killed at step AT, once.

A folder in FOLDER has a file for each process that has the state; the training stays before its end until the file
``enough`` is there and RANKS ranks, or more, are there.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import ddl_torch as ddl
import torch
from ddl_torch import elastic
from torch.utils.data import DataLoader

from plugins.ddl_torch.tests import elastic_uses as uses
from tests.faults.marks import has_state

use, folder = os.environ["USE"], Path(os.environ["FOLDER"])
steps, pause_s = int(os.environ["STEPS"]), float(os.environ["PAUSE_S"])
kill, at = map(int, os.environ.get("KILL", "-1:-1").split(":"))
until_s = time.monotonic() + float(os.environ.get("PATIENCE_S", "60"))

ddl.init()
ranks = int(os.environ["RANKS"])
torch.set_num_threads(1)
model = uses.model_of(use)
optimizer = ddl.DistributedOptimizer(uses.optimizer_of(model), named_parameters=model.named_parameters())
data = uses.Rows()
state = elastic.TorchState(
    model,
    optimizer,
    scheduler=uses.scheduler_of(optimizer),
    scaler=uses.scaler_of(use),
    sampler=elastic.ElasticSampler(data, seed=4),
    done=0,
)
call = uses.compiled(use, model)


def wait_for_the_end(state: elastic.TorchState) -> None:
    while state.done == steps - 4 and time.monotonic() < until_s:
        if ddl.size() >= ranks and (folder / "enough").exists():
            return
        time.sleep(0.02)
        state.check_host_updates()  # ranks are lost and join here, too


@elastic.run
def train(state: elastic.TorchState) -> None:
    print(f"begins at {state.done} on {ddl.size()}", flush=True)
    has_state()
    rows = uses.GLOBAL_BATCH // ddl.size()
    workers = 2 if use in ("workers", "persistent") else 0
    loader = DataLoader(data, rows, sampler=state.sampler, num_workers=workers, persistent_workers=use == "persistent")
    sampler = state.sampler
    while state.done < steps:
        for number, samples in enumerate(loader):
            wait_for_the_end(state)
            loss = uses.loss_of(use, model, call, samples, ddl.size(), state.done)
            if (ddl.rank(), state.done) == (kill, at) and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            uses.apply(use, loss, state.optimizer, state.scheduler, state.scaler)
            sampler.record_batch(number, rows)
            state.done += 1
            state.commit()
            time.sleep(pause_s)
            if state.done == steps:
                return
        sampler.set_epoch(sampler.epoch + 1)


train(state)
torch.save({**model.state_dict(), "scale": state.scaler.state_dict().get("scale", 0.0)}, folder / f"result{ddl.rank()}")
print(f"result {state.done} on {ddl.size()}", flush=True)
