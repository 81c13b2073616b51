"""`molora bench`: sides timed in turn within every round of one process, beside the machine's ceilings."""
