"""transformers' Trainer with a parallelized model: what it takes for the world is the data-parallel axis."""
