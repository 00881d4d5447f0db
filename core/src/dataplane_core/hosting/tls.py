"""TLS for a host that is reached over TCP: clients know its certificate, which it made when it started."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable
from typing import Any, Final

from dataplane_core.errors import BackendUnavailableError
from dataplane_core.hosting.server import set_tcp_options

_DAYS: Final = 3650
_PIECE_BYTES: Final = 1 << 18
#: Seconds that a client may take to agree on a key.
_GREETING_S: Final = 10.0


def new_certificate(ip: str) -> tuple[str, str]:
    """A certificate for this address that signs itself, and its key, in PEM.

    Raises:
        BackendUnavailableError: The package cryptography is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise BackendUnavailableError(
            "the process of the ledger cannot use TLS: the package cryptography is not installed.",
            retryable=False,
            hint="pip install cryptography",
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dataplane")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(ip))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    secret = key.private_bytes(serialization.Encoding.PEM, *form)
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), secret.decode()


def serve_tls(listener: socket.socket, certificate: str, key: str, target: str) -> Callable[[], object]:
    """Starts a thread that passes on what clients of a TCP socket send, to a Unix socket of this process, and back.

    Returns:
        Ends the thread. May be called once, from any thread.
    """
    set_tcp_options(listener)  # which its connections inherit
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(certificate + key)
        file.flush()
        context.load_cert_chain(file.name)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            inner, out = await asyncio.open_unix_connection(target, limit=_PIECE_BYTES)
            await asyncio.gather(_pass_on(reader, out), _pass_on(inner, writer))

    async def run() -> None:
        options: dict[str, Any] = {"ssl": context, "ssl_handshake_timeout": _GREETING_S, "limit": _PIECE_BYTES}
        async with await asyncio.start_server(serve, sock=listener, **options):
            await ended.wait()

    ended, loop = asyncio.Event(), asyncio.new_event_loop()

    def run_loop() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(run())

    threading.Thread(target=run_loop, name="dataplane-tls", daemon=True).start()
    return lambda: loop.call_soon_threadsafe(ended.set)


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(_PIECE_BYTES):
            target.write(data)
            await target.drain()
    finally:
        target.close()


def connect_tls(channel: socket.socket, certificate: str) -> socket.socket:
    """TLS over a connection to the host that has this certificate. Raises `OSError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate itself is known
    context.load_verify_locations(cadata=certificate)
    return context.wrap_socket(channel)
