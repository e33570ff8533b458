"""What tools/bench_hierarchical.py runs on the hosts of a test cluster."""
