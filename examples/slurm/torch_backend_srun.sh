#!/bin/bash
# Trains the digits with torch's DistributedDataParallel on ddl, on two nodes with two ranks each, which Slurm starts:
#
#     sbatch examples/slurm/torch_backend_srun.sh
#
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=2
#SBATCH --mem=250G
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out

# Here a cluster loads its modules, or activates the environment that ddl is installed in.
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1} # else each rank takes all cores of its node
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_NODELIST" | head -n 1) MASTER_PORT=29500

# torch.distributed reads these; Slurm sets others.
srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID python examples/torch_backend/ddp.py'
