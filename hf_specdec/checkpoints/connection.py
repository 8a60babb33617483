"""Whether the Hub can be reached, found out within seconds: its client waits half a minute for every file."""

from __future__ import annotations

import time
from pathlib import Path

from huggingface_hub import constants, get_session, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

# Seconds in which connecting is tried again, so that a network may come up meanwhile.
_PATIENCE = 3.0
# By name: in every other release, the Hub's client has another HTTP library.
_UNCONNECTED = {"ConnectError", "ConnectTimeout"}


class UnreachableError(ValueError):
    """A file is not in the cache, and the Hub, which may have it, cannot be asked."""


def is_out_of_reach(location: str, name: str) -> bool:
    """Whether a file is neither in a folder nor in the cache, and no connection to the Hub can be made.

    Whoever answers is connected, whatever the answer and however late it comes. Offline by its own switch, the client
    does not wait, so nothing is tried.

    Args:
        location: a local folder or a Hub id.
        name: of the file.
    """
    try:
        is_at_hand = Path(location).exists() or isinstance(try_to_load_from_cache(location, name), str)
        url = hf_hub_url(location, name)
    except HFValidationError:  # no Hub id, which needs no connection to be refused
        return False
    return not (constants.HF_HUB_OFFLINE or is_at_hand or _connects_soon(url))


def _connects_soon(url: str) -> bool:
    wait, end = 0.5, time.monotonic() + _PATIENCE
    while not _connects(url):
        if time.monotonic() + wait > end:
            return False
        time.sleep(wait)
        wait *= 2
    return True


def _connects(url: str) -> bool:
    try:
        get_session().head(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, follow_redirects=False)
    except HTTPError as error:
        return type(error).__name__ not in _UNCONNECTED
    return True


def unreachable(location: str, name: str) -> UnreachableError:
    """What is said of a file that is out of reach."""
    return UnreachableError(
        f"{location} is no folder, its {name} is not in the cache, and the Hub at {constants.ENDPOINT} cannot be "
        "reached. Check the name and the connection."
    )
