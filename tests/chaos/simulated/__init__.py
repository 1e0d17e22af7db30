"""A whole cluster in one thread and in simulated time: production code on a made-up machine, from a seed."""
