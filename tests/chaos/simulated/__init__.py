"""A whole cluster in one thread and in simulated time: production code on a simulated machine, from a seed."""
