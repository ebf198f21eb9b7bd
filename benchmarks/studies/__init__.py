"""What the long benchmarks are made of, one folder for each script."""
