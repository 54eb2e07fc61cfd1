"""inspect(): the contents of a device code file, and how they are shown."""
