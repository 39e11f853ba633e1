"""Errors that callers can tell apart. Bad arguments are ValueError; bugs are assertions; these are the rest."""


class AquilineError(Exception):
    """Base of the errors below; the command line prints its message and exits with 2."""


class CheckpointError(AquilineError):
    """A checkpoint is missing, broken or does not fit; the message lists every miss."""


class OutOfPages(AquilineError):
    """The page pool cannot hold a request; the message says how many pages it needs and how many there are."""


class OutOfMemory(AquilineError):
    """Weights or caches do not fit into memory; the message says how much they need and how much is free."""


class ResultError(AquilineError):
    """A benchmark result is broken or may not be compared; the message lists every reason."""


class NumericalError(AquilineError):
    """The model produced NaN or no finite logit for a token that had to be drawn."""


class NativeError(AquilineError):
    """The native library refused a call: a wrong shape, dtype, stride or pointer."""


class RankError(AquilineError):
    """A rank of a pair that several processes share has died or hangs; the message names the rank."""


class EngineStopped(AquilineError):
    """The engine thread has ended; the message says why. Start another."""


class PerfViolation(AquilineError):
    """A measured step did what PERF mode forbids; the message names the rule and what broke it."""
