"""docs/codecs.md: its generator works, and the errors on a GPT's tensors are those that were measured before."""

import json
import re
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks.codec_errors import INTRODUCTION, SPECS, document, rows, tensors
from benchmarks.codecs import measure

trains_a_gpt = pytest.mark.slow  # for the tensors

PAGE = Path(__file__).parents[2] / "docs" / "codecs.md"

# Relative L2 errors on the gradient and the residual stream of another small GPT, and how far ours may be from them.
MEASURED = {
    "bf16": (0.0017, 0.0017),
    "zfp:rate=16": (0.0002, 0.0002),
    "zfp:rate=12": (0.0034, 0.0034),
    "zfp:rate=8": (0.055, 0.054),
    "zfp:rate=4": (0.99, 0.96),
    "int8": (0.0078, 0.0060),
    "fp8": (0.025, 0.026),
    "int4": (0.136, 0.109),
    "int4:hadamard": (0.113, 0.118),
    "int4:block=64,asymmetric": (0.098, 0.085),
}
WITHIN = 1.35


@pytest.fixture(scope="module")
def found() -> dict[str, Tensor]:
    return tensors(steps=60)


@trains_a_gpt
def test_errors_are_those_measured_before(found: dict[str, Tensor]) -> None:
    by_codec = {row["codec"]: row for row in rows(found)}
    for spec, expected in MEASURED.items():
        for name, error in zip(("gradient", "residual stream"), expected, strict=True):
            assert error / WITHIN <= by_codec[spec][name] <= error * WITHIN, (spec, name)


@trains_a_gpt
def test_zfp_is_biased_and_the_integers_are_not(found: dict[str, Tensor]) -> None:
    by_codec = {row["codec"]: row["bias"] for row in rows(found, ("zfp:rate=8", "zfp:rate=4", "int8"))}
    assert by_codec["zfp:rate=4"] < -0.05
    assert -0.01 < by_codec["zfp:rate=8"] < -0.003
    assert abs(by_codec["int8"]) < 0.0005


def test_the_page_begins_with_the_introduction_that_is_edited() -> None:
    assert PAGE.read_text().startswith(INTRODUCTION.read_text().rstrip())


@trains_a_gpt
def test_the_page_is_complete(found: dict[str, Tensor]) -> None:
    speed = json.loads(json.dumps({"cpu": "any", "mebibytes": 1, **measure(1, 1, ["bf16", "int8"])}))
    for page in (document(found, 60, speed), PAGE.read_text()):
        assert page.startswith(INTRODUCTION.read_text().rstrip())
        headings = re.findall(r"^## (.*)$", page, flags=re.MULTILINE)
        assert headings == ["The codecs", "Errors", "Speed"]
        assert all(f"| `{spec}` |" in page for spec in SPECS)
        assert "| `int8` | 8.125 | no | yes | yes |" in page
