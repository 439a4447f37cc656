"""Which torch set-up takes: one test for each step, and one for each step's place in the order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from environment import cpu_builds
from torch_choice import TorchFacts, choose_torch

EVERYTHING = TorchFacts(
    wanted="torch==2.12.0",
    importable="2.11.0",
    cpu_build="2.13.0+cpu",
    nvidia_driver=True,
    cpu_index="https://mirror.example/cpu",
)


def test_the_users_word_comes_first() -> None:
    choice = choose_torch(EVERYTHING)
    assert (choice.step, choice.pip_arguments) == ("wanted", ("torch==2.12.0",))


def test_an_importable_torch_is_kept() -> None:
    choice = choose_torch(replace(EVERYTHING, wanted=None))
    assert (choice.step, choice.pip_arguments) == ("importable", ())


def test_a_cpu_build_is_named_exactly_so_that_no_newer_cuda_build_wins() -> None:
    choice = choose_torch(replace(EVERYTHING, wanted=None, importable=None))
    assert (choice.step, choice.pip_arguments) == ("cpu-build", ("torch==2.13.0+cpu",))
    assert "KVPAGE_TORCH=torch" in choice.message  # there is a driver: say how to have the CUDA build


def test_a_cpu_build_without_a_driver_speaks_of_no_cuda() -> None:
    assert "CUDA" not in choose_torch(TorchFacts(cpu_build="2.13.0+cpu")).message


def test_a_driver_brings_the_cuda_build() -> None:
    choice = choose_torch(replace(EVERYTHING, wanted=None, importable=None, cpu_build=None))
    assert (choice.step, choice.pip_arguments) == ("nvidia", ("torch",))


def test_without_a_driver_the_named_index_is_used() -> None:
    choice = choose_torch(TorchFacts(cpu_index="https://mirror.example/cpu"))
    assert choice.step == "cpu-index"
    assert choice.pip_arguments == ("torch", "--index-url", "https://mirror.example/cpu")


def test_with_nothing_known_it_goes_on_and_says_the_size_and_how_to_choose() -> None:
    choice = choose_torch(TorchFacts())
    assert (choice.step, choice.pip_arguments) == ("default", ("torch",))
    for part in ("gigabytes", "KVPAGE_TORCH", "KVPAGE_TORCH_INDEX"):
        assert part in choice.message


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_elsewhere_the_default_build_is_small_and_needs_no_warning(system: str) -> None:
    choice = choose_torch(TorchFacts(system=system))
    assert choice.pip_arguments == ("torch",)
    assert "gigabytes" not in choice.message


def test_cpu_builds_are_read_from_what_pip_lists_newest_first() -> None:
    listing = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.10.0+cpu, 2.14.1+cu130, 2.9.1+cpu, 2.9.1, 2.8.0+cpu\n"
    assert cpu_builds(listing) == ["2.10.0+cpu", "2.9.1+cpu"]
    assert cpu_builds("") == []
