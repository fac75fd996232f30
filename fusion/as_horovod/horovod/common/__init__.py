"""What Horovod has beside its frameworks."""
