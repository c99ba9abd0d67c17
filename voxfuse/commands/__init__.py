"""The commands that compose several rooms: bench, ledger, judge. The simple ones are in ``__main__``."""
