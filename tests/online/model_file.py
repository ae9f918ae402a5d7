"""A model file as `cadam run` takes it."""

from tests.online.streams import SCHEMA, Small

__all__ = ["SCHEMA", "build"]


def build() -> Small:
    return Small()


number = 3


def nothing() -> None:
    return None
