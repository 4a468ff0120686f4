"""Compressed collectives: fewer bytes on the network, as many fewer as each parallel dimension bears.

What lives here: what the config asks for (`policy`), the nodes and ranks of a group (`topology`), tensors to payloads and back
(`coding`), the algorithms (`algorithms`), handles (`work`), error feedback (`feedback`), weights gathered by difference
(`difference`), the choice of bits (`adaptation`), whether a codec is worth its time (`probe`), the figures (`meter`), what
ties them together and adapters call (`communicator`), its steps and metrics as a feature of a runtime (`feature`).
`agreement` is what ranks compare at start.

What may be imported: the names below.

What it never does: decide which traffic of a framework is which dimension, change a collective that it was not given, draw from a
global random generator, start a thread.
"""

from ssdtrain.comm.communicator import Bucket, Communicator
from ssdtrain.comm.meter import CommMetrics
from ssdtrain.comm.policy import Policy
from ssdtrain.comm.work import ChainedWork, CompressedWork

__all__ = ["Bucket", "ChainedWork", "CommMetrics", "Communicator", "CompressedWork", "Policy"]
