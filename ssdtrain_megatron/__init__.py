"""SSDTrain for Megatron-LM.

Lives here: the flags (`flags`), made from the schema of ssdtrain.config. Import from this package: what
`__all__` names. Importing it imports no part of megatron and changes nothing in it; it holds no algorithm of
its own.
"""

from ssdtrain_megatron.flags import add_arguments, config_from_args

__all__ = ["add_arguments", "config_from_args"]
