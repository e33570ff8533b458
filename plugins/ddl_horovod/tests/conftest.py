"""Little logging of TensorFlow, and one compute thread per rank, because ranks are threads here."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # must be set before TensorFlow is imported
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
