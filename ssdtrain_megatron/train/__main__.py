"""`python -m ssdtrain_megatron.train`."""

import sys

from ssdtrain_megatron.train.trainer import main

sys.exit(main())
