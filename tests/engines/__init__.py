"""Every engine that MARS answers to, as data: what test_engines.py runs, and what the table in launch/README.md is
printed from (``python -m tests.engines`` prints it).
"""

from tests.engines.data_parallel import DATA_PARALLEL
from tests.engines.launched import LAUNCHED
from tests.engines.meshes import MESHES
from tests.engines.row import Row

ROWS: list[Row] = [*DATA_PARALLEL, *MESHES, *LAUNCHED]
