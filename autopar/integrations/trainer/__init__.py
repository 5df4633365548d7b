"""transformers' Trainer with a parallelized model; data-parallel replicas count as its processes."""
