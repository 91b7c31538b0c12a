"""Parallel training from small functions: loss -> grad -> step, each parallelism a function from one arrow to the next."""
