"""`python -m examples.megatron_gpt`."""

import sys

from examples.megatron_gpt.trainer import main

sys.exit(main())
