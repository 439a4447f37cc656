"""What each error code means and what to do about it: the page behind every problem's `type`.

The one source of docs/errors.md (`python -m kvpage_server.error_guide` prints it) and of `GET /errors`.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from kvpage.errors import ERRORS_BY_CODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """One code. The fields are sentences for people; `code`, status and `retryable` come from `kvpage.errors`."""

    title: str
    meaning: str
    when: str
    action: str


GUIDES: dict[str, Guide] = {
    "http-invalid": Guide(
        title="The bytes are not an HTTP request",
        meaning="What came over the connection cannot be read as HTTP/1.1, so nothing in it was looked at. The "
        "connection is closed.",
        when="TLS or HTTP/2 on the plain port, a method, path or header that HTTP does not allow, contradictory or "
        "broken framing of a body.",
        action="Speak plain HTTP/1.1, through an ordinary HTTP library.",
    ),
    "json-invalid": Guide(
        title="The body is not acceptable JSON",
        meaning="The bytes could not be read as one unambiguous JSON document, so nothing in them was looked at.",
        when="Bytes that are not UTF-8, a syntax error, a key that appears twice in one object, NaN or Infinity, "
        "half a surrogate pair, an integer of more than 100 digits, or more than 32 levels of nesting.",
        action="Fix the document at the place `detail` or `errors` names. For a repeated key keep one of the two.",
    ),
    "unauthorized": Guide(
        title="A valid token is needed",
        meaning="The server has a token file, and the request did not carry a token from it.",
        when="A TCP request for anything but plans, devices, health and the page without `Authorization: Bearer …`, or "
        "any request with a wrong token.",
        action="Send the token, or use the Unix socket in the run directory, which needs none.",
    ),
    "permission-denied": Guide(
        title="This caller may not do that",
        meaning="The server knows enough about the caller to refuse; sending the request again changes nothing.",
        when="A TCP request for pools, leases or events on a server without a token file; a token whose role does not "
        "suffice; a `Host` header the server is not bound to; a process of another user on the Unix socket; a run "
        "directory that belongs to somebody else; a handle asked for from another machine without TLS; a lease that is "
        "adopted with another token than its own, or is bound to another connection.",
        action="Use a token with the role that `details.needed_role` names, or the token that the lease was opened "
        "with. Or use the Unix socket as the server's user or as a member of its `--group`, start the server with "
        "`--token-file`, or address it by the name it is bound to.",
    ),
    "not-found": Guide(
        title="There is nothing at this path",
        meaning="The path is not one of the API's, or a pool has no lease, tenant or reservation of that name; on the "
        "command line, a file that cannot be read.",
        when="A misspelt path, a trailing slash, a part of the API that this version does not have; a lease to be "
        "adopted that was closed or ran out; a reservation that was used up, given back or ran out, or whose worker "
        "died; a request file that is not there.",
        action="Compare the path with `GET /openapi.json`; open a lease or reserve anew; check the name of the file.",
    ),
    "plan-not-found": Guide(
        title="The plan is not known here",
        meaning="Plans are kept in a cache of bounded size; one that no pool uses may be forgotten at any time.",
        when="The plan was made long ago, by another server, or never.",
        action="POST the request again: the same request gives the same plan id.",
    ),
    "pool-not-found": Guide(
        title="There is no such pool",
        meaning="No worker of this server has a pool with that id or name.",
        when="The pool was deleted, the id is misspelt, or the pool was lost because its worker and the API process "
        "died together.",
        action="List the pools, or create the pool again.",
    ),
    "method-not-allowed": Guide(
        title="The path does not take this method",
        meaning="The path exists, the method does not.",
        when="For example PUT on a plan, which never changes.",
        action="Use one of the methods in the `Allow` header.",
    ),
    "request-timeout": Guide(
        title="The request took too long to arrive",
        meaning="A request began and was not complete in time. Nothing was done, and the connection is closed.",
        when="The request line and headers took over 10 s, or the body took over 30 s after them.",
        action="Send the request whole and at once; over a slow line, write repeated layers once with `count`.",
    ),
    "conflict": Guide(
        title="The request contradicts what is there",
        meaning="Nothing was changed. `details` holds both sides of the contradiction.",
        when="A pool of that name exists with another plan; the expected `plan_id` is not the id this server plans; "
        "a pool to be deleted still has holders; a pool to be attached is not ready yet; a signal handler or finaliser "
        "attaches over a connection in the middle of a request of the same thread; a lease of that name exists; blocks "
        "that the lease does not hold; an `Idempotency-Key` of a request before the last.",
        action="Look at `details`: choose another name, drop or correct the expected `plan_id`, or end the holders "
        "it names. Give signal handlers and finalisers a connection of their own.",
    ),
    "not-enough-memory": Guide(
        title="The memory does not suffice",
        meaning="`details` says how many bytes are needed and how many are available.",
        when="A pool would not fit into the worker's budget beside the pools it has, or a plan's memory does not hold "
        "the request it must hold.",
        action="Delete a pool, ask for fewer blocks or less memory, or start the worker with a larger `--memory`.",
    ),
    "out-of-blocks": Guide(
        title="No block is free",
        meaning="The pool has fewer blocks to give than were asked for, or the tenant's quota is used up. Nothing was "
        "taken, and nothing that was to be freed with it was freed.",
        when="Other leases hold them, or they are reserved; the wait of `wait_s` is over.",
        action="Free blocks, wait for others to do so (`wait_s`), or have the quota raised.",
    ),
    "stale-handle": Guide(
        title="The handle belongs to something that is gone",
        meaning="The memory or the lease that was named does not exist any more, even if a pool or a lease of the same "
        "name does.",
        when="The pool was made again with another plan; its memory was lost and the epoch changed; the process that "
        "held memory of kind `cuda_ipc` has ended, and the pool has failed. A lease was closed, was not renewed in "
        "time, or was adopted by another; a worker was replaced while contents were listed.",
        action="Close what you hold, create the pool again if it has failed, and attach anew: what was in the old "
        "memory is lost. Open another lease, or adopt this one by its name and token; begin the list again.",
    ),
    "too-large": Guide(
        title="The request is too large",
        meaning="Something has more bytes than are read, served or possible; `details` has the limit. A request that "
        "is too large is not read to its end. (Too many layers, and names that are too long, are `spec-invalid`.)",
        when="A body or a request file over 4 MiB; a request line with its headers, or trailers, over 64 KiB; a plan "
        "that is over 6 MiB as JSON; a socket path over 107 bytes.",
        action="Write repeated layers once with `count`, and plan fewer layers or shorten their names; send fewer "
        "headers; choose a shorter run directory.",
    ),
    "unsupported-media-type": Guide(
        title="The body is not declared as JSON",
        meaning="The API reads JSON only, in UTF-8 and uncompressed.",
        when="Another or no `Content-Type` (curl's `-d` alone declares a form), another charset, or a "
        "`Content-Encoding`.",
        action="Send `Content-Type: application/json`.",
    ),
    "spec-invalid": Guide(
        title="The request is not valid as it stands",
        meaning="A value is missing, unknown, of the wrong type or out of range. `errors` points at each.",
        when='`8.0` or `"8"` where an integer belongs, an unknown field, a size that is not possible; an '
        "`Idempotency-Key` that came with another request before; a cursor of another API.",
        action="Correct the values at the pointers in `errors`.",
    ),
    "cannot-unify-page-size": Guide(
        title="The pages cannot be brought to one size",
        meaning="Under the strategy asked for, a layer's page can neither be scaled nor padded to the common size.",
        when="Its page size does not divide the largest, and its backend cannot skip a gap between pages or padding "
        "is not allowed for it.",
        action="The message names the layer, both sizes and what would make it possible; or use another strategy.",
    ),
    "layout-unsupported": Guide(
        title="The layout cannot be used here",
        meaning="The layout itself is well formed, but not usable with the rest of the request.",
        when="Cross-layer buffers for layers that differ, or a backend without the layout asked for.",
        action="Choose another layout or backend, or leave the option out.",
    ),
    "not-supported": Guide(
        title="This version does not do that yet",
        meaning="The request is well formed and may work with a later version.",
        when="A model type, a kind of layer or an option that kvpage does not know how to plan.",
        action="Leave the option out or update kvpage.",
    ),
    "rate-limited": Guide(
        title="Too many requests at once",
        meaning="The server is busy and refuses to queue more.",
        when="Many plans are being computed already, many requests wait for blocks, or many streams of events are "
        "open; a token changes things over TCP more often than `--rate-limit` allows; or, in a Python client, other "
        "threads used a shared connection for its whole `timeout_s`.",
        action="Wait as long as `Retry-After` says, then send the same request again. Give threads that wait long a "
        "connection each.",
    ),
    "internal": Guide(
        title="kvpage made a mistake",
        meaning="Something happened that the code says cannot happen. The cause is in the server's log.",
        when="A bug in kvpage; or the system refused something, such as another open file: the message names it.",
        action="If the message names a limit, raise that (`ulimit -n`, `LimitNOFILE=`). Else report it with the "
        "`request_id` and the lines of the log that carry it.",
    ),
    "protocol-error": Guide(
        title="A peer broke the worker protocol",
        meaning="The connection between two kvpage processes carried something the protocol does not allow, and was "
        "closed.",
        when="The two processes run different versions, or the socket belongs to another program.",
        action="Run the same version everywhere; see docs/protocol.md.",
    ),
    "worker-lost": Guide(
        title="The worker ended while it was asked",
        meaning="The connection to the device worker broke before it answered; the request may or may not have taken "
        "effect.",
        when="The worker was killed or crashed. The API process keeps the memory of its pools and hands it to the "
        "next worker.",
        action="Send the request again; creating a pool is safe to repeat under the same name.",
    ),
    "device-unavailable": Guide(
        title="No worker serves the device",
        meaning="The device's worker does not answer at the moment; also what clients raise when no server answers.",
        when="A worker is starting, was stopped, or cannot start; the server is not running.",
        action="`GET /v1/devices` shows the devices and their states. Start the server with `kvpage serve`, or the "
        "worker with `kvpage worker --device …`.",
    ),
    "draining": Guide(
        title="The process is shutting down",
        meaning="It finishes what it has begun and takes nothing new.",
        when="After SIGTERM.",
        action="Try again in a moment, when its successor has started.",
    ),
    "audit-unavailable": Guide(
        title="The request cannot be recorded, so it was not done",
        meaning="The server keeps an audit log, and what changes something is not done without a record of it. Reads, "
        "plans and steps of leases go on.",
        when="The disk of the audit log is full or does not answer, or its folder was removed or closed.",
        action="Make room, or mend what `detail` names; then the server goes on by itself. Send the request again.",
    ),
    "too-many-clients": Guide(
        title="The worker has too many connections",
        meaning="The worker keeps a reserve of file descriptors and refuses new clients before it runs out.",
        when="Very many attached processes, or a client that leaks connections.",
        action="Close connections, or raise the limit of open files for the worker.",
    ),
}


def codes_in_order() -> list[str]:
    """Every code, by HTTP status and then by name."""
    return sorted(GUIDES, key=lambda code: (ERRORS_BY_CODE[code].http_status, code))


def as_markdown() -> str:
    """The text of docs/errors.md."""
    lines = [
        "# Errors",
        "",
        "Every error has a stable `code`. Over HTTP it is an RFC 9457 problem (`application/problem+json`) whose",
        "`type` is `/errors#<code>`; in Python it is a subclass of `kvpage.KvpageError` with the same `code`,",
        "`details` and `errors`. Programs branch on the code; the texts may change. *Retryable* means that the same",
        "request can succeed later without being changed.",
        "",
        "This file is printed by `python -m kvpage_server.error_guide`; a running server shows it at `/errors`.",
        "",
        *_overview(),
    ]
    for code in codes_in_order():
        guide, kind = GUIDES[code], ERRORS_BY_CODE[code]
        retry = "retryable" if kind.retryable else "not retryable"
        lines += [
            "",
            f"## {code}",
            "",
            f"**{guide.title}.** HTTP {kind.http_status}, `{kind.__name__}`, {retry}.",
            "",
            f"- What it means: {guide.meaning}",
            f"- When: {guide.when}",
            f"- What to do: {guide.action}",
        ]
    return "\n".join(lines) + "\n"


def _overview() -> Iterator[str]:
    """A table of all codes."""
    yield "| code | HTTP | retryable | |"
    yield "| --- | --- | --- | --- |"
    for code in codes_in_order():
        kind = ERRORS_BY_CODE[code]
        retry = "yes" if kind.retryable else "no"
        yield f"| [`{code}`](#{code}) | {kind.http_status} | {retry} | {GUIDES[code].title} |"


def as_html() -> str:
    """The same page for a browser, with one anchor per code."""
    sections = []
    for code in codes_in_order():
        guide, kind = GUIDES[code], ERRORS_BY_CODE[code]
        texts = "".join(f"<p>{html.escape(text)}</p>" for text in (guide.meaning, guide.when, guide.action))
        retry = "retryable" if kind.retryable else "not retryable"
        sections.append(
            f'<section id="{code}"><h2>{code}</h2>'
            f"<p><b>{html.escape(guide.title)}.</b> HTTP {kind.http_status}, {retry}.</p>{texts}</section>"
        )
    return f"<!doctype html><meta charset=utf-8><title>kvpage errors</title><h1>Errors</h1>{''.join(sections)}"


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
