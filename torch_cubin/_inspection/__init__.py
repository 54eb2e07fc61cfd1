"""inspect(): what a file of device code holds, and how that is shown."""
