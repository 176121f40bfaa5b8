"""Plan, train and compare sharded PyTorch runs."""
