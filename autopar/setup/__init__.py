"""Apply a plan to a model: check the call, run the steps in order, and keep the state."""
