"""Whether the Hub can be reached, found out within seconds: its client waits half a minute for every file."""

from __future__ import annotations

import time
from pathlib import Path

from huggingface_hub import _CACHED_NO_EXIST, constants, get_session, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

# Seconds in which connecting is tried again, so that a network may come up meanwhile.
_PATIENCE = 3.0
# By name: in every other release, the Hub's client has another HTTP library.
_UNCONNECTED = {"ConnectError", "ConnectTimeout"}
# For how many seconds a connection that was made, or could not be made, is taken for what the next one will be.
_TRUSTED, _DOUBTED = 60.0, 5.0
_outcomes: dict[str, tuple[float, Exception | None]] = {}  # by the Hub's address: until when, and what went wrong


class UnreachableError(ValueError):
    """A file is not in the cache, and the Hub, which may have it, cannot be asked.

    Args:
        location: a Hub id.
        name: of the file.
        reason: what went wrong.
    """

    def __init__(self, location: str, name: str, reason: Exception):
        super().__init__(
            f"{location} is no folder, its {name} is not in the cache, and the Hub at {constants.ENDPOINT} cannot be "
            f"reached ({reason}). Check the name and the connection."
        )


def is_cached(location: str, name: str) -> bool:
    """Whether the cache holds a file of a repository on the Hub."""
    return isinstance(try_to_load_from_cache(location, name), str)


def is_known_absent(location: str, name: str) -> bool:
    """Whether the cache remembers that a repository on the Hub has no such file."""
    return try_to_load_from_cache(location, name) is _CACHED_NO_EXIST


def check_reach(location: str, name: str) -> None:
    """Raises `UnreachableError` for a file that is at hand nowhere while no connection to the Hub can be made.

    Whoever answers is connected, whatever the answer and however late it comes. Offline by its own switch, the client
    does not wait, so nothing is tried.

    Args:
        location: a local folder or a Hub id.
        name: of the file.
    """
    try:
        is_at_hand = Path(location).exists() or is_cached(location, name)
        url = hf_hub_url(location, name)
    except HFValidationError:  # no Hub id, which needs no connection to be refused
        return
    if is_at_hand or constants.HF_HUB_OFFLINE:
        return
    if (reason := _lately(url)) is not None:
        raise UnreachableError(location, name, reason) from reason


def _lately(url: str) -> Exception | None:
    """What keeps the Hub out of reach, if anything does."""
    until, reason = _outcomes.get(constants.ENDPOINT, (0.0, None))
    if time.monotonic() >= until:
        reason = _refusal(url)
        valid = _TRUSTED if reason is None else _DOUBTED
        _outcomes[constants.ENDPOINT] = (time.monotonic() + valid, reason)
    return reason


def _refusal(url: str) -> Exception | None:
    wait, end = 0.5, time.monotonic() + _PATIENCE
    while (reason := _refused(url)) is not None:
        if time.monotonic() + wait > end:
            return reason
        time.sleep(wait)
        wait *= 2
    return None


def _refused(url: str) -> Exception | None:
    try:
        get_session().head(url, timeout=constants.HF_HUB_ETAG_TIMEOUT, follow_redirects=False)
    except HTTPError as error:
        return error if type(error).__name__ in _UNCONNECTED else None
    return None
