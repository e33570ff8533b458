"""Test clusters on one machine: hosts in network namespaces (``TestCluster``), and a Slurm cluster (``Slurm``)."""

from tools.test_cluster.cluster import Host, TestCluster
from tools.test_cluster.possible import why_no_cluster
from tools.test_cluster.slurm import Slurm, why_no_slurm

__all__ = ["Host", "Slurm", "TestCluster", "why_no_cluster", "why_no_slurm"]
