"""What holds for every test."""

import signal

# A shell that runs tests in the background has them ignore Ctrl-C, and the processes that they start, whose end by it is
# tested, inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
