"""A training run: loop, log, reasons to stop, failures."""
