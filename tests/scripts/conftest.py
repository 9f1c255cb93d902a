"""What the tests of the launchers share."""

import pathlib

import pytest
from stand_ins import World, make_repository


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A copy of what the launchers need of this repository."""
    folder = tmp_path_factory.mktemp("repository")
    make_repository(folder)
    return folder


@pytest.fixture
def world(tmp_path: pathlib.Path, repository: pathlib.Path) -> World:
    """A folder of its own, and the stand-ins."""
    return World(tmp_path, repository)
