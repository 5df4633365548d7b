"""A plan applied to a model: the call, checked; the steps in order; the state that they leave."""
