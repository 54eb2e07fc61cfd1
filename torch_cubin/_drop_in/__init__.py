"""The calls that drop_in() serves, the reasons for those that it leaves to PyTorch, and the
report."""
