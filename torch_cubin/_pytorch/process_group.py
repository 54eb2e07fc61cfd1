"""The key-value store of torch.distributed's default process group."""

from __future__ import annotations

import datetime
import sys
from typing import Any

from torch_cubin._pytorch.internals import Feature

STORE = Feature("one calibration for all ranks", "every rank calibrates its GPU by itself")


def rank() -> int | None:
    """This process's rank; None outside a process group of several."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank() if distributed.get_world_size() > 1 else None


def _store() -> Any:
    get = STORE.find("distributed.distributed_c10d._get_default_store", None)
    return None if get is None else get()


def publish(key: str, text: str) -> None:
    store = _store()
    if store is not None:
        store.set(key, text)


def published(key: str, seconds: float) -> str | None:
    """Waits for a text that another rank publishes; None if it does not in time."""
    store = _store()
    if store is None:
        return None
    try:
        store.wait([key], datetime.timedelta(seconds=seconds))
    except RuntimeError:  # DistStoreError, which older versions lack
        return None
    return store.get(key).decode()


__all__ = ["publish", "published", "rank"]
