"""Rondo's exceptions.

RondoError
├── UserError                 something to mend outside of Rondo: one sentence, exit code 2
│   ├── ConfigError           a key, a value or a combination of them
│   ├── ModelError            a model that is missing or cannot be served
│   ├── DataError             a data file or a row in it
│   ├── RewardError           a reward function that is missing, raised, hung or answered nonsense
│   └── AddressError          a port that is taken, a server that cannot be reached
├── EngineError               an engine that failed or answered nonsense
│   ├── UnreachableError      one that could not be reached, or whose answer did not arrive whole
│   └── StaleRolloutError     a response of another version than the period's
├── PublicationError          an engine did not confirm the weights it was given
├── NonFiniteGradientError    a gradient with NaN or infinity, refused before the step
├── OnPolicyError             a period whose account does not balance: not the synchronous result
├── JournalError              a journal that is damaged, or that does not hold what is asked of it
├── DiedError                 a process or background task that ended early
└── Interrupted               Ctrl-C or SIGTERM: save and leave
"""

from __future__ import annotations


class RondoError(Exception):
    """Base of all. Its text is a sentence for people: what, where, how to mend."""

    exit_code = 1


class UserError(RondoError):
    exit_code = 2


class ConfigError(UserError):
    pass


class ModelError(UserError):
    pass


class DataError(UserError):
    pass


class RewardError(UserError):
    pass


class AddressError(UserError):
    pass


class EngineError(RondoError):
    pass


class UnreachableError(EngineError):
    pass


class StaleRolloutError(EngineError):
    pass


class PublicationError(RondoError):
    pass


class NonFiniteGradientError(RondoError):
    pass


class OnPolicyError(RondoError):
    pass


class JournalError(RondoError):
    pass


class DiedError(RondoError):
    pass


class Interrupted(RondoError):  # noqa: N818  (not an error of anyone's)
    exit_code = 130
