#!/bin/bash
# Trains the digits on two nodes with two ranks each, started by `ddl run`, which finds Slurm's allocation by itself:
#
#     sbatch examples/slurm/torch_ddl_run.sh
#
# The output is marked with ranks, and a rank that fails is named.
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --mem=250G
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

# Here a cluster loads its modules, or activates the environment that ddl is installed in.

ddl run python examples/torch_digits.py
