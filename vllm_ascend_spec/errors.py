"""Errors that the user can mend."""


class UserError(ValueError):
    """Bad input: the message names the option or file and the mend; shown without a traceback."""
