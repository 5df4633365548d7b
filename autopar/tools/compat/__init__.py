"""Private names of torch that only tools need."""
