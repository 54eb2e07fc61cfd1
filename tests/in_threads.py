"""Runs a function in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable


def in_threads(work: Callable[..., object], calls: Iterable[tuple]) -> None:
    """work(*arguments) for each of `calls`, in a thread of its own. Raises the first error after
    all threads have ended."""
    errors: list[BaseException] = []

    def guarded(*arguments: object) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=arguments) for arguments in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
