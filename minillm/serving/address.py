"""The address of the server, which needs no package of the extra `serve`."""

import socket

from minillm.errors import ConfigError


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address. It is bound before the model is loaded, and does not listen,
    so that an address in use is known at once and a client is refused until the model is ready.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        why = str(getattr(error, "strerror", None) or error)
        raise ConfigError(
            f"The server cannot use host {host!r} with port {port}: {why}; choose another "
            "--host or --port."
        ) from None
    return made
