"""What scripts use of Horovod's launcher."""
