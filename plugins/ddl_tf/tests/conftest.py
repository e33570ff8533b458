"""What holds for all TensorFlow tests: a quiet library, one compute thread a rank, for the ranks are threads already."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before anything imports TensorFlow
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
