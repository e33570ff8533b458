"""TensorFlow's data service for a training: other processes prepare the batches."""
