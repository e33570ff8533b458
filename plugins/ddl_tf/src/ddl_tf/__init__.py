"""TensorFlow for ddl: everything that a training script imports, under Horovod's names."""
