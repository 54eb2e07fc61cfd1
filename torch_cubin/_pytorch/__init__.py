"""What leans on names and layouts that PyTorch keeps private."""
