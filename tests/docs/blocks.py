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


class Ran(NamedTuple):
    test: str
    """file::function of the test that takes the block from the page and runs it."""
    differs: str = ""
    """What the test changes of what is pasted, and the test of that."""


BLOCKS, PAGE_TESTS, README_TESTS, CONFIG = (
    "tests/docs/test_blocks.py",
    "tests/docs/test_pages.py",
    "tests/test_readme.py",
    "tests/config/test_document.py",
)
IS_A_CONFIG = Ran(f"{PAGE_TESTS}::test_config_blocks_are_configs", "loaded, no training")
INSTALLS = Ran(
    "tests/test_packages.py::test_the_install_commands",
    "without pip's dependencies, which the environment has, and without a compiler",
)
RECIPES = Ran(
    f"{README_TESTS}::test_make_runs_what_is_there",
    "`make --dry-run`: what the recipes start is there; the demo itself runs in tests/examples, smaller",
)

RUN_BY = {
    ("README.md", "make demo"): RECIPES,
    ("README.md", "pip install"): INSTALLS,
    ("README.md", "import torch, ssdtrain"): Ran(
        f"{README_TESTS}::test_the_pytorch_example_runs", "the directory"
    ),
    ("docs/policy.md", "from ssdtrain.offload.policy"): Ran(
        f"{BLOCKS}::test_a_policy_of_ones_own", "what is large"
    ),
    ("README.md", "torchrun --nproc_per_node 8 -m ssdtrain_ds"): Ran(
        f"{README_TESTS}::test_the_deepspeed_commands_run_a_script",
        "one process; the script only looks for the patch",
    ),
    ("ARCHITECTURE.md", "import tempfile"): Ran(
        "tests/docs/test_architecture.py::test_the_model_of_the_engine_agrees_with_the_engine"
    ),
    ("CONTRIBUTING.md", "make test"): RECIPES,
    ("docs/bench.md", "ssdtrain bench"): Ran(
        f"{BLOCKS}::test_bench", "collective: test_bench_between_processes"
    ),
    ("docs/bench.md", "import torch"): Ran(f"{BLOCKS}::test_bench"),
    ("docs/clusters.md", "torchrun --nproc-per-node 2 -m ssdtrain doctor"): Ran(
        f"{BLOCKS}::test_the_doctor_in_ranks"
    ),
    ("docs/codecs.md", "from ssdtrain.codecs"): Ran(f"{BLOCKS}::test_codecs"),
    ("docs/codecs.md", "exact = make_codec"): Ran(f"{BLOCKS}::test_codecs"),
    ("docs/collectives.md", '"ssdtrain"'): IS_A_CONFIG,
    ("docs/collectives.md", "runtime = ssdtrain.attach"): Ran(f"{BLOCKS}::test_collectives"),
    ("docs/collectives.md", "def classify"): Ran(
        f"{BLOCKS}::test_an_adapter", "a communicator that only counts"
    ),
    ("docs/compact.md", "runtime = ssdtrain.attach"): Ran(f"{BLOCKS}::test_compact"),
    ("docs/compact.md", "optimizer ="): Ran(f"{BLOCKS}::test_lowrank", "a group of one rank"),
    ("docs/compact.md", "model = peft"): Ran("tests/compact/test_adapters.py::test_the_example_of_the_page"),
    ("docs/endurance.md", '"offload"'): IS_A_CONFIG,
    ("docs/state.md", "optimizer ="): Ran(f"{BLOCKS}::test_model_state", "the directory and the limit"),
    ("docs/state.md", "config ="): Ran(
        f"{BLOCKS}::test_model_state_on_the_cpu", "the directory and the limit"
    ),
    ("docs/state.md", "planned ="): Ran(
        f"{BLOCKS}::test_model_state_with_a_plan", "the directory and the limit"
    ),
    ("docs/state.md", "losses ="): Ran(f"{BLOCKS}::test_model_state_on_the_cpu"),
    ("docs/config.md", "invalid SSDTrain config"): Ran(f"{CONFIG}::test_the_page_is_what_the_schema_says"),
    ("docs/config.md", "{"): Ran(f"{CONFIG}::test_the_three_examples_ask_for_the_same"),
    ("docs/config.md", "offload:"): Ran(f"{CONFIG}::test_the_three_examples_ask_for_the_same"),
    ("docs/config.md", "--ssdtrain-offload-directories"): Ran(
        f"{CONFIG}::test_the_three_examples_ask_for_the_same"
    ),
    ("docs/deepspeed.md", "{"): IS_A_CONFIG,
    ("docs/demo.md", "make demo"): RECIPES,
    ("docs/demo.md", "import ssdtrain_ds"): Ran(f"{BLOCKS}::test_the_line_of_the_demo"),
    ("docs/index.md", "pip install ."): INSTALLS,
    ("docs/index.md", "import torch, ssdtrain"): Ran(f"{PAGE_TESTS}::test_the_first_example_runs"),
    ("docs/index.md", "import argparse, deepspeed"): Ran(f"{BLOCKS}::test_the_page_for_deepspeed"),
    ("docs/index.md", "{"): Ran(f"{BLOCKS}::test_the_page_for_deepspeed"),
    ("docs/index.md", 'pip install ".[deepspeed]"'): Ran(
        f"{BLOCKS}::test_the_page_for_deepspeed",
        "without pip, and without the extension that DeepSpeed compiles",
    ),
    ("docs/framework.md", "import torch"): Ran(
        "tests/integration/test_toy_framework.py::test_the_toy_trainer_gets_the_same_weights"
    ),
    ("docs/huggingface.md", 'pip install ".[hf]"'): Ran(
        f"{PAGE_TESTS}::test_every_extra_is_on_the_first_page", "without pip: the extra is there"
    ),
    ("docs/huggingface.md", "import torch"): Ran(f"{BLOCKS}::test_the_page_for_the_trainer"),
    ("docs/huggingface.md", "plugin ="): Ran(f"{BLOCKS}::test_the_lines_for_accelerate"),
    ("docs/huggingface.md", "callback ="): Ran(f"{BLOCKS}::test_the_lines_for_lightning"),
    ("docs/huggingface.md", '{"offload"'): IS_A_CONFIG,
    ("docs/huggingface.md", "ssdtrain report"): Ran(
        f"{PAGE_TESTS}::test_the_commands_that_watch_a_run_work", "other directories"
    ),
    ("docs/planner.md", "ssdtrain plan"): Ran(f"{BLOCKS}::test_planner"),
    ("docs/plan-apply.md", "ssdtrain plan"): Ran(f"{BLOCKS}::test_planner", "other directories"),
    ("docs/estimate.md", "ssdtrain estimate my_package"): Ran(f"{BLOCKS}::test_planner"),
    ("docs/estimate.md", "ssdtrain estimate --gpu"): Ran(f"{BLOCKS}::test_planner"),
    ("docs/plan-auto.md", "runtime = ssdtrain.attach"): Ran(
        f"{BLOCKS}::test_automatic_plans", "the directory"
    ),
    ("docs/plan-auto.md", '"ssdtrain"'): IS_A_CONFIG,
    ("docs/plan-apply.md", '{"zero_optimization"'): IS_A_CONFIG,
    ("docs/plan-apply.md", "from ssdtrain.planner.execute"): Ran(
        f"{BLOCKS}::test_a_plan_of_blocks_is_followed"
    ),
    ("docs/storage.md", "from ssdtrain.storage"): Ran(f"{BLOCKS}::test_storage", "directories and sizes"),
    ("docs/trace.md", '"ssdtrain"'): IS_A_CONFIG,
    ("docs/trace.md", "ssdtrain report"): Ran(f"{BLOCKS}::test_trace"),
    ("docs/trace.md", "runtime = ssdtrain.attach"): Ran(f"{BLOCKS}::test_trace"),
    ("docs/watch.md", '"ssdtrain"'): IS_A_CONFIG,
    ("docs/watch.md", "ssdtrain report"): Ran(f"{PAGE_TESTS}::test_the_commands_that_watch_a_run_work"),
}
"""(page, how the block begins) -> what runs it."""

MEGATRON = (
    "needs Megatron-LM's pretrain_gpt.py and 8 GPUs; tests/megatron/test_megatron_lm.py runs the launcher where "
    "MEGATRON_LM_DIR names a checkout"
)
NOT_RUN = {
    ("README.md", "torchrun --nproc_per_node 8 -m ssdtrain_megatron.run"): MEGATRON,
    ("CONTRIBUTING.md", "offload: keep"): "shows what a commit message looks like",
    ("docs/clusters.md", "#SBATCH"): "needs Slurm",
    ("docs/clusters.md", "spec:"): "needs Kubernetes",
    (
        "docs/commands.md",
        'pip install ".[completion]"',
    ): "needs argcomplete; tests/tools/cli/test_main.py has a stand-in for it",
    (
        "docs/huggingface.md",
        "trainer = SFTTrainer",
    ): "tests/integration/test_trainers.py trains so, with models made there",
    ("docs/index.md", "from ssdtrain.hf"): "docs/huggingface.md has the whole program",
    ("docs/index.md", 'pip install ".[megatron]"'): MEGATRON,
    ("docs/megatron.md", "torchrun"): MEGATRON,
    ("docs/megatron.md", "[ssdtrain] iteration"): "shows what a log line looks like",
}
"""Blocks that nothing runs, and what they need. Their flags are compared with the parser's all the same."""
