"""Every answer that MARS gives to a key of ds_config.json, as data: what test_compatibility.py runs, and what the table
in ds_configs/README.md is printed from (``python -m tests.compatibility`` prints it).
"""

from tests.compatibility.layout import LAYOUT
from tests.compatibility.row import Row

ROWS: list[Row] = [*LAYOUT]
