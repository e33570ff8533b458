"""Test beds on one machine: hosts that are network namespaces (``Bed``), and a Slurm cluster (``Slurm``)."""

from tools.bed.bed import Bed, Host
from tools.bed.possible import why_no_bed
from tools.bed.slurm import Slurm, why_no_slurm

__all__ = ["Bed", "Host", "Slurm", "why_no_bed", "why_no_slurm"]
