"""The fenced blocks of README and pages, and what runs each of them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from tests.docs.messages import ROOT

TOP = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


class Block(NamedTuple):
    page: str
    language: str
    text: str

    @property
    def first(self) -> str:
        return self.text.strip().splitlines()[0].strip()


def blocks() -> Iterator[Block]:
    for page in [*TOP, *PAGES]:
        found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.M | re.S)
        for language, text in found:
            yield Block(str(page.relative_to(ROOT)), language, textwrap.dedent(text))


def block(page: str, beginning: str) -> Block:
    """The one of `page` that begins so."""
    (found,) = [one for one in blocks() if one.page == page and one.text.strip().startswith(beginning)]
    return found


HERE = "tests/docs/test_blocks.py"

RUN_BY = {
    ("README.md", "make demo"): "tests/test_readme.py",
    ("README.md", "pip install"): "tests/test_packages.py",
    ("README.md", "import torch, ssdtrain"): "tests/test_readme.py",
    ("README.md", '"ssdtrain"'): "tests/test_readme.py",
    ("README.md", "import ssdtrain_ds"): "tests/test_readme.py",
    ("README.md", "torchrun --nproc_per_node 8 -m ssdtrain_megatron.run"): "tests/megatron/test_run.py",
    ("CONTRIBUTING.md", "make test"): "tests/test_readme.py",
    ("docs/bench.md", "ssdtrain bench"): HERE,
    ("docs/bench.md", "import torch"): HERE,
    ("docs/clusters.md", "torchrun --nproc-per-node 2 -m ssdtrain.cli doctor"): HERE,
    ("docs/codecs.md", "from ssdtrain.codecs"): HERE,
    ("docs/collectives.md", '"ssdtrain"'): "tests/docs/test_pages.py",
    ("docs/collectives.md", "runtime = ssdtrain.attach"): "tests/support/ranks.py",
    ("docs/collectives.md", "def classify"): "tests/integration/test_intercept.py",
    ("docs/compact.md", "runtime = ssdtrain.attach"): HERE,
    ("docs/compact.md", "optimizer ="): "tests/compact/test_lowrank.py",
    ("docs/policy.md", '"offload"'): "tests/docs/test_pages.py",
    ("docs/config.md", "invalid SSDTrain config"): "tests/config/test_document.py",
    ("docs/config.md", "{"): "tests/config/test_document.py",
    ("docs/config.md", "offload:"): "tests/config/test_document.py",
    ("docs/config.md", "--ssdtrain-offload-directories"): "tests/config/test_document.py",
    ("docs/deepspeed.md", "{"): "tests/docs/test_pages.py",
    ("docs/demo.md", "make demo"): "tests/test_readme.py",
    ("docs/demo.md", "import ssdtrain_ds"): HERE,
    ("docs/index.md", "pip install"): "tests/test_packages.py",
    ("docs/index.md", "import torch, ssdtrain"): "tests/docs/test_pages.py",
    ("docs/index.md", "import argparse, deepspeed"): HERE,
    ("docs/index.md", "{"): HERE,
    ("docs/index.md", "import ssdtrain, torch"): HERE,
    ("docs/index.md", "model, optimizer, loader"): HERE,
    ("docs/planner.md", "ssdtrain plan"): HERE,
    ("docs/planner.md", "ssdtrain estimate"): HERE,
    ("docs/planner.md", "runtime = ssdtrain.attach"): "tests/planner/test_plan_auto.py",
    ("docs/planner.md", "from ssdtrain.planner.execute"): HERE,
    ("docs/storage.md", "from ssdtrain.storage"): HERE,
    ("docs/trace.md", '"ssdtrain"'): "tests/docs/test_pages.py",
    ("docs/trace.md", "ssdtrain report"): HERE,
    ("docs/trace.md", "runtime = ssdtrain.attach"): HERE,
    ("docs/watch.md", '"ssdtrain"'): "tests/docs/test_pages.py",
    ("docs/watch.md", "ssdtrain report"): "tests/docs/test_pages.py",
}
"""(page, how the block begins) -> the test file that runs it, or that runs the same with what is at hand."""

NOT_RUN = {
    ("docs/clusters.md", "#SBATCH"): "needs Slurm",
    ("docs/clusters.md", "spec:"): "needs Kubernetes",
    ("docs/megatron.md", "torchrun"): "needs Megatron-LM's pretrain_gpt.py and 8 GPUs",
    ("docs/megatron.md", "[ssdtrain] iteration"): "shows what a log line looks like",
}
"""Blocks that nothing runs, and why. The page says so too, where it is a command."""
