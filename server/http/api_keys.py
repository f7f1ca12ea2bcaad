"""API keys: who may use the server, under what name, and how much of it.

A key file has one key per line, after it whatever differs from the options for all keys:

    # comments and empty lines are skipped
    sk-a-key-without-a-name
    alice  sk-alices-key  weight=2
    batch  sk-a-key       requests-per-minute=60 max-concurrent-requests=8 tokens-per-minute=200000 min-priority=-10
    bob    sha256:6ca13d52ca70c883e0f0bb101e425a89e8624de51db2d2392593af6a84118090

In memory a key is its SHA-256 digest only. Keys are random, so nothing slower than SHA-256 is needed.
"""

import dataclasses
import hashlib
import hmac
import logging
import os
import re
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.types import Scope

from engine.errors import ConfigError, InvalidRequestError
from engine.request import Request
from server.config import ServerConfig
from server.http.rate_limits import Limits, RateLimiter

logger = logging.getLogger(__name__)

SETTINGS = ("weight", "min-priority", *(f.name.replace("_", "-") for f in dataclasses.fields(Limits)))
SETTING = re.compile(f"({'|'.join(SETTINGS)})=(.*)")
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
LIKE_A_SETTING = re.compile(r"[A-Za-z][A-Za-z_-]*=.*[^=]")  # behind a key or a name; base64 ends in = at most
DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
MAX_WEIGHT = 1000.0


@dataclass(frozen=True)
class ApiKey:
    """`min_priority` is the most urgent `priority` that its requests may have; None: any."""

    digest: bytes
    name: str
    limits: Limits
    weight: float = 1.0
    min_priority: int | None = None


class Account:
    """A key and what is used of its limits."""

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self.limiter = RateLimiter(key.limits, whose="this API key" if key.digest else "all callers together")

    @property
    def tenant(self) -> str:
        return self.key.digest.hex()

    def change(self, key: ApiKey) -> None:
        self.key = key
        self.limiter.set(key.limits)

    def sign(self, request: Request) -> Request:
        """The request as this key's; InvalidRequestError where it may not ask for it."""
        least = self.key.min_priority
        if least is not None and request.priority < least:
            raise InvalidRequestError(f"priority must be at least {least} with this API key.", "priority")
        return dataclasses.replace(request, tenant=self.tenant, weight=self.key.weight)


class ApiKeys:
    """All keys of a server. Without any, everybody shares the account `anyone`."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError where the key file cannot be read or is not as above."""
        self._config = config
        limits = Limits(config.requests_per_minute, config.max_concurrent_requests, config.tokens_per_minute)
        self.anyone = Account(ApiKey(b"", "anyone", limits))
        self._accounts: dict[bytes, Account] = {}
        self._take(self._read())

    def __len__(self) -> int:
        return len(self._accounts)

    def reload(self) -> None:
        """Read the key file anew. One that is wrong changes nothing, and the log says why.

        Keys that are still there keep what they have used; requests of keys that are gone run to their end.
        """
        try:
            keys = self._read()
        except ConfigError as error:
            logger.error("the API keys stay as they are: %s", error)
            return
        self._take(keys)
        logger.info("%d API keys are in use", len(self))

    def find(self, given: bytes) -> Account | None:
        """The account of a key; all digests are compared, each in constant time."""
        digest, found = hashlib.sha256(given).digest(), None
        for known, account in self._accounts.items():
            if hmac.compare_digest(known, digest):
                found = account
        return found

    def _take(self, keys: list[ApiKey]) -> None:
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
            return unique
        # Where there are others, going before all of them is something that a key must be allowed to.
        return [key if key.min_priority is not None else dataclasses.replace(key, min_priority=0) for key in unique]


def read_key_file(path: str, limits: Limits) -> Iterator[ApiKey]:
    """The keys of a file; `limits` are those of keys for which it says nothing. ConfigError never repeats a key."""
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
    known = ", ".join(SETTINGS)
    settings = [match for word in words if (match := SETTING.fullmatch(word))]
    parts = [word for word in words if not SETTING.fullmatch(word)]
    if not 1 <= len(parts) <= 2:
        raise ConfigError(f"{where}: must be `KEY` or `NAME KEY`, then settings (such as weight=2; {known}).")
    if len(parts) == 2 and LIKE_A_SETTING.fullmatch(parts[1]):  # as a key, it would make the key a name
        raise ConfigError(
            f"{where}: what looks like a setting there is none: {known}. (A key of this form: write sha256:DIGEST.)"
        )
    if len(parts) == 2 and not NAME.fullmatch(parts[0]):
        raise ConfigError(f"{where}: the name may hold letters, digits, and . _ @ - only.")
    names = [match[1] for match in settings]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{where}: {twice} is set twice.")
    key = _key(parts[-1], parts[0] if len(parts) == 2 else None, limits, where)
    for match in settings:
        key = _with_setting(key, match[1], match[2], where)
    return key


def _with_setting(key: ApiKey, name: str, text: str, where: str) -> ApiKey:
    field = name.replace("-", "_")
    wanted = "a whole number above 0, or none"
    try:
        if field == "weight":
            wanted = f"a number above 0, at most {MAX_WEIGHT:g}"
            if 0 < float(text) <= MAX_WEIGHT:
                return dataclasses.replace(key, weight=float(text))
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


def account_of(scope: Scope) -> Account | None:
    """Whose request it is; None outside of the server's middleware."""
    account: Account | None = scope.get("state", {}).get("account")
    return account


def tenant_of(scope: Scope) -> str:
    """The API key's digest, in hex; empty where no keys are set."""
    tenant: str = scope.get("state", {}).get("tenant", "")
    return tenant


def cache_salt(scope: Scope, client_salt: str) -> str:
    """Who may share KV blocks: clients with the same API key and the same salt of their own.

    The length in front keeps the two apart: no choice of a salt reaches the blocks of another key.
    """
    tenant = tenant_of(scope)
    return f"{len(tenant)}:{tenant}{client_salt}" if tenant or client_salt else ""
