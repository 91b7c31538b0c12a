"""What `examples/gpt2.py` is made of, beside its loop: the flags, the plan, the
report."""
