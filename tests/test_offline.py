"""A process for vLLM: what it has, what it has not, and what is said when it dies."""

import os

import numba
import pytest

from inferlab.errors import InferlabError
from inferlab.serving.offline import ENVIRONMENT, alone


def test_it_has_the_environment_and_hands_back_the_result() -> None:
    found = [alone(os.getenv, name, told="") for name in ENVIRONMENT]
    assert found == list(ENVIRONMENT.values())


def test_it_has_imported_nothing_of_the_program() -> None:
    assert numba.__name__ == "numba"
    there = alone(eval, "'numba' in __import__('sys').modules", told="")
    assert not there


def test_its_death_is_told() -> None:
    with pytest.raises(InferlabError, match="the process died; ask for less"):
        alone(os._exit, 3, told="the process died; ask for less")
