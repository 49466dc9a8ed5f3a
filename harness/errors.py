"""The one exception for mistakes a user can mend."""


class UserError(Exception):
    """Bad input: printed as one line without a traceback, exit code not 0.

    The message names the thing, the value it had, and the remedy, for example
    "policy.budget=100 is not a multiple of engine.block_size=32. Use 96 or 128."
    """
