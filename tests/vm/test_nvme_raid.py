"""The life of an array on a real kernel with NVMe controllers: made, kept, refused, missed, torn down, made again.

The tests are chapters of one story and run in the order they stand here.
"""

from __future__ import annotations

import gzip
import json

import pytest
from conftest import CHECKOUT, Controller
from vm_guest import UNREACHABLE, Guest
from vm_image import INITRAMFS_CALLS

STORY = True
NAME = "fastpersist"
MOUNT = f"/mnt/{NAME}"
BY_ID = "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_"
# Named in three ways, in an order that is neither the serials' nor the kernel's.
CHOSEN = ["DATA0002", f"{BY_ID}DATA0001", "nvme-QEMU_NVMe_Ctrl_DATA0003"]
SERIALS = ["DATA0001", "DATA0002", "DATA0003"]


def configuration(guest: Guest) -> str:
    return guest.run("cat /etc/fstab /etc/mdadm/mdadm.conf /opt/fastpersist-bench/array.json 2>/dev/null || true")


def role_rebuilds(guest: Guest) -> int:
    """How often the role rebuilt the initramfs; packages do it with other arguments."""
    return int(guest.run(f"grep -c -e '-u -k all' {INITRAMFS_CALLS} || true"))


def kernel_name(guest: Guest, serial: str) -> str:
    return guest.run(f"basename $(readlink -f {BY_ID}{serial})").strip()


def test_an_inventory_without_a_started_guest_leads_nowhere(guest: Guest) -> None:
    started = guest.inventory.read_text()
    guest._write_inventory(UNREACHABLE)
    asleep = json.loads(guest.inventory.read_text())["all"]["children"]["gpu_nodes"]["hosts"]
    guest.inventory.write_text(started)
    assert [host["ansible_host"] for host in asleep.values()] == [UNREACHABLE]
    (host,) = json.loads(started)["all"]["children"]["gpu_nodes"]["hosts"].values()
    assert host["ansible_connection"] == "ssh"
    assert "StrictHostKeyChecking=yes" in host["ansible_ssh_args"]


def test_no_choice_does_nothing(controller: Controller) -> None:
    played = controller.raid()
    assert played.changed == 0
    assert "Decide" not in played.output


def test_check_mode_shows_a_first_run_and_changes_nothing(guest: Guest, controller: Controller) -> None:
    before = configuration(guest)
    shown = controller.raid("--check", "--diff", nvme_raid_devices=CHOSEN).output
    for step in (
        "make the RAID-0 array fastpersist, chunk 512 KiB, of",
        "make an xfs filesystem on it",
        "+ARRAY /dev/md/fastpersist metadata=1.2 UUID=new-array",
        "rebuild the initramfs",
        f"+UUID=new-filesystem {MOUNT} xfs noatime,nofail,x-systemd.device-timeout=30s 0 0",
        f"mount it at {MOUNT}",
    ):
        assert step in shown
    assert configuration(guest) == before
    assert guest.run(f"test -e {MOUNT} || command -v mdadm || wipefs -n {BY_ID}DATA000[123]") == ""


def test_every_bad_choice_is_refused_at_once(guest: Guest, controller: Controller) -> None:
    """One run names all bad drives; nothing is touched, not even the good one among them."""
    guest.run(
        f"pvcreate -q {BY_ID}LVM0001 && vgcreate -q vg0 {BY_ID}LVM0001 && lvcreate -q -y -L 64M -n data vg0"
        f" && mkfs.ext4 -q /dev/vg0/data && swapon {BY_ID}SWAP0001"
    )
    # A mount that only one process sees, as in a container, and a program that reads a raw drive.
    guest.run(
        "nohup unshare -m sh -c 'mount /dev/vg0/data /mnt && exec sleep 1000' >/dev/null 2>&1 </dev/null & sleep 2"
    )
    guest.run(f"nohup sleep 1000 <{BY_ID}DATA0004 >/dev/null 2>&1 &")
    bad = ["ROOT0001", "LVM0001", "SWAP0001", "PART0001", "ODD0001", "DATA0004", "NOSUCH99", "nvme1n1"]
    before = guest.run("wipefs -n /dev/nvme?n1; cat /proc/mounts")
    said = controller.raid(fails=True, nvme_raid_devices=[*bad, *CHOSEN]).output
    names = {serial: kernel_name(guest, serial) for serial in (*bad[:6], *SERIALS)}
    for serial, reason in (
        ("ROOT0001", "backs /"),
        ("ROOT0001", "can't be opened exclusively: Device or resource busy"),
        ("LVM0001", "is mounted at /mnt through /dev/mapper/vg0-data, as process"),
        ("LVM0001", "is an LVM physical volume"),
        ("LVM0001", "is held by dm-0"),
        ("SWAP0001", "backs swap"),
        ("SWAP0001", "holds swap space"),
        ("PART0001", "has a partition table (gpt)"),
        ("DATA0004", "is open in process"),
    ):
        assert f"{BY_ID}{serial} (serial {serial}, now {names[serial]}): {reason}" in said
    assert "NOSUCH99: no drive with this serial" in said
    assert "nvme1n1: a kernel name can mean another drive" in said
    assert "not alike in size" in said
    assert "not alike in sector" in said
    assert "serial DATA0001, now" not in said.replace("bytes", "").split("not alike")[0]
    assert guest.run("wipefs -n /dev/nvme?n1; cat /proc/mounts") == before
    guest.run("pkill sleep")


def test_the_array_is_made(guest: Guest, controller: Controller) -> None:
    played = controller.raid(nvme_raid_devices=CHOSEN)
    assert "make an xfs filesystem on it" in played.output
    detail = guest.run(f"mdadm --detail /dev/md/{NAME}")
    assert "Raid Level : raid0" in detail
    assert "Chunk Size : 512K" in detail
    assert f"Name : any:{NAME}" in detail
    members = guest.run(f"ls /sys/block/$(basename $(readlink -f /dev/md/{NAME}))/slaves").split()
    assert sorted(members) == sorted(kernel_name(guest, serial) for serial in SERIALS)
    assert "sunit=128    swidth=384 blks" in guest.run(f"xfs_info {MOUNT}")
    assert "noatime" in guest.run(f"findmnt -n -o OPTIONS {MOUNT}")
    guest.run(f"echo kept >{MOUNT}/file && sync {MOUNT}/file")


def test_configuration_has_each_line_once(guest: Guest) -> None:
    uuid = guest.run(f"mdadm --detail --export /dev/md/{NAME} | sed -n 's/^MD_UUID=//p'").strip()
    assert guest.run("grep ^ARRAY /etc/mdadm/mdadm.conf").split("\n")[:-1] == [
        f"ARRAY /dev/md/{NAME} metadata=1.2 UUID={uuid}"
    ]
    fs_uuid = guest.run(f"findmnt -n -o UUID {MOUNT}").strip()
    assert guest.run(f"grep {MOUNT} /etc/fstab") == (
        f"UUID={fs_uuid} {MOUNT} xfs noatime,nofail,x-systemd.device-timeout=30s 0 0\n"
    )
    assert role_rebuilds(guest) == 1
    described = json.loads(guest.run("cat /opt/fastpersist-bench/array.json"))
    assert (described["uuid"], [m["serial"] for m in described["members"]]) == (uuid, SERIALS)
    # RAID-0 has nothing that a monitor could report.
    assert guest.run("systemctl is-active mdmonitor || true") == "inactive\n"


def test_again_changes_nothing(guest: Guest, controller: Controller) -> None:
    before = configuration(guest)
    assert controller.raid(nvme_raid_devices=CHOSEN).changed == 0
    assert controller.raid(nvme_raid_match="QEMU NVMe*", nvme_raid_count=3, fails=True).output.count(
        "nvme_raid_count is 3"
    )
    assert configuration(guest) == before


def test_an_array_that_differs_is_refused(guest: Guest, controller: Controller) -> None:
    defaults = {"name": NAME, "mount_point": MOUNT, "array_file": "/opt/fastpersist-bench/array.json"}
    cases = [
        {"devices": SERIALS, "chunk_kib": 256},
        {"devices": SERIALS[:2]},
        {"devices": [*SERIALS, "DATA0004"]},
        {"devices": SERIALS, "name": "other", "mount_point": "/mnt/other"},
        {"devices": SERIALS, "filesystem": "ext4"},
        {"devices": SERIALS, "mount_point": "/mnt/other"},
    ]
    before = configuration(guest)
    said = controller.play("tests/vm/bad_choices.yml", defaults=defaults, cases=cases).output
    messages = said[said.index("Say why each was refused") :]
    assert "NOT REFUSED" not in messages
    for reason in (
        "has a chunk of 512 KiB, nvme_raid_chunk_kib is 256",
        "DATA0003, now",
        "but isn't chosen",
        "is chosen, but isn't a member of the array",
        f"is a member of an md array, any:{NAME}",
        "holds xfs, nvme_raid_filesystem is ext4; nothing on an existing array is ever formatted",
        f"the array is mounted at {MOUNT}, nvme_raid_mount_point is /mnt/other",
    ):
        assert reason in messages
    assert configuration(guest) == before
    assert guest.run(f"cat {MOUNT}/file") == "kept\n"


def test_a_drive_that_vanished_is_refused_and_the_mount_is_missed(guest: Guest, controller: Controller) -> None:
    uuid = json.loads(guest.run("cat /opt/fastpersist-bench/array.json"))["uuid"]
    guest.stop()
    guest.build_initramfs()
    assert uuid.encode() in gzip.decompress(guest.initramfs.read_bytes())
    guest.start(without=["DATA0002"])
    before = configuration(guest)
    said = controller.raid(fails=True, nvme_raid_devices=CHOSEN).output
    assert "DATA0002: no drive with this serial" in said
    assert "is degraded: 2 of its 3 members are here" in said
    assert configuration(guest) == before
    program = (
        "import sys; sys.path.insert(0, '/root'); import array_of_bench as a; from pathlib import Path;"
        f"a.check_mount(Path('{MOUNT}'), a.load_array_file(Path('/opt/fastpersist-bench')))"
    )
    guest.put(CHECKOUT / "bench/host/array.py", "/root/array_of_bench.py")
    refused = guest.run(f'python3 -c "{program}" 2>&1 || true')
    assert f"{MOUNT} lies on /dev/nvme" in refused
    assert f"not on the array {NAME}, which is not assembled here" in refused


def test_after_a_boot_with_all_drives_it_is_as_before(guest: Guest, controller: Controller) -> None:
    guest.start()
    guest.settle()
    assert guest.run(f"cat {MOUNT}/file") == "kept\n"
    assert guest.run("ls /dev/md").split() == [NAME]
    before = configuration(guest)
    assert controller.raid(nvme_raid_devices=CHOSEN).changed == 0
    assert configuration(guest) == before
    guest.put(CHECKOUT / "bench/host/array.py", "/root/array_of_bench.py")
    guest.run(
        'cd /root && python3 -c "import array_of_bench as a; from pathlib import Path;'
        f"a.check_mount(Path('{MOUNT}/run'), a.load_array_file(Path('/opt/fastpersist-bench')))\""
    )


@pytest.mark.parametrize("where", ["inventory", "file", "wrong name"])
def test_teardown_is_refused_unless_this_run_names_the_array(guest: Guest, controller: Controller, where: str) -> None:
    variables = guest.folder / "confirmed.json"
    variables.write_text(json.dumps({"nvme_raid_confirm": NAME}), encoding="utf-8")
    inventory = guest.folder / "group_vars" / "all.json"
    inventory.parent.mkdir(exist_ok=True)
    try:
        if where == "inventory":
            variables.rename(inventory)
            played = controller.play("playbooks/teardown.yml", fails=True)
        elif where == "file":
            played = controller.play("playbooks/teardown.yml", "--extra-vars", f"@{variables}", fails=True)
        else:
            played = controller.play("playbooks/teardown.yml", fails=True, nvme_raid_confirm="other")
    finally:
        inventory.unlink(missing_ok=True)
    assert "teardown refused" in played.output
    assert f"CONFIRM={NAME}" in played.output
    assert guest.run(f"cat {MOUNT}/file") == "kept\n"


def test_teardown_stops_at_a_mount_in_use(guest: Guest, controller: Controller) -> None:
    guest.run(f"(cd {MOUNT} && exec sleep 1000) >/dev/null 2>&1 </dev/null &")
    said = controller.play("playbooks/teardown.yml", fails=True, nvme_raid_confirm=NAME).output
    assert "in use by" in said
    assert "(sleep)" in said
    assert guest.run(f"cat {MOUNT}/file; pkill sleep") == "kept\n"


def test_teardown_frees_the_drives(guest: Guest, controller: Controller) -> None:
    fstab = guest.run("cat /etc/fstab")
    others = guest.run(f"wipefs -n {BY_ID}LVM0001 {BY_ID}SWAP0001 {BY_ID}PART0001")
    shown = controller.play(
        "playbooks/teardown.yml", "--check", "--diff", nvme_raid_devices=CHOSEN, nvme_raid_confirm=NAME
    )
    assert "wipe the md superblocks of" in shown.output
    assert guest.run(f"cat {MOUNT}/file") == "kept\n"
    controller.play("playbooks/teardown.yml", nvme_raid_devices=CHOSEN, nvme_raid_confirm=NAME)
    assert guest.run("ls /dev/md* /sys/block/md* -d 2>/dev/null || true") == ""
    assert guest.run(f"wipefs -n {BY_ID}DATA000[123]") == ""
    assert guest.run("cat /etc/fstab") == "".join(line for line in fstab.splitlines(True) if MOUNT not in line)
    assert guest.run("grep ^ARRAY /etc/mdadm/mdadm.conf || true") == ""
    assert role_rebuilds(guest) == 2
    assert guest.run(f"wipefs -n {BY_ID}LVM0001 {BY_ID}SWAP0001 {BY_ID}PART0001") == others
    assert controller.play("playbooks/teardown.yml", nvme_raid_confirm=NAME).changed == 0


def test_the_freed_drives_make_an_array_again(guest: Guest, controller: Controller) -> None:
    """With the other filesystem, another chunk and the optional discard."""
    variables = {
        "nvme_raid_devices": CHOSEN, "nvme_raid_filesystem": "ext4", "nvme_raid_chunk_kib": 64,
        "nvme_raid_blkdiscard": True,
    }  # fmt: skip
    played = controller.raid(**variables)
    assert "discard every block of" in played.output
    assert role_rebuilds(guest) == 3
    geometry = guest.run(f"dumpe2fs -h /dev/md/{NAME} 2>/dev/null | grep RAID")
    assert geometry.split() == ["RAID", "stride:", "16", "RAID", "stripe", "width:", "48"]
    assert controller.raid(**variables).changed == 0
    guest.run(f"echo kept >{MOUNT}/file && umount {MOUNT} && mdadm --stop /dev/md/{NAME}")
    assert "assemble the array" in controller.raid(**variables).output
    assert guest.run(f"cat {MOUNT}/file") == "kept\n"


def test_a_crippled_array_can_be_torn_down(guest: Guest, controller: Controller) -> None:
    """One member lost its superblock: the array can't start any more, its remains still come off by its name."""
    guest.run(
        f"umount {MOUNT} && mdadm --stop /dev/md/{NAME} && mdadm --zero-superblock {BY_ID}DATA0003 && udevadm settle;"
        f"mdadm --stop --scan; mdadm --incremental {BY_ID}DATA0001"
    )
    controller.play("playbooks/teardown.yml", nvme_raid_confirm=NAME)
    assert guest.run(f"wipefs -n {BY_ID}DATA000[123]; ls -d /sys/block/md* 2>/dev/null || true") == ""
    assert guest.run(f"grep -c {MOUNT} /etc/fstab || true") == "0\n"
