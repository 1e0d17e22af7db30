"""A rate over recent samples. Pure."""

_NEWEST_SHARE = 0.2  # of the newest sample in the running figure


class RunningRate:
    """The rate of tokens computed or bytes copied: a moving average that follows changes within a dozen samples."""

    def __init__(self) -> None:
        self.per_s: float | None = None  # None: nothing was measured yet

    def note(self, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            rate = amount / seconds
            self.per_s = rate if self.per_s is None else self.per_s + _NEWEST_SHARE * (rate - self.per_s)
