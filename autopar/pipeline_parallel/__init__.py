"""Pipeline parallelism: stages made from a model's own forward, and the schedules that run them."""
