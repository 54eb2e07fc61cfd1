"""Runs a function in a forked child: the driver is opened once a process, and devices stay open."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable


def forked(function: Callable[[], object]) -> object:
    """What the function returned, by JSON; a failure of it fails here."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            message = {"result": function()}
        except BaseException:  # the child must always end here
            message = {"error": traceback.format_exc()}
        with os.fdopen(write, "w") as file:
            json.dump(message, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"the child ended with status {status}"
    message = json.loads(text)
    assert "error" not in message, message["error"]
    return message["result"]


def launches_of(driver, call: Callable[[], object]) -> list[dict]:
    """What a call launches on the stand-in driver, in a child of its own."""

    def run() -> list:
        call()
        return driver.launches()

    return forked(run)


def error_of(function: Callable[[], object]) -> list[str]:
    """The class and message of the error that a function raises; empty where it raises none."""
    try:
        function()
    except Exception as error:  # which one is the question
        return [type(error).__name__, str(error)]
    return []


__all__ = ["error_of", "forked", "launches_of"]
