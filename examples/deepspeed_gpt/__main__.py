import sys

from examples.deepspeed_gpt.compare import main

sys.exit(main())
