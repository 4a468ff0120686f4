"""Compressed collectives, with a codec for each parallel dimension.

What lives here: the codecs that the config chooses (`policy`), the nodes and ranks of a group (`topology`), the encoding of
tensors into payloads (`coding`), the algorithms (`algorithms`), collectives as objects (`collectives`), handles (`work`), error
feedback (`feedback`), weights gathered as differences (`references`), the choice of bits (`adaptation`), whether a codec saves
time (`probe`), metrics (`meter`), the entry point for adapters (`communicator`), its steps and metrics as a feature of a runtime
(`feature`). `agreement` has the checks between ranks at start.

What may be imported: the names below.

What it never does: decide which traffic of a framework is which dimension, change a collective that is not passed to it, draw
from a global random generator, start a thread.
"""

from ssdtrain.comm.communicator import Bucket, Communicator
from ssdtrain.comm.meter import CommMetrics
from ssdtrain.comm.policy import Policy
from ssdtrain.comm.work import ChainedWork, CompressedWork

__all__ = ["Bucket", "ChainedWork", "CommMetrics", "Communicator", "CompressedWork", "Policy"]
