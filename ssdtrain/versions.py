"""Version counters of tensors: a probe that watches one, and whether two tensors have the same, found by reading alone.

Note: [Addresses of version counters]
PyTorch shows the value of a counter and not which one it is. To move one for a moment and look at the other is no way to find
out: a backward of another thread that compares versions at that moment raises. A tensor object holds its counter by a pointer,
among its first words. At import that word is searched for with tensors of which is known whether they share: aliases, of the
same storage with another counter, differ in it and in none of the words that views and detached tensors have in common. Where
the search finds no such word or several, `same_counter` is always False, and what could share is stored again.
"""

from __future__ import annotations

import ctypes

import torch

_WORD = ctypes.sizeof(ctypes.c_void_p)
_WORDS = 8  # of a tensor object that are looked at; it has three times as many


class VersionProbe:
    """Watches the version counter of a tensor, and keeps nothing of its memory.

    Attributes:
        version: that of the tensor when the probe was made.
    """

    __slots__ = ("_alias", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._alias = tensor.detach()  # shares the counter
        self._alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.version = tensor._version

    @property
    def now(self) -> int:
        """The present version; another one than `version` after a write that autograd would see."""
        return self._alias._version

    def watches(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` has this counter, as far as is known; False says nothing."""
        return same_counter(self._alias, tensor)


def same_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if a write to either moves the version of both, as far as is known; False says nothing."""
    if _OFFSET is None:
        return False
    counter = _word(one, _OFFSET)
    return counter != 0 and counter == _word(other, _OFFSET)


def _word(tensor: torch.Tensor, offset: int) -> int:
    return ctypes.c_void_p.from_address(tensor._cdata + offset).value or 0


def _find_offset() -> int | None:
    """Where a tensor object has the pointer to its counter; None: unknown."""
    tensor, other, empty = (
        torch.ones(4, device="cpu"),
        torch.ones(4, device="cpu"),
        torch.empty(0, device="cpu"),
    )
    emptied = tensor.detach()
    emptied.data = empty.detach()
    shares = [tensor.detach(), tensor[1:], tensor.view(2, 2), tensor.detach()[2:], emptied]
    differs = [tensor.data, tensor.detach().data, other, empty]
    found = [
        offset
        for offset in range(0, _WORDS * _WORD, _WORD)
        if (word := _word(tensor, offset))
        and all(_word(other, offset) == word for other in shares)
        and not any(_word(other, offset) == word for other in differs)
    ]
    return found[0] if len(found) == 1 else None


with torch.inference_mode(False):
    _OFFSET = _find_offset()
