# Python's locks of module data.
"""Locks that a fork leaves free in the child, where the thread that held one does not exist."""

from __future__ import annotations

import os
import threading
from typing import Any


def fork_safe_lock() -> Any:
    """A reentrant lock for a module's data: never freed, so not for objects that come and go."""
    lock: Any = threading.RLock()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)
    return lock
