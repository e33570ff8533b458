"""The manifests of docs/kubeflow.md hold together; the Job's command makes ranks of pods that share a directory alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks import ROOT, blocks
from tools.test_cluster import TestCluster

MANIFESTS: list[Any] = [yaml.safe_load(block.code) for block in blocks("docs/kubeflow.md") if block.language == "yaml"]


def containers(manifest: Any) -> list[tuple[Any, Any]]:
    """Each with the specification of its pod."""
    replicas = manifest["spec"].get("mpiReplicaSpecs", {"": manifest["spec"]}).values()
    pods = [replica["template"]["spec"] for replica in replicas]
    return [(pod, container) for pod in pods for container in pod["containers"]]


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: str(manifest["kind"]))
def test_what_is_mounted_is_there(manifest: Any) -> None:
    """Every mount names a volume of its pod, and every container has an image and a command of strings."""
    for pod, container in containers(manifest):
        volumes = [volume["name"] for volume in pod.get("volumes", ())]
        assert [mount["name"] for mount in container.get("volumeMounts", ())] == volumes
        assert container["image"] and all(isinstance(word, str) for word in container["command"])
        assert all(isinstance(row["value"], str) for row in container.get("env", ()))


@pytest.mark.long
@pytest.mark.processes
def test_the_jobs_pods_are_ranks(new_cluster: Callable[..., TestCluster], tmp_path: Path) -> None:
    """Hosts in the place of pods; the volume is a folder that both see."""
    (job,) = (manifest for manifest in MANIFESTS if manifest["kind"] == "Job")
    ((_, container),) = containers(job)
    told = {row["name"]: row["value"] for row in container["env"]}
    told |= {"WORLD_SIZE": "2", "DDL_RENDEZVOUS_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [word.replace("train.py", str(ROOT / "tests/docs/train.py")) for word in container["command"]]
    command[-1] = command[-1].replace("python", sys.executable)
    cluster = new_cluster(2)
    ranks = [
        cluster.popen(name, command, env=told | {"JOB_COMPLETION_INDEX": str(index)})
        for index, name in enumerate(cluster.names)
    ]
    shown = [rank.communicate(timeout=200) for rank in ranks]
    assert [out for out, _ in shown] == ["rank 0 of 2 is done\n", "rank 1 of 2 is done\n"], shown
