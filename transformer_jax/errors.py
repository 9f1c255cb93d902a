"""The errors a user can mend.

The command line prints them in one line, without a traceback, and exits with code 2.
A message says what was found, where (file and line, or config field), and the mend.
"""


class UserError(Exception):
    """Something the user gave is wrong; the message says what, where and the mend."""


class ConfigError(UserError):
    """A config file, field or override is wrong."""


class DataError(UserError):
    """A corpus, text file or tokenised corpus is wrong."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or does not fit the model."""


class TrainingError(UserError):
    """Training cannot go on, for example because the loss stays non-finite."""
