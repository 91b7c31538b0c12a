"""The modules of `examples/gpt2.py`: the flags, the plan, the training loop, the
report."""
