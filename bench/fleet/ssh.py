"""Reading a host's files and signalling its benchmark: over SFTP with paramiko, or directly for a local host.

``ssh -G`` says how OpenSSH, and so Ansible, would connect; the same settings are applied here. Host
keys are checked against the project's and the user's known_hosts. A new key is accepted only on
request, a changed one never.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import logging
import os
import pwd
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import paramiko
from paramiko.hostkeys import HostKeyEntry

from bench.fleet.inventory import Target

CHUNK_BYTES = 256 * 1024
CONNECT_SECONDS = 15.0
# A channel that stays silent this long is taken as lost.
SILENCE_SECONDS = 15.0
# How a jump through another host is started: OpenSSH itself, so that its configuration holds for the jump too.
JUMP_OPTIONS = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS:.0f}")

# Its own lines for refused keys and broken connections would interleave with the live view.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)


class RemoteError(Exception):
    """A host that can't be used now; the message says why and what to do."""


class HostUnreachableError(RemoteError):
    """No connection: name, network, sshd or login."""


class LoginRefusedError(HostUnreachableError):
    """The host answers, but does not let us in; waiting does not help."""


class HostKeyRefusedError(RemoteError):
    """The host's key is unknown, changed or revoked."""


class FileTooLargeError(RemoteError):
    """A file on the host is larger than anything a benchmark writes."""


@dataclass(frozen=True)
class KnownHosts:
    """The project's known_hosts, checked before the user's; ``accept_new`` adds unknown keys to it."""

    project: Path
    accept_new: bool = False


@dataclass(frozen=True)
class SshSettings:
    """What ``ssh -G`` says of one host."""

    hostname: str
    port: int
    user: str
    key_files: tuple[str, ...] = ()
    agent: bool = True
    proxy_jump: str | None = None
    proxy_command: str | None = None
    key_alias: str | None = None
    known_hosts: tuple[str, ...] = ()

    @property
    def key_name(self) -> str:
        """The name under which known_hosts lists this host."""
        if self.key_alias:
            return self.key_alias
        return self.hostname if self.port == 22 else f"[{self.hostname}]:{self.port}"

    def jump(self) -> list[str] | None:
        """The command whose standard input and output are the connection, or None for a direct one.

        As OpenSSH does it: the last jump host is the one that connects, the others come before it (-J).
        """
        if self.proxy_command:
            tokens = {"%h": self.hostname, "%p": str(self.port), "%r": self.user, "%n": self.hostname}
            command = self.proxy_command.replace("%%", "\0")
            for token, value in tokens.items():
                command = command.replace(token, shlex.quote(value))
            return ["/bin/sh", "-c", "exec " + command.replace("\0", "%")]
        if not self.proxy_jump:
            return None
        *before, last = self.proxy_jump.split(",")
        destination = last if last.startswith("ssh://") else f"ssh://{last}"
        through = ["-J", ",".join(before)] if before else []
        return ["ssh", *JUMP_OPTIONS, *through, "-W", f"[{self.hostname}]:{self.port}", destination]


def ssh_settings(target: Target) -> SshSettings:
    """What OpenSSH would do for a target. Raises HostUnreachableError when ssh refuses its configuration."""
    command = ["ssh", "-G", *target.ssh_words()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        raise HostUnreachableError("OpenSSH's client (ssh) is not installed on this machine") from None
    if done.returncode != 0:
        raise HostUnreachableError(f"ssh refuses the settings of this host: {done.stderr.strip()}")
    return parse_ssh_settings(done.stdout)


def parse_ssh_settings(text: str) -> SshSettings:
    """Settings from the output of ``ssh -G``; what OpenSSH prints as ``none`` is unset."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if value and (value != "none" or key == "identityagent"):
            found.setdefault(key, []).append(value)
    first = {key: values[0] for key, values in found.items()}
    user_files = shlex.split(first.get("userknownhostsfile", ""))
    system_files = shlex.split(first.get("globalknownhostsfile", ""))
    return SshSettings(
        hostname=first["hostname"],
        port=int(first["port"]),
        user=first["user"],
        key_files=tuple(_own(path) for path in found.get("identityfile", [])),
        agent=first.get("identityagent") != "none",
        proxy_jump=first.get("proxyjump"),
        proxy_command=first.get("proxycommand"),
        key_alias=first.get("hostkeyalias"),
        known_hosts=tuple(_own(path) for path in user_files + system_files),
    )


def _own(path: str) -> str:
    """The path with ``~`` as OpenSSH takes it: the home of the account, whatever HOME says."""
    return pwd.getpwuid(os.getuid()).pw_dir + path[1:] if path.startswith("~/") else path


class Remote(Protocol):
    """A host whose files can be read, whichever way."""

    def read(self, path: str, limit: int) -> bytes:
        """The whole file. Raises FileNotFoundError, and FileTooLargeError over ``limit`` bytes."""

    def tail(self, path: str, limit: int) -> bytes:
        """The last ``limit`` bytes at most. Raises FileNotFoundError."""

    def fetch(self, path: str, partial: Path, limit: int) -> None:
        """Bring a file into ``partial``, going on where an earlier, broken transfer ended."""

    def sha256(self, path: str) -> str:
        """The file's sha256, computed on the host."""

    def run(self, words: Sequence[str], seconds: float = SILENCE_SECONDS) -> tuple[int, str]:
        """Run a command there as the login user: its exit status, and what it printed."""

    def close(self) -> None: ...


class LocalHost:
    """This machine as a host."""

    def read(self, path: str, limit: int) -> bytes:
        with open(path, "rb") as file:
            return _bounded(file.read(limit + 1), path, limit)

    def tail(self, path: str, limit: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit)

    def fetch(self, path: str, partial: Path, limit: int) -> None:
        with open(path, "rb") as source:
            _copy(source, partial, os.fstat(source.fileno()).st_size, path, limit)

    def sha256(self, path: str) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def run(self, words: Sequence[str], seconds: float = SILENCE_SECONDS) -> tuple[int, str]:
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=seconds, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RemoteError(str(error)) from error
        return done.returncode, done.stdout + done.stderr

    def close(self) -> None:
        """Nothing is open."""


class SshHost:
    """A host over one SSH connection. Every method raises HostUnreachableError when the connection is lost."""

    def __init__(self, client: paramiko.SSHClient, jump: subprocess.Popen[bytes] | None) -> None:
        self._client = client
        self._jump = jump
        try:
            self._sftp = client.open_sftp()
            self._sftp.get_channel().settimeout(SILENCE_SECONDS)  # type: ignore[union-attr]
        except (paramiko.SSHException, OSError, EOFError) as error:
            self.close()
            raise HostUnreachableError(
                f"logged in, but SFTP does not work ({_words(error)}); is the sftp subsystem on?"
            ) from error

    def read(self, path: str, limit: int) -> bytes:
        with _connection_errors(), self._sftp.open(path, "rb") as file:
            return _bounded(_read_all(file, limit + 1), path, limit)

    def tail(self, path: str, limit: int) -> bytes:
        with _connection_errors(), self._sftp.open(path, "rb") as file:
            file.seek(max(0, (file.stat().st_size or 0) - limit))
            return _read_all(file, limit)

    def fetch(self, path: str, partial: Path, limit: int) -> None:
        with _connection_errors(), self._sftp.open(path, "rb") as source:
            size = source.stat().st_size or 0
            if size <= limit:
                source.seek(_resume_at(partial, size))
                source.prefetch(size, max_concurrent_requests=64)
            _copy(source, partial, size, path, limit)

    def sha256(self, path: str) -> str:
        status, text = self.run(["sha256sum", "--", path])
        digest = text.split(" ")[0].lstrip("\\")
        if status != 0 or len(digest) != 64:
            raise RemoteError(f"sha256sum {path} failed: {text.strip()[:200]}")
        return digest

    def run(self, words: Sequence[str], seconds: float = SILENCE_SECONDS) -> tuple[int, str]:
        with _connection_errors():
            _, output, _ = self._client.exec_command(shlex.join(words) + " 2>&1", timeout=seconds)
            text = output.read(CHUNK_BYTES).decode("utf-8", "replace")
            if not output.channel.status_event.wait(seconds):  # recv_exit_status() alone would wait for ever
                raise TimeoutError
            return output.channel.recv_exit_status(), text

    def close(self) -> None:
        self._client.close()
        if self._jump is not None:
            self._jump.kill()
            self._jump.wait()


def connect(target: Target, known: KnownHosts) -> Remote:
    """Connect to a target. Raises HostUnreachableError or HostKeyRefusedError, saying what to do."""
    if target.local:
        return LocalHost()
    settings = ssh_settings(target)
    client = paramiko.SSHClient()
    keys = known_keys([str(known.project), *settings.known_hosts], settings.key_name)
    client.set_missing_host_key_policy(_NewKeyPolicy(known, keys.revoked))
    for key in reversed(keys.trusted):  # of two keys of one kind the first counts
        client.get_host_keys().add(settings.key_name, key.get_name(), key)
    connection, jump = _open(settings)
    try:
        client.connect(
            settings.key_alias or settings.hostname,
            port=22 if settings.key_alias else settings.port,
            username=settings.user,
            key_filename=[path for path in settings.key_files if os.path.exists(path)],  # type: ignore[arg-type]
            look_for_keys=False,
            allow_agent=settings.agent,
            sock=connection,
            banner_timeout=CONNECT_SECONDS,
            auth_timeout=SILENCE_SECONDS,
        )
        transport = client.get_transport()
        assert transport is not None
        transport.set_keepalive(15)
        return SshHost(client, jump)
    except paramiko.BadHostKeyException as error:
        reason: RemoteError = HostKeyRefusedError(_changed_key_message(error, settings.key_name, keys.files))
    except paramiko.PasswordRequiredException:
        reason = LoginRefusedError(
            f"a key for {settings.user}@{settings.hostname} has a passphrase; load it into the agent (ssh-add)"
        )
    except paramiko.AuthenticationException as error:
        reason = LoginRefusedError(
            f"login refused for {settings.user}@{settings.hostname} ({_words(error)}); "
            f"does `ssh {target.name}` work without a password?"
        )
    except RemoteError as error:
        reason = error
    except (paramiko.SSHException, OSError, EOFError, ValueError) as error:
        # paramiko has no class of its own for having neither a key nor an agent.
        keyless = "No authentication methods" in str(error)
        kind = LoginRefusedError if keyless else HostUnreachableError
        reason = kind(_with_jump_words(f"no SSH with {settings.key_name}: {_words(error)}", jump))
    client.close()
    connection.close()
    if jump is not None:
        jump.kill()
        jump.wait()
    raise reason


class _NewKeyPolicy(paramiko.MissingHostKeyPolicy):
    """Refuse a host without a known key; with ``accept_new`` write it into the project's known_hosts."""

    def __init__(self, known: KnownHosts, revoked: set[str]) -> None:
        self._known = known
        self._revoked = revoked

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        if key.get_base64() in self._revoked:
            raise HostKeyRefusedError(f"the host key of {hostname} is marked @revoked in known_hosts")
        if not self._known.accept_new:
            raise HostKeyRefusedError(
                f"the host key of {hostname} ({key.get_name()} {key.fingerprint}) is not known; compare it with the "
                "host's own, then accept it with ACCEPT_NEW_KEYS=1"
            )
        add_known_key(self._known.project, hostname, key)


def add_known_key(path: Path, name: str, key: paramiko.PKey) -> None:
    """Append one key to a known_hosts file, under a lock: many hosts are connected at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = HostKeyEntry([name], key).to_line()
    assert line is not None
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(line)


def _changed_key_message(error: paramiko.BadHostKeyException, name: str, files: Sequence[str]) -> str:
    remove = "; ".join(f"ssh-keygen -R '{name}' -f {file}" for file in files)
    return (
        f"the host key of {name} has CHANGED (now {error.key.get_name()} {error.key.fingerprint}): either "
        "the host was reinstalled or somebody is in between. "
        f"If you know it was reinstalled: {remove}; then ACCEPT_NEW_KEYS=1"
    )


@dataclass
class KnownKeys:
    """What known_hosts files say of one host: its keys, revoked keys (base64), and the files that list it."""

    trusted: list[paramiko.PKey] = field(default_factory=list)
    revoked: set[str] = field(default_factory=set)
    files: list[str] = field(default_factory=list)


def known_keys(files: Sequence[str], name: str) -> KnownKeys:
    """Look a host up in known_hosts files as OpenSSH does: names, hashed names, patterns and markers.

    paramiko's own reader knows neither patterns nor markers, and fails on the latter. Lines for a certificate
    authority are passed over: paramiko can't check host certificates.
    """
    found = KnownKeys()
    for file in files:
        try:
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            words = line.split()
            marker = words.pop(0) if words and words[0].startswith("@") else None
            if len(words) < 3 or words[0].startswith("#") or not _names(words[0], name):
                continue
            if marker == "@revoked":
                found.revoked.add(words[2])
            elif marker is None:
                with contextlib.suppress(Exception):  # a damaged line raises one of many things
                    entry = HostKeyEntry.from_line(" ".join(words[:3]))
                    if entry is not None and entry.key is not None:
                        found.trusted.append(entry.key)
                        found.files = list(dict.fromkeys([*found.files, file]))
    found.trusted = [key for key in found.trusted if key.get_base64() not in found.revoked]
    return found


def _names(patterns: str, name: str) -> bool:
    """Whether the first field of a known_hosts line is about a host; ``!`` excludes."""
    hit = False
    for pattern in patterns.split(","):
        if pattern.startswith("|1|"):
            with contextlib.suppress(ValueError, AssertionError):
                hit = hit or paramiko.HostKeys.hash_host(name, pattern) == pattern
        elif pattern.startswith("!"):
            if _matches(name, pattern[1:]):
                return False
        else:
            hit = hit or _matches(name, pattern)
    return hit


def _matches(name: str, pattern: str) -> bool:
    """OpenSSH's patterns: ``*`` and ``?`` only; a bracket is a bracket."""
    return fnmatch.fnmatchcase(name.lower(), pattern.lower().replace("[", "[[]"))


def _open(settings: SshSettings) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """A connected socket, and the process behind it when another host is in between."""
    command = settings.jump()
    if command is None:
        try:
            return socket.create_connection((settings.hostname, settings.port), timeout=CONNECT_SECONDS), None
        except OSError as error:
            raise HostUnreachableError(
                f"no connection to {settings.hostname} port {settings.port}: {_words(error)}"
            ) from error
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise HostUnreachableError(f"cannot start {command[0]}: {error.strerror}") from error
    return ours, process


def _with_jump_words(message: str, jump: subprocess.Popen[bytes] | None) -> str:
    """The message with what the jump's own ssh said, which is where the cause is."""
    if jump is None or jump.stderr is None:
        return message
    with contextlib.suppress(ProcessLookupError):
        jump.terminate()
    words = jump.stderr.read(4096).decode("utf-8", "replace").strip()
    return f"{message}; the jump says: {words.splitlines()[-1].strip()}" if words else message


@contextlib.contextmanager
def _connection_errors() -> Iterator[None]:
    """Errors of the connection as HostUnreachableError; those about a file stay as they are."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except (paramiko.SSHException, OSError, EOFError) as error:
        raise HostUnreachableError(f"the connection broke: {_words(error)}") from error


def _words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _read_all(file: Any, limit: int) -> bytes:
    """Up to ``limit`` bytes; a read may return less than asked for before the end."""
    parts: list[bytes] = []
    left = limit
    while left > 0 and (part := file.read(min(left, CHUNK_BYTES))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _bounded(data: bytes, path: str, limit: int) -> bytes:
    if len(data) > limit:
        raise FileTooLargeError(f"{path} is larger than {limit} bytes; no benchmark writes such a file")
    return data


def _resume_at(partial: Path, size: int) -> int:
    """Where to go on: behind what an earlier transfer brought, or at the start when that can't be its beginning."""
    try:
        done = partial.stat().st_size
    except FileNotFoundError:
        return 0
    return done if done <= size else 0


def _copy(source: IO[bytes] | Any, partial: Path, size: int, path: str, limit: int) -> None:
    if size > limit:
        raise FileTooLargeError(f"{path} has {size} bytes, more than the {limit} that a report may have")
    done = _resume_at(partial, size)
    source.seek(done)
    with partial.open("r+b" if done else "wb") as file:
        file.seek(done)
        while done < size and (part := source.read(min(CHUNK_BYTES, size - done))):
            file.write(part)
            done += len(part)
        file.truncate(done)
        file.flush()
        os.fsync(file.fileno())


def is_alive(remote: Remote, pid: int, run_id: str) -> bool | None:
    """Whether the benchmark process of a run still lives; None when the host does not let us see."""
    try:
        words = remote.read(f"/proc/{pid}/cmdline", CHUNK_BYTES).split(b"\0")
    except FileNotFoundError:
        return False
    except (PermissionError, RemoteError):
        return None
    return run_id.encode() in words


Connector = Callable[[Target], Remote]


def connector(project_known_hosts: Path, accept_new: bool) -> Connector:
    """A function that connects to targets with these known_hosts."""
    known = KnownHosts(project=project_known_hosts, accept_new=accept_new)
    return lambda target: connect(target, known)
