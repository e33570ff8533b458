"""What the suite of process groups runs on each rank: random programs of torch.distributed."""
