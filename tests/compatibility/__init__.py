"""Every answer that MARS gives to a key of ds_config.json, as data: what test_compatibility.py runs, and what the table
in ds_configs/README.md is printed from (``python -m tests.compatibility`` prints it).
"""

from tests.compatibility.communication import COMMUNICATION
from tests.compatibility.layout import LAYOUT
from tests.compatibility.matrices import MATRICES
from tests.compatibility.model import MODEL
from tests.compatibility.offload import OFFLOAD
from tests.compatibility.row import Row
from tests.compatibility.wrappers import WRAPPERS

ROWS: list[Row] = [*WRAPPERS, *LAYOUT, *MODEL, *MATRICES, *COMMUNICATION, *OFFLOAD]
