"""What drop_in() serves, why it leaves a call to PyTorch, and the report of both."""
