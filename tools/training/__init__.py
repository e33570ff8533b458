"""What tools/bench_training.py is made of: alternation, report and chart for all, and a folder for each framework."""
