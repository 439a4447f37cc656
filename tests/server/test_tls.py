"""TLS on the TCP port: who gets in, what bounds hold over it, and certificates that are replaced."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from kvpage.client.http import Client
from kvpage.errors import PermissionDenied, SpecInvalid
from kvpage_server.intake import IntakeLimits
from kvpage_server.tls_files import MAX_FILE_BYTES, TlsFiles
from support import tight_server
from support.api_service import ApiService, run_refused
from support.certificates import Authority, Certificate, needs_openssl
from support.command_line import run_here
from support.eventually import until
from support.leaks import leak_guard
from support.plan_requests import small_request
from support.problems import assert_problem
from support.raw_http import RawHttp
from support.token_files import token_file, token_of, with_every_role

pytestmark = needs_openssl

LIMITS = IntakeLimits()
GET = b"GET /livez HTTP/1.1\r\nHost: <host>\r\n\r\n"
POST = b"POST /v1/plans HTTP/1.1\r\nHost: <host>\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def served_cert(authority: Authority) -> Certificate:
    return authority.sign("server")


def flags_of(cert: Certificate, *more: str) -> list[str]:
    return ["--port", "0", "--tls-cert-file", str(cert.cert), "--tls-key-file", str(cert.key), *more]


@contextlib.contextmanager
def started(*arguments: str, limits: Mapping[str, float] | None = None) -> Iterator[ApiService]:
    """Without a worker, which nothing here needs, unless there are no limits."""
    command = {} if limits is None else {"command": [sys.executable, tight_server.__file__, json.dumps(limits)]}
    with leak_guard(), tempfile.TemporaryDirectory(prefix="kvp-") as folder:
        with ApiService(Path(folder), "--memory", "64MiB", *arguments, **command) as service:  # type: ignore[arg-type]
            yield service


@pytest.fixture(scope="module")
def service(folder: Path, served_cert: Certificate) -> Iterator[ApiService]:
    with started(*flags_of(served_cert, "--token-file", str(with_every_role(folder)))) as service:
        yield service


@pytest.fixture(scope="module")
def tight(served_cert: Certificate) -> Iterator[ApiService]:
    limits = {"head_s": 0.5, "body_s": 0.5, "unread_s": 0.5, "max_connections": 8}
    with started(*flags_of(served_cert), limits=limits) as service:
        yield service


@contextlib.contextmanager
def secured(service: ApiService, context: ssl.SSLContext) -> Iterator[RawHttp]:
    with RawHttp(service) as client:
        client.socket = context.wrap_socket(client.socket, server_hostname="127.0.0.1")
        yield client


def unsecured(service: ApiService) -> socket.socket:
    """A connection whose client has not begun to shake hands."""
    host, port = service.url.partition("://")[2].split(":")
    return socket.create_connection((host, int(port)), timeout=60)


# --- who gets in ------------------------------------------------------------------------------------------------------


def test_over_tcp_there_is_tls_and_the_unix_socket_stays_plain(service: ApiService, authority: Authority) -> None:
    assert service.url.startswith("https://")
    with Client(service.url, token=token_of("allocate"), ca_file=str(authority.ca_file)) as client:
        pool = client.create_pool(small_request(), name="over tls")
        with service.client() as local:
            assert local.find_pool("over tls") == pool
        client.delete_pool(pool.id)


def test_the_command_line_is_told_the_authority_by_a_variable(
    service: ApiService, authority: Authority, folder: Path
) -> None:
    token = token_file(folder, token_of("read"), "mine")
    on_it = ("--url", service.url, "--token-file", str(token), "--json")
    for command in (("pools", "list"), ("health",)):
        done = run_here(*command, *on_it, KVPAGE_CA_FILE=str(authority.ca_file))
        assert (done.returncode, done.stderr) == (0, "")
        assert run_here(*command, *on_it).returncode != 0
        wrong = run_here(*command, *on_it, KVPAGE_CA_FILE=str(token))
        assert wrong.returncode == 2
        assert str(token) in wrong.stderr


def test_a_client_that_does_not_know_the_authority_goes_no_further(service: ApiService, tmp_path: Path) -> None:
    for ca_file in (None, str(Authority(tmp_path, "another").ca_file)):
        with Client(service.url, token=token_of("read"), ca_file=ca_file) as client:
            with pytest.raises(PermissionDenied, match=r"certificate.*--ca-file"):  # nothing heals by waiting
                client.pools()


def test_commands_say_what_to_do_about_tls(service: ApiService, folder: Path) -> None:
    token = str(token_file(folder, token_of("read"), "mine-too"))
    clear = service.url.replace("https://", "http://")
    for command in (("pools", "list"), ("health",)):
        unknown = run_here(*command, "--url", service.url, "--token-file", token)
        assert (unknown.returncode, "--ca-file" in unknown.stderr) == (1, True), unknown.stderr
        assert "begins with https://" in run_here(*command, "--url", clear, "--token-file", token).stderr


@pytest.mark.parametrize("said", [GET, b"\x16\x03\x01\x00\x05nonsense", b"", b"\x00" * 1000])
def test_what_is_no_tls_is_not_answered_and_ends(service: ApiService, said: bytes) -> None:
    with unsecured(service) as connection:
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(4096):
                received += piece
        assert b"HTTP" not in received


def test_old_tls_is_refused(service: ApiService, authority: Authority) -> None:
    context = authority.client_context()
    with pytest.warns(DeprecationWarning, match=r"TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError), secured(service, context):
        pass


def test_the_host_is_checked_over_tls_too(service: ApiService, authority: Authority) -> None:
    with httpx.Client(base_url=service.url, verify=authority.client_context(), timeout=60) as client:
        assert client.get("/livez").status_code == 200
        assert_problem(client.get("/livez", headers={"Host": "evil.example"}), "permission-denied")
        assert_problem(client.get("/v1/pools"), "unauthorized")


def test_clients_must_show_a_certificate_where_that_is_asked_for(
    authority: Authority, served_cert: Certificate, tmp_path: Path
) -> None:
    """And a token all the same: the certificate is one more lock, not another key."""
    mine = authority.sign("client", "extendedKeyUsage=clientAuth")
    other = Authority(tmp_path, "other").sign("stranger", "extendedKeyUsage=clientAuth")
    tokens = str(with_every_role(tmp_path))
    flags = flags_of(served_cert, "--tls-client-ca-file", str(authority.ca_file), "--token-file", tokens)
    with started(*flags) as service:
        with httpx.Client(base_url=service.url, verify=authority.client_context(mine), timeout=60) as client:
            assert client.get("/livez").status_code == 200
            assert_problem(client.get("/v1/pools"), "unauthorized")
        for certificate in (None, other):
            with httpx.Client(base_url=service.url, verify=authority.client_context(certificate)) as client:
                with pytest.raises(httpx.TransportError):
                    client.get("/livez")
        with service.client() as local:
            assert local.pools() == []


# --- what may be sent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endless",
    [
        pytest.param(b"GET / HTTP/1.1\r\nx: " + b"a" * (1 << 20), id="a long header"),
        pytest.param(CHUNKED + b"10000\r\n%b\r\n" % (b" " * 0x10000) * 100, id="many chunks"),
        pytest.param(POST + b"Content-Length: %d\r\n\r\n" % (LIMITS.max_body_bytes + 1), id="a declared length"),
    ],
)
def test_sizes_are_bounded(service: ApiService, authority: Authority, endless: bytes) -> None:
    """The answer arrives though the client goes on sending."""
    with secured(service, authority.client_context()) as client:
        client.send(endless)
        assert_problem(client.answer(), "too-large")


def test_a_request_that_is_not_whole_in_time_is_refused(tight: ApiService, authority: Authority) -> None:
    with secured(tight, authority.client_context()) as client:
        client.send(GET + POST + b"Content-Length: 100\r\n\r\n{")
        assert client.answer().status_code == 200
        assert_problem(client.answer(), "request-timeout")


def test_a_handshake_that_is_not_whole_in_time_ends(tight: ApiService) -> None:
    for said in (b"", b"\x16\x03\x01\x02\x00\x01"):
        with unsecured(tight) as connection:
            connection.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""


def test_unfinished_handshakes_have_a_bound_and_lock_nobody_out(tight: ApiService, authority: Authority) -> None:
    """Whoever has most of them loses the oldest; neither the socket nor others over TLS notice."""
    before = tight.num_fds()
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(unsecured(tight))
            assert tight.num_fds() - before < 25
        with httpx.Client(base_url=tight.url, verify=authority.client_context(), timeout=60) as client:
            assert client.get("/livez").status_code == 200
        with tight.client() as local:
            assert local.pools() == []
    until(lambda: tight.num_fds() <= before)


def test_the_end_of_the_server_waits_for_no_handshake(served_cert: Certificate) -> None:
    with started(*flags_of(served_cert)) as service, unsecured(service):
        service.terminate()
        assert "Cancel" not in service.log()


# --- certificates -----------------------------------------------------------------------------------------------------


def certificate_of(service: ApiService, context: ssl.SSLContext) -> bytes:
    with secured(service, context) as client:
        assert isinstance(client.socket, ssl.SSLSocket)
        shown = client.socket.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def test_a_replaced_certificate_is_shown_to_the_next_client(tmp_path: Path) -> None:
    """A faulty one is not: the one before stays, and the log says so."""
    authority = Authority(tmp_path)
    cert = authority.sign("server")
    context = authority.client_context()
    with started(*flags_of(cert)) as service:
        first = certificate_of(service, context)
        assert certificate_of(service, context) == first
        authority.sign("server")
        second = certificate_of(service, context)
        assert second != first
        shutil.copy(authority.sign("another").key, cert.key)
        assert certificate_of(service, context) == second
        until(lambda: "stays in use" in service.log())
        cert.cert.unlink()
        os.mkfifo(cert.cert)
        assert certificate_of(service, context) == second
        until(lambda: "not an ordinary file" in service.log())


@pytest.mark.parametrize(
    "fault",
    ["another key", "no certificate", "missing", "public key file", "encrypted", "no ca", "pipe", "ca pipe", "endless"],
)
def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path, fault: str) -> None:
    made = authority.sign("faulty")
    cert, key, client_ca = made.cert, made.key, None
    if fault == "another key":
        key = authority.sign("keyless").key
    elif fault == "no certificate":
        cert = key
    elif fault == "missing":
        cert = tmp_path / "absent.pem"
    elif fault == "public key file":
        key.chmod(0o644)
    elif fault == "encrypted":
        text = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n"
        key = tmp_path / "encrypted.key"
        key.touch(mode=0o600)
        key.write_text(text)
    elif fault == "pipe":
        cert = tmp_path / "pipe.pem"
        os.mkfifo(cert)
    elif fault == "ca pipe":
        client_ca = tmp_path / "pipe.pem"
        os.mkfifo(client_ca)
    elif fault == "endless":
        cert = tmp_path / "endless.pem"
        cert.write_bytes(b"\n" * (MAX_FILE_BYTES + 1))
    else:
        client_ca = key
    with pytest.raises(SpecInvalid) as refused:
        TlsFiles(cert=cert, key=key, client_ca=client_ca).context()
    assert any(str(path) in refused.value.message for path in (cert, key, client_ca))


def test_a_server_does_not_start_with_files_that_cannot_be_used(run_dir: Path, authority: Authority) -> None:
    made = authority.sign("server2")
    done = run_refused(run_dir, *flags_of(Certificate(made.cert, run_dir / "absent.key")))
    assert done.returncode == 2
    assert "absent.key" in done.stderr
    assert not (run_dir / "kvpage.sock").exists()
