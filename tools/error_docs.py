"""Writes docs/errors.md, the message of every error, by causing each on the stand-in driver.

python tools/error_docs.py
"""

from __future__ import annotations

import sys

import fake_driver_page

if __name__ == "__main__":
    sys.exit(fake_driver_page.write("fake_error_docs"))
