"""What Horovod's packages for frameworks have in common."""
