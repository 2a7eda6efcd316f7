"""What holds for every test."""

import signal

# A shell that starts a job in the background lets it ignore SIGINT, and so all its children would: the tests of Ctrl-C
# need the usual handler, which an exec turns back to the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
