"""Philox against the known answers of Random123, the authors' own library (kat_vectors, philox4x32 10)."""

import pytest
import torch

from ssdtrain.codecs.base import Key
from ssdtrain.codecs.philox import philox, uniform_blocks

ONES = 0xFFFFFFFF
KNOWN = [
    (0, Key(0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (ONES, Key(ONES << 32 | ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        0x243F6A88,
        Key(0x299F31D0 << 32 | 0xA4093822, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: int, key: Key, words: tuple[int, ...]) -> None:
    assert tuple(int(w) for w in philox(torch.tensor([counter]), key)) == words


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    u = uniform_blocks(2000, 128, Key(5), torch.device("cpu"))
    assert u.min() >= 0
    assert u.max() < 1
    n = u.numel()
    counts = torch.histc(u, bins=64, min=0, max=1)
    chi2 = float(((counts - n / 64) ** 2 / (n / 64)).sum())
    assert chi2 < 63 + 5 * (2 * 63) ** 0.5
    assert abs(float(torch.corrcoef(torch.stack([u[:, 0::4].flatten(), u[:, 1::4].flatten()]))[0, 1])) < 0.01


@pytest.mark.parametrize(
    "other", [Key(2, 1, 1, 1), Key(1 << 40 | 1, 1, 1, 1), Key(1, 2, 1, 1), Key(1, 1, 2, 1), Key(1, 1, 1, 2)]
)
def test_every_part_of_the_key_gives_another_independent_stream(other: Key) -> None:
    cpu = torch.device("cpu")
    a, b = uniform_blocks(500, 128, Key(1, 1, 1, 1), cpu), uniform_blocks(500, 128, other, cpu)
    assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.02
