"""Benchmarks run by hand: the suite only holds that what they call is still there."""

import importlib
import pkgutil

import pytest

import benchmarks

NAMES = [module.name for module in pkgutil.iter_modules(benchmarks.__path__)]


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_still_finds_what_it_imports(name: str) -> None:
    assert callable(importlib.import_module(f"benchmarks.{name}").main)
