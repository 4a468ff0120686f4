"""Has the kernel deny system calls to this process and all that it starts, as the seccomp profile of a container does."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

NUMBERS = {
    "x86_64": {"fallocate": 285, "madvise": 28, "pipe2": 293, "process_vm_readv": 310},
    "aarch64": {"fallocate": 47, "madvise": 233, "pipe2": 59, "process_vm_readv": 270},
}

_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_LOAD, _IF_EQUAL, _RETURN = (
    0x20,
    0x15,
    0x06,
)  # of BPF: BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def deny(*calls: str, code: int = errno.EPERM) -> None:
    """Let `calls` fail with `code` from now on, on every thread that is started after this.

    Raises:
        OSError: the kernel has no seccomp filters.
    """
    numbers = [NUMBERS[platform.machine()][call] for call in calls]
    program = [(_LOAD, 0, 0, 0)]  # the number of the call
    for left, number in zip(range(len(numbers), 0, -1), numbers, strict=True):
        program.append((_IF_EQUAL, left, 0, number))
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | code)]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    argument = _Program(len(program), packed)
    for option, value, pointer in (
        (_NO_NEW_PRIVILEGES, 1, 0),
        (_SET_SECCOMP, _FILTER, ctypes.addressof(argument)),
    ):
        if libc.prctl(option, value, pointer, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl failed")
