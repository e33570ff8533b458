#!/bin/bash
# Trains the digits on two nodes with two ranks each, which Slurm itself starts:
#
#     sbatch examples/slurm/torch_srun.sh
#
# One rank a GPU: --ntasks-per-node is the number of GPUs of a node that --gres asks for.
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --mem=250G
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

# Here a cluster loads its modules, or activates the environment that ddl is installed in.
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1} # else each rank takes all cores of its node

srun python examples/torch_digits.py
