"""What tools/bench_training.py is made of: the models, the contenders that train them, and the report."""
