"""Token files: what is in them, what is refused without a word about it, and how a change of one is noticed."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpage.errors import SpecInvalid
from kvpage_server.roles import Role
from kvpage_server.tokens import MAX_TOKENS, TokenFile, parse_tokens
from support.token_files import ROLES, token_file, token_of, with_every_role

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("content", [TOKEN, TOKEN + "\r\n", f"# mine\n\n  {TOKEN}  \n"])
def test_a_token_that_stands_alone_may_do_everything(tmp_path: Path, content: str) -> None:
    found = TokenFile(token_file(tmp_path, content)).find(TOKEN.encode())
    assert found is not None
    assert (found.role, found.name) == (Role.ADMIN, "token")


def test_each_token_has_its_role_and_its_name(tmp_path: Path) -> None:
    file = TokenFile(with_every_role(tmp_path))
    for role in ROLES:
        found = file.find(token_of(role).encode())
        assert found is not None
        assert (found.role.label, found.name) == (role, f"the-{role}")


@pytest.mark.parametrize("given", [b"", b"x", TOKEN.encode()[:-1], TOKEN.encode() + b"x", b"\xe9" * 32, b"the-read"])
def test_anything_else_is_no_token(tmp_path: Path, given: bytes) -> None:
    assert TokenFile(token_file(tmp_path, f"read a {TOKEN}\n")).find(given) is None


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no token"),
        ("# nothing but a comment", "no token"),
        ("tooshort", ":1"),
        (TOKEN + "\n" + TOKEN, ":1"),
        (f"read a {TOKEN}\nwrite b {TOKEN[::-1]}", ":2"),
        (f"read a {TOKEN}\n\n# c\nread {TOKEN[::-1]}", ":4"),
        (f"read a {TOKEN} more", ":1"),
        (f"read a tooshort-{TOKEN[:4]}", ":1"),
        (f"read a {TOKEN * 200}", ":1"),
        (f"read a/b {TOKEN}", ":1"),
        (f"read {'n' * 65} {TOKEN}", ":1"),
        (f"READ a {TOKEN}", ":1"),
        (f"read a {TOKEN}\nadmin a {TOKEN[::-1]}", ":2"),
        (f"read a {TOKEN}\nadmin b {TOKEN}", ":2"),
        (f"read a {TOKEN}\xe9", ":1"),
        (f"{TOKEN} read a", ":1"),
        ("".join(f"read n{n} {TOKEN}{n}\n" for n in range(MAX_TOKENS + 1)), "1001 tokens"),
    ],
)
def test_a_fault_is_told_by_its_line_and_never_by_what_is_there(content: str, named: str) -> None:
    with pytest.raises(SpecInvalid) as refused:
        parse_tokens(content.encode(), Path("/etc/tokens"))
    assert named in refused.value.message
    assert TOKEN[:8] not in refused.value.message
    assert TOKEN[::-1][:8] not in refused.value.message


def test_a_file_that_everybody_may_read_or_change_is_refused(tmp_path: Path) -> None:
    for mode in (0o604, 0o602, 0o601):
        path = token_file(tmp_path, TOKEN)
        path.chmod(mode)
        with pytest.raises(SpecInvalid, match="everybody"):
            TokenFile(path)
    with pytest.raises(SpecInvalid, match=os.strerror(2)):
        TokenFile(tmp_path / "missing")


def test_only_digests_are_kept(tmp_path: Path) -> None:
    file = TokenFile(with_every_role(tmp_path))
    kept = [getattr(token, name) for token in file._tokens for name in token.__slots__]
    assert hashlib.sha256(token_of("read").encode()).digest() in kept
    assert token_of("read") not in repr(kept)
    assert "digest" not in repr(file._tokens)


def compared(monkeypatch: pytest.MonkeyPatch, file: TokenFile, given: str) -> int:
    """How many tokens it is compared with."""
    seen = []
    real: Callable[[bytes, bytes], bool] = hmac.compare_digest

    def counting(left: bytes, right: bytes) -> bool:
        seen.append((left, right))
        return real(left, right)

    with monkeypatch.context() as patched:
        patched.setattr(hmac, "compare_digest", counting)
        file.find(given.encode())
    return len(seen)


def test_every_token_is_compared_whichever_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And in constant time each: no answer comes sooner because a guess begins well or stands first in the file."""
    file = TokenFile(with_every_role(tmp_path))
    for given in (*map(token_of, ROLES), "wrong", token_of("read")[:-1]):
        assert compared(monkeypatch, file, given) == len(ROLES)


# --- changed while the server runs ------------------------------------------------------------------------------------


def test_a_changed_file_counts_at_the_next_request(tmp_path: Path) -> None:
    file = TokenFile(token_file(tmp_path, f"read a {TOKEN}"))
    token_file(tmp_path, f"admin a {TOKEN}\nread b {TOKEN[::-1]}")
    first, second = file.find(TOKEN.encode()), file.find(TOKEN[::-1].encode())
    assert first is not None
    assert second is not None
    assert (first.role, second.role) == (Role.ADMIN, Role.READ)
    token_file(tmp_path, f"read b {TOKEN[::-1]}")
    assert file.find(TOKEN.encode()) is None


def test_a_file_that_is_written_to_in_place_is_noticed_too(tmp_path: Path) -> None:
    path = token_file(tmp_path, f"read a {TOKEN}")
    file = TokenFile(path)
    path.write_text(f"read other {TOKEN}x\n")
    assert file.find(TOKEN.encode()) is None


@pytest.mark.parametrize("fault", ["emptied", "wrong", "gone", "public", "pipe"])
def test_a_faulty_file_changes_nothing_but_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    path = token_file(tmp_path, f"read a {TOKEN}")
    file = TokenFile(path)
    if fault == "gone":
        path.unlink()
    elif fault == "public":
        path.chmod(0o644)
    elif fault == "pipe":
        path.unlink()
        os.mkfifo(path, 0o600)
    else:
        token_file(tmp_path, "" if fault == "emptied" else f"nonsense a {TOKEN}")
    for _ in range(3):
        assert file.find(TOKEN.encode()) is not None
    [line] = caplog.messages  # once, not at every request
    assert "stay valid" in line
    assert TOKEN not in line
    token_file(tmp_path, f"read a {TOKEN[::-1]}")
    assert file.find(TOKEN.encode()) is None
