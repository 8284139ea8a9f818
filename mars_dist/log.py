"""The package's one logger: what it has to say reaches a user who has configured no logging."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("mars_dist")


class _WhenNobodyListens(logging.StreamHandler):
    """Writes to standard error unless the application has handlers of its own on the root logger."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)


def show() -> None:
    """Print messages from INFO upwards by default. ``logging.getLogger("mars_dist").setLevel(...)`` changes it."""
    if not logger.handlers:
        handler = _WhenNobodyListens()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
