"""Pipeline parallelism: stages that run the model's forward, and schedules of micro-batches."""
