"""Real text as Megatron's indexed dataset: a .bin of tokens, an .idx of documents, both written by its builder."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import ClassVar

import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

__all__ = ["ByteTokenizer", "library_text"]

LIMIT_BYTES = 8 << 20
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class ByteTokenizer:
    """A token for each byte, for the end of a document and for padding. The interface that GPTDataset needs of a tokenizer."""

    eod = 256
    pad = 257
    vocab_size = 258
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "ByteTokenizer"}


def library_text(directory: Path) -> str:
    """The prefix of a .bin and an .idx with the Python standard library's sources, a document for each file.

    Built once, by one rank; the others wait for it outside of this function.
    """
    directory.mkdir(parents=True, exist_ok=True)
    prefix = str(directory / "library_document")
    if Path(f"{prefix}.idx").is_file():
        return prefix
    # Under other names until they are whole.
    builder = IndexedDatasetBuilder(f"{prefix}.bin.new")
    total = 0
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if LEFT_OUT & set(path.relative_to(root).parts[:-1]):
            continue
        content = path.read_bytes()
        if content:
            tokens = torch.tensor([*content, ByteTokenizer.eod], dtype=torch.int32)
            builder.add_document(tokens, [len(tokens)])
            total += len(content)
        if total >= LIMIT_BYTES:
            break
    builder.finalize(f"{prefix}.idx.new")
    os.replace(f"{prefix}.bin.new", f"{prefix}.bin")
    os.replace(f"{prefix}.idx.new", f"{prefix}.idx")
    return prefix
