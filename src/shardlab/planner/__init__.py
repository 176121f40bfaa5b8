"""Predicts memory and time of a run without its GPUs: simulated accelerator, caching-allocator model, plan."""
