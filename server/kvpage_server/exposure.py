"""Which addresses may be served how: what other machines reach has tokens and TLS."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from kvpage.errors import SpecInvalid, shorten


def is_loopback(host: str) -> bool:
    """Whether nobody on another machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_has_port(host: str, given: Mapping[str, bool], *, insecure: bool) -> None:
    """Raises `SpecInvalid` for what is of TCP only, where no port is: whoever gave it believes to be served there.

    Not for a token file: its variable is that of clients too, in whose environment a server may be started.
    """
    of_tcp = [f"--{name.replace('_', '-')}" for name, is_given in given.items() if is_given and name != "token_file"]
    of_tcp += ["--insecure"] if insecure else []
    of_tcp += [] if is_loopback(host) else [f"host {shorten(host)}"]
    if of_tcp:
        raise SpecInvalid(f"{', '.join(of_tcp)} would have no effect: without --port nothing listens to TCP; give one")


def check_exposure(host: str, given: Mapping[str, bool], *, insecure: bool) -> None:
    """`given`: which of `token_file`, `tls_cert_file`, `tls_key_file` and `tls_client_ca_file` are there.

    Raises `SpecInvalid`. There is no way to serve other machines without a token: `insecure` is for a network or a
    proxy that encrypts already, and neither of them knows who may do what.
    """
    if given["tls_cert_file"] != given["tls_key_file"]:
        there, missing = ("cert", "key") if given["tls_cert_file"] else ("key", "cert")
        raise SpecInvalid(f"--tls-{there}-file is given without --tls-{missing}-file; TLS needs both")
    if given["tls_client_ca_file"] and not given["tls_cert_file"]:
        raise SpecInvalid("--tls-client-ca-file is given without TLS; give --tls-cert-file and --tls-key-file too")
    if is_loopback(host):
        return
    where = f"host {shorten(host)} can be reached from other machines"
    if not given["token_file"]:
        raise SpecInvalid(f"{where}: give --token-file, or use 127.0.0.1")
    if not given["tls_cert_file"] and not insecure:
        raise SpecInvalid(
            f"{where}, and tokens would be sent to it in the clear: give --tls-cert-file and --tls-key-file, or"
            " --insecure where something else encrypts, or use 127.0.0.1"
        )
