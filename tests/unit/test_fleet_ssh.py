"""Settings from inventory and ssh's own configuration, host keys, and the ways through other hosts."""

from __future__ import annotations

import json
import os
import pwd
import socket
import threading

import paramiko
import pytest

from bench.fleet.inventory import InventoryError, Target, parse_targets
from bench.fleet.ssh import (
    HostKeyRefusedError,
    HostUnreachableError,
    KnownHosts,
    SshSettings,
    add_known_key,
    connect,
    known_keys,
    parse_ssh_settings,
)

HOME = pwd.getpwuid(os.getuid()).pw_dir
PRINTED = """host node
user ops
hostname 192.0.2.7
port 2222
identityfile ~/.ssh/id_ed25519
identityfile /keys/second
proxyjump none
identityagent none
hostkeyalias none
globalknownhostsfile /etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2
userknownhostsfile ~/.ssh/known_hosts /other/known_hosts
"""


def test_settings_are_those_that_ssh_prints():
    assert parse_ssh_settings(PRINTED) == SshSettings(
        hostname="192.0.2.7",
        port=2222,
        user="ops",
        key_files=(f"{HOME}/.ssh/id_ed25519", "/keys/second"),
        agent=False,
        known_hosts=(
            f"{HOME}/.ssh/known_hosts",
            "/other/known_hosts",
            "/etc/ssh/ssh_known_hosts",
            "/etc/ssh/ssh_known_hosts2",
        ),
    )


def test_home_is_the_accounts_whatever_the_environment_says(monkeypatch):
    """As OpenSSH does; with HOME's, the collector looked for keys where Ansible did not."""
    monkeypatch.setenv("HOME", "/nowhere")
    assert parse_ssh_settings(PRINTED).key_files[0] == f"{HOME}/.ssh/id_ed25519"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (SshSettings("192.0.2.7", 22, "ops"), "192.0.2.7"),
        (SshSettings("192.0.2.7", 2222, "ops"), "[192.0.2.7]:2222"),
        (SshSettings("192.0.2.7", 2222, "ops", key_alias="node"), "node"),
    ],
)
def test_the_name_of_a_host_in_known_hosts(settings, name):
    assert settings.key_name == name


@pytest.mark.parametrize(
    ("settings", "tail"),
    [
        ({"proxy_jump": "jump"}, ["-W", "[n]:22", "ssh://jump"]),
        ({"proxy_jump": "ops@jump:2222"}, ["-W", "[n]:22", "ssh://ops@jump:2222"]),
        ({"proxy_jump": "a,ops@b"}, ["-J", "a", "-W", "[n]:22", "ssh://ops@b"]),
        ({"proxy_jump": "ssh://b:9"}, ["-W", "[n]:22", "ssh://b:9"]),
        ({"proxy_command": "nc -x 'p q' %h %p 100%%"}, ["/bin/sh", "-c", "exec nc -x 'p q' n 22 100%"]),
    ],
)
def test_jumps_are_those_of_openssh(settings, tail):
    command = SshSettings("n", 22, "ops", **settings).jump()
    assert command[-len(tail) :] == tail


def test_a_jump_never_asks_and_never_hangs():
    command = SshSettings("n", 22, "ops", proxy_jump="j").jump()
    assert "BatchMode=yes" in command
    assert any(word.startswith("ConnectTimeout=") for word in command)


def test_targets_from_ansibles_listing():
    listing = {
        "_meta": {
            "hostvars": {
                "localhost": {"ansible_connection": "local"},
                "n1": {"ansible_host": "192.0.2.1", "ansible_port": 2222, "ansible_ssh_user": "a", "ansible_user": "b"},
                "n2": {"ansible_ssh_private_key_file": "/k", "ansible_ssh_common_args": "-o ProxyJump=j -o 'X=a b'"},
            }
        },
        "all": {"children": ["ungrouped", "gpu-nodes"]},
        "gpu-nodes": {"hosts": ["n2", "n1", "bare"]},
    }
    targets = {target.name: target for target in parse_targets(json.dumps(listing))}
    assert list(targets) == ["bare", "localhost", "n1", "n2"]
    assert targets["localhost"].local
    assert targets["n1"].ssh_words() == ["-l", "a", "-p", "2222", "--", "192.0.2.1"]
    assert targets["n2"].ssh_words() == ["-o", "ProxyJump=j", "-o", "X=a b", "-i", "/k", "--", "n2"]
    assert targets["bare"].ssh_words() == ["--", "bare"]


def test_bad_quoting_in_the_inventory_names_the_host():
    with pytest.raises(InventoryError, match="n1: ansible_ssh_common_args: No closing quotation"):
        Target("n1", common_args="-o 'X").ssh_words()


def test_a_variable_that_is_a_template_is_refused_in_clear_words():
    with pytest.raises(InventoryError, match=r"n1: ansible_host is a template"):
        Target("n1", address="{{ lookup('env', 'X') }}").ssh_words()


class Server(paramiko.ServerInterface):
    def check_auth_publickey(self, username, key):
        return paramiko.AUTH_FAILED

    def get_allowed_auths(self, username):
        return "publickey"


@pytest.fixture
def sshd():
    """A server with a key of its own that lets nobody in; (port, key)."""
    key = paramiko.ECDSAKey.generate()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                transport = paramiko.Transport(listener.accept()[0])
                transport.add_server_key(key)
                transport.start_server(server=Server())
            except (OSError, EOFError, paramiko.SSHException):
                if listener.fileno() == -1:
                    return

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1], key
    listener.close()


def reach(port, tmp_path, lines="", accept_new=False):
    """Connect to the server with a known_hosts of ``lines``; the error's text and what known_hosts holds then."""
    known = tmp_path / "known_hosts"
    known.write_text(lines)
    target = Target("n", address="127.0.0.1", port=str(port), user="x", common_args="-F none -o UserKnownHostsFile=/x")
    with pytest.raises((HostKeyRefusedError, HostUnreachableError)) as caught:
        connect(target, KnownHosts(known, accept_new))
    return caught, known.read_text()


def test_an_unknown_key_is_refused_with_its_fingerprint_and_what_to_do(sshd, tmp_path):
    port, key = sshd
    caught, _ = reach(port, tmp_path)
    assert caught.type is HostKeyRefusedError
    assert key.fingerprint in str(caught.value)
    assert "ACCEPT_NEW_KEYS=1" in str(caught.value)


def test_a_new_key_is_written_to_the_projects_file_only_when_asked(sshd, tmp_path):
    port, key = sshd
    caught, known = reach(port, tmp_path, accept_new=True)
    assert caught.type is not HostKeyRefusedError  # on to the login, which this server refuses
    assert known == f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n"
    caught, again = reach(port, tmp_path, lines=known)
    assert caught.type is not HostKeyRefusedError
    assert again == known


def test_a_changed_key_is_refused_also_when_new_ones_are_accepted(sshd, tmp_path):
    port, _ = sshd
    other = paramiko.ECDSAKey.generate()
    lines = f"[127.0.0.1]:{port} {other.get_name()} {other.get_base64()}\n"
    caught, known = reach(port, tmp_path, lines, accept_new=True)
    assert caught.type is HostKeyRefusedError
    assert "CHANGED" in str(caught.value)
    assert f"ssh-keygen -R '[127.0.0.1]:{port}' -f {tmp_path / 'known_hosts'}" in str(caught.value)
    assert known == lines


def test_a_revoked_key_is_refused_although_it_is_known(sshd, tmp_path):
    port, key = sshd
    line = f"{key.get_name()} {key.get_base64()}"
    caught, _ = reach(port, tmp_path, f"[127.0.0.1]:{port} {line}\n@revoked * {line}\n")
    assert caught.type is HostKeyRefusedError
    assert "@revoked" in str(caught.value)


def test_known_hosts_are_read_as_openssh_reads_them(tmp_path):
    """Hashed names, patterns, exclusions, markers and damaged lines."""
    keys = [paramiko.ECDSAKey.generate() for _ in range(5)]
    plain, hashed, pattern, authority, other = (f"{key.get_name()} {key.get_base64()}" for key in keys)
    path = tmp_path / "known_hosts"
    path.write_text(
        f"# a comment {plain}\n\nnode-1,192.0.2.1 {plain} somebody@somewhere\n"
        f"{paramiko.HostKeys.hash_host('node-2')} {hashed}\n"
        f"*.rack,!bad.rack {pattern}\n[node-3]:2222 {other}\n@cert-authority * {authority}\n"
        "node-1 ssh-ed25519 %%%damaged\nnode-1\n|1|bad|hash ssh-ed25519 AAAA\n"
    )

    def found(name):
        return [key.get_base64() for key in known_keys([str(path), "/not/there"], name).trusted]

    first, second, third, _, fifth = (key.get_base64() for key in keys)
    assert found("node-1") == found("192.0.2.1") == [first]
    assert found("node-2") == [second]
    assert found("a.rack") == [third]
    assert found("bad.rack") == found("node-3") == found("node") == []
    assert found("[node-3]:2222") == [fifth]


def test_many_new_keys_at_once_are_whole_lines(tmp_path):
    path = tmp_path / "deep" / "known_hosts"
    keys = [paramiko.ECDSAKey.generate() for _ in range(20)]
    threads = [threading.Thread(target=add_known_key, args=(path, f"n{n}", key)) for n, key in enumerate(keys)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = paramiko.HostKeys(str(path))
    assert all(found.check(f"n{n}", key) for n, key in enumerate(keys))


def test_nobody_at_the_port_says_which_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    caught, _ = reach(port, tmp_path)
    assert str(caught.value) == f"no connection to 127.0.0.1 port {port}: Connection refused"


def test_a_jump_that_fails_is_named_with_its_own_words(tmp_path):
    target = Target(
        "n", address="192.0.2.1", user="x", common_args="-F none -o ProxyCommand='sh -c \"echo no way >&2; exit 1\"'"
    )
    with pytest.raises(HostUnreachableError, match="the jump says: no way"):
        connect(target, KnownHosts(tmp_path / "known_hosts"))
