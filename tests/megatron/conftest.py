"""Tests under `arranged` run in a process of their own, where torch's CUDA is replaced: see `test_arranged.py`."""

import os

collect_ignore = [] if "SSDTRAIN_TESTS_ARRANGED" in os.environ else ["arranged"]
