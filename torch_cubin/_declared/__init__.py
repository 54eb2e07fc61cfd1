"""Declared ops: tracing definitions into contracts, calls of them, packages."""
