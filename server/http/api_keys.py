"""API keys: which keys may use the server, their names and their limits.

A key file has one key per line, then the settings that differ from the options for all keys:

    # comments and empty lines are skipped
    sk-a-key-without-a-name
    alice  sk-alices-key  weight=2
    batch  sk-a-key       requests-per-minute=60 max-concurrent-requests=8 tokens-per-minute=200000 min-priority=-10
    carol  sk-carols-key  admin=true
    bob    sha256:6ca13d52ca70c883e0f0bb101e425a89e8624de51db2d2392593af6a84118090

Memory holds the SHA-256 digest of a key only. Keys are random, so no slower hash is needed.
"""

import dataclasses
import difflib
import hashlib
import hmac
import logging
import os
import re
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from engine.errors import ConfigError
from server.config import ServerConfig
from server.http.caller import Caller
from server.http.rate_limits import Limits, RateLimiter

logger = logging.getLogger(__name__)

SETTINGS = ("weight", "min-priority", "admin", *(f.name.replace("_", "-") for f in dataclasses.fields(Limits)))
SETTING = re.compile(f"({'|'.join(SETTINGS)})=(.*)")
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
LIKE_A_SETTING = re.compile(r"[A-Za-z][A-Za-z_-]*=.*[^=]")  # base64 has = only at its end
NEAR = 0.75  # lowest difflib ratio of a misspelled setting
DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
MAX_WEIGHT = 1000.0


@dataclass(frozen=True)
class ApiKey:
    """`min_priority` is the most urgent `priority` that requests with this key may have; None: any. `admin`: the key
    may use the routes that change what the server serves; the only key of a server is an administrator's."""

    digest: bytes
    name: str
    limits: Limits
    weight: float = 1.0
    min_priority: int | None = None
    admin: bool = False


class Account:
    """A key and its use of its limits."""

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self.limiter = RateLimiter(key.limits, whose="this API key" if key.digest else "all callers together")

    def change(self, key: ApiKey) -> None:
        """Replace the settings of the key; its use of its limits stays."""
        self.key = key
        self.limiter.set(key.limits)

    def caller(self, trace_parent: str) -> Caller:
        """The sender of a request with this key."""
        key = self.key
        return Caller(self.limiter, key.digest.hex(), key.weight, key.min_priority, trace_parent, key.admin)


class ApiKeys:
    """All keys of a server. Without keys, all clients share the account `anyone`."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError where the key file cannot be read or breaks the rules above."""
        self._config = config
        limits = Limits(config.requests_per_minute, config.max_concurrent_requests, config.tokens_per_minute)
        self.anyone = Account(ApiKey(b"", "anyone", limits, admin=True))
        self._accounts: dict[bytes, Account] = {}
        self._replace(self._read())

    def __len__(self) -> int:
        return len(self._accounts)

    def reload(self) -> None:
        """Read the key file anew. A wrong file changes nothing, and the log says why.

        Keys that are still in the file keep their use; requests with removed keys run to their end.
        """
        try:
            keys = self._read()
        except ConfigError as error:
            logger.error("the API keys stay as they are: %s", error)
            return
        self._replace(keys)
        logger.info("%d API keys are in use", len(self))

    def find(self, given: bytes) -> Account | None:
        """The account of the key `given`, or None. All digests are compared, each in constant time."""
        digest, found = hashlib.sha256(given).digest(), None
        for known, account in self._accounts.items():
            if hmac.compare_digest(known, digest):
                found = account
        return found

    def _replace(self, keys: list[ApiKey]) -> None:
        before, self._accounts = self._accounts, {}
        for key in keys:
            account = before.get(key.digest) or Account(key)
            account.change(key)
            self._accounts[key.digest] = account

    def _read(self) -> list[ApiKey]:
        limits = self.anyone.key.limits
        keys = [_key(text, None, limits, "api_key") for text in self._config.api_key]
        if (path := self._config.api_key_file) is not None:
            keys += list(read_key_file(path, limits))
        unique = list({key.digest: key for key in keys}.values())
        if len(unique) == 1:
            return [dataclasses.replace(unique[0], admin=True)]
        # With several keys, a key may go before all others only if its line in the file allows that.
        return [key if key.min_priority is not None else dataclasses.replace(key, min_priority=0) for key in unique]


def read_key_file(path: str, limits: Limits) -> Iterator[ApiKey]:
    """The keys of a file; `limits` apply where a line sets none. Raises ConfigError, which never repeats a key."""
    try:
        with open(path, encoding="utf-8") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & stat.S_IROTH:
                logger.warning(
                    "everybody on this machine can read the keys in %s: chmod 600 %s", path, shlex.quote(path)
                )
            lines = file.read().splitlines()
    except OSError as error:
        raise ConfigError(f"api_key_file: cannot read {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api_key_file: {path} is not UTF-8 text.") from None
    found: dict[bytes, int] = {}  # digest -> line
    for number, line in enumerate(lines, start=1):
        words = re.sub(r"(^|\s)#.*", "", line).split()
        if words:
            where = f"api_key_file: {path}, line {number}"
            key = _parse_line(words, where, limits)
            if found.setdefault(key.digest, number) != number:
                raise ConfigError(f"{where}: this key is in line {found[key.digest]}, too.")
            yield key
    if not found:
        raise ConfigError(f"api_key_file: {path} holds no key; write one per line.")


def _parse_line(words: list[str], where: str, limits: Limits) -> ApiKey:
    settings = [match for word in words if (match := SETTING.fullmatch(word))]
    parts = [word for word in words if not SETTING.fullmatch(word)]
    _check_parts(parts, where)
    names = [match[1] for match in settings]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{where}: {twice} is set twice.")
    key = _key(parts[-1], parts[0] if len(parts) == 2 else None, limits, where)
    for match in settings:
        key = _with_setting(key, match[1], match[2], where)
    return key


def _check_parts(parts: list[str], where: str) -> None:
    """Raise ConfigError unless the words of a line that are no settings are `KEY` or `NAME KEY`. A key alone may look
    like a misspelled setting; beside another word it may not."""
    known, hint = ", ".join(SETTINGS), "(Write a key of this form as sha256:DIGEST.)"
    if len(parts) > 1 and (near := next(filter(None, map(_nearest_setting, parts)), None)):
        raise ConfigError(f"{where}: unknown setting; did you mean {near}? The settings are {known}. {hint}")
    if not 1 <= len(parts) <= 2:
        raise ConfigError(f"{where}: must be `KEY` or `NAME KEY`, then settings (such as weight=2; {known}).")
    if len(parts) == 1:
        return
    name, key = parts
    if LIKE_A_SETTING.fullmatch(key):  # a misspelled setting: the key would be read as a name
        raise ConfigError(f"{where}: unknown setting; the settings are {known}. {hint}")
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: the name may hold letters, digits, and . _ @ - only.")


def _nearest_setting(word: str) -> str | None:
    """The setting that a word misspells; None for any other word."""
    if not LIKE_A_SETTING.fullmatch(word):
        return None
    name = word.partition("=")[0].replace("_", "-")
    return next(iter(difflib.get_close_matches(name, SETTINGS, n=1, cutoff=NEAR)), None)


def _with_setting(key: ApiKey, name: str, text: str, where: str) -> ApiKey:
    field = name.replace("-", "_")
    wanted = "a whole number above 0, or none"
    try:
        if field == "weight":
            wanted = f"a number above 0, at most {MAX_WEIGHT:g}"
            if 0 < float(text) <= MAX_WEIGHT:
                return dataclasses.replace(key, weight=float(text))
        elif field == "admin":
            wanted = "true or false"
            if text in ("true", "false"):
                return dataclasses.replace(key, admin=text == "true")
        elif field == "min_priority":
            wanted = "a whole number"
            return dataclasses.replace(key, min_priority=int(text))
        elif text == "none" or int(text) > 0:
            value = None if text == "none" else int(text)
            return dataclasses.replace(key, limits=dataclasses.replace(key.limits, **{field: value}))
    except ValueError:
        pass
    raise ConfigError(f"{where}: {name} must be {wanted}, not {text!r}.")


def _key(text: str, name: str | None, limits: Limits, where: str) -> ApiKey:
    match = DIGEST.fullmatch(text)
    if match is None and text.startswith("sha256:"):
        raise ConfigError(f"{where}: behind sha256: must be 64 hexadecimal digits.")
    digest = bytes.fromhex(match[1]) if match else hashlib.sha256(text.encode()).digest()
    return ApiKey(digest, name or f"key-{digest.hex()[:8]}", limits)
