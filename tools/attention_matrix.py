"""Writes docs/attention.md's table of which kernels serve which option, on the stand-in driver.

python tools/attention_matrix.py
"""

from __future__ import annotations

import sys

import fake_driver_page

if __name__ == "__main__":
    sys.exit(fake_driver_page.write("fake_attention_matrix"))
