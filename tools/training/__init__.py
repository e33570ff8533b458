"""The parts of tools/bench_training.py: alternation, report and chart for all, and a folder for each framework."""
