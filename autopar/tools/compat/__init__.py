"""Private names of torch that only tools need, and probes of all private names."""
