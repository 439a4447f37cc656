"""Config files: a file or its folder, strict JSON of a bounded size; and the longest request a config speaks of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpage.errors import JsonInvalid, KvpageError, NotFound, SpecInvalid, TooLarge
from kvpage.models import read_config, read_model
from models.public_configs import config


def test_a_file_its_folder_and_the_object_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("mixtral-8x7b")))
    expected = read_model(config("mixtral-8x7b"))
    assert read_model(tmp_path) == expected
    assert read_model(tmp_path / "config.json") == expected
    assert read_model(str(tmp_path)) == expected
    draft = read_model(config("llama-3.1-8b"), draft=tmp_path)
    assert draft == read_model(config("llama-3.1-8b"), draft=config("mixtral-8x7b"))


def test_infinity_as_python_writes_it_is_read_where_no_size_is_wanted(tmp_path: Path) -> None:
    """Published configs of Nemotron-H hold [0.0, Infinity]."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config("nemotron-h-8b", time_step_limit=[0.0, float("inf")])))
    assert "Infinity" in file.read_text()
    assert read_model(file) == read_model(config("nemotron-h-8b"))
    file.write_text(json.dumps(config("nemotron-h-8b", ssm_state_size=float("inf"))))
    with pytest.raises(SpecInvalid) as caught:
        read_model(file)
    assert caught.value.errors[0].pointer == "/ssm_state_size"


@pytest.mark.parametrize(
    ("written", "error"),
    [
        (b"", JsonInvalid),
        (b"{", JsonInvalid),
        (b"\xff{}", JsonInvalid),
        (b'{"model_type": "llama", "model_type": "gemma"}', JsonInvalid),
        (b"[" * 40 + b"]" * 40, JsonInvalid),
        (b'{"a": ' + b"1" * 200 + b"}", JsonInvalid),
        (b'{"a": "' + b"x" * (5 << 20) + b'"}', TooLarge),
        (b"[]", SpecInvalid),
        (b"3", SpecInvalid),
    ],
)
def test_what_is_no_config_is_refused(tmp_path: Path, written: bytes, error: type[KvpageError]) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(written)
    with pytest.raises(error) as caught:
        read_config(file) if error in (JsonInvalid, TooLarge) else read_model(file)
    assert str(file) in caught.value.message or error is SpecInvalid


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="not downloaded"):
        read_model(tmp_path / "missing.json")
    with pytest.raises(NotFound, match=r"no config\.json"):
        read_model(tmp_path)
    with pytest.raises(NotFound):
        read_model("meta-llama/Llama-3.1-8B")


def test_a_file_that_cannot_be_read_is_said() -> None:
    with pytest.raises(NotFound, match="cannot read"):
        read_config(Path("/proc/self/mem"))  # a regular file whose first byte no read can give


# changes to Llama 3.1 8B (131,072 positions) -> the longest request, as vLLM 0.24.0 derives it
LENGTHS: list[tuple[dict[str, Any], int | None]] = [
    ({}, 131_072),
    ({"rope_scaling": None}, 131_072),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 262_144),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 1.5}}, 196_608),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32_768}}, 131_072),
    ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, 262_144),
    ({"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
    ({"max_seq_len": 1024}, 1024),
    ({"max_seq_length": 2048}, 2048),
    ({"seq_len": 4096}, 4096),
    ({"model_max_length": 500_000}, 500_000),
]


@pytest.mark.parametrize(("changes", "length"), LENGTHS)
def test_the_longest_request_follows_from_the_position_scaling(changes: dict[str, Any], length: int | None) -> None:
    assert read_model(config("llama-3.1-8b", **changes)).max_model_len == length


def test_lengths_of_gemma_3_are_scaled_already_and_some_configs_say_nothing() -> None:
    assert read_model(config("gemma-3-27b")).max_model_len == 131_072
    silent = config("mimo-v2-flash")
    del silent["max_position_embeddings"]
    assert read_model(silent).max_model_len is None


def test_a_length_beyond_all_bounds_is_refused() -> None:
    with pytest.raises(SpecInvalid) as caught:
        read_model(config("llama-3.1-8b", rope_scaling={"type": "linear", "factor": 1e11}))
    assert caught.value.errors[0].pointer == "/max_position_embeddings"
