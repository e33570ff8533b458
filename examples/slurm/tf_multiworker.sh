#!/bin/bash
# TensorFlow's own MultiWorkerMirroredStrategy on two nodes, one worker each:
#
#     sbatch examples/slurm/tf_multiworker.sh
#
# `ddl run` gives every worker its TF_CONFIG, with the names of the nodes, free ports and the worker's own index.
#SBATCH --job-name=workers
#SBATCH --nodes=2
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=14
#SBATCH --gres=gpu:1
#SBATCH --mem=64000
#SBATCH --time=01:00:00
#SBATCH --output=%j.out
#SBATCH --error=%j.err

# Here a cluster loads its modules, or activates the environment that ddl is installed in.

ddl run python examples/foreign/tf_multiworker.py
