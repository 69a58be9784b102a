"""Files fetched from the network once and kept in the cache."""

import http.client
import urllib.request

TIMEOUT_SECONDS = 30.0


class Unreachable(Exception):
    """An address that gives nothing, and why."""


def download(address: str, largest: int) -> bytes:
    """Return the first `largest` bytes at an address.

    Raises:
        Unreachable: with the address and the reason.
    """
    request = urllib.request.Request(address, headers={"User-Agent": "rfa (robust-filter-attention)"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return answer.read(largest)
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: not an address
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
        raise Unreachable(f"{address}, got {reason}") from error
