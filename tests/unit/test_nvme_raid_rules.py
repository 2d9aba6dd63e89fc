"""Which drives may become an array, which array is the wanted one, what is done: one test a story."""

from __future__ import annotations

import json

import pytest
from nvme_raid_machine import NEW_UUID, SERIALS, before, made, model, rules, vanished

BY_ID = "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_"
OUR_STEPS = ["create", "format", "mdadm_conf", "initramfs", "fstab", "mount", "record"]


def steps(decision: model.Decision) -> list[str]:
    assert decision.refusals == []
    return [step.do for step in decision.steps]


# Choosing


def test_clean_drives_become_an_array() -> None:
    decision = before().decide(*SERIALS)
    assert steps(decision) == OUR_STEPS
    assert [drive.serial for drive in decision.drives] == list(SERIALS)


def test_a_drive_named_in_several_ways_is_one_member() -> None:
    decision = before().decide("DATA0002", f"{BY_ID}DATA0001", "nvme-QEMU_NVMe_Ctrl_DATA0002_1", "DATA0001")
    assert steps(decision) == OUR_STEPS
    assert [drive.path for drive in decision.drives] == [f"{BY_ID}DATA0001", f"{BY_ID}DATA0002"]


def test_the_same_drives_are_chosen_when_the_kernel_renames_them() -> None:
    machine = before()
    first = [(drive.serial, drive.path) for drive in machine.decide(*SERIALS).drives]
    names = [machine.kname(serial) for serial in SERIALS]
    machine.rename_drives()
    assert [machine.kname(serial) for serial in SERIALS] != names
    assert [(drive.serial, drive.path) for drive in machine.decide(*SERIALS).drives] == first


@pytest.mark.parametrize(
    "name", ["nvme1n1", "/dev/nvme1n1", "/dev/nvme1n1p1", "sda", "/dev/md0", "/dev/md/fastpersist"]
)
def test_names_that_change_between_boots_are_refused(name: str) -> None:
    refusals = before().refusals(name, *SERIALS)
    assert any(r.startswith(f"{name}: ") and "/dev/disk/by-id" in r for r in refusals)


def test_an_unknown_serial_is_refused() -> None:
    assert before().refusals("NOSUCH", *SERIALS) == ["NOSUCH: no drive with this serial or by-id name on this host"]


def test_a_partition_is_no_drive() -> None:
    machine = before()
    machine.facts["by_id"]["nvme-X-part1"] = "nvme5n1p1"
    assert "not a whole drive" in machine.refusals("nvme-X-part1", *SERIALS)[0]


def test_a_model_pattern_takes_exactly_the_count_or_nothing() -> None:
    machine = before()
    wanted = machine.decide(match="QEMU*", count=3)
    assert "matches 9 drives, nvme_raid_count is 3" in "".join(wanted.refusals)
    # All that matched are shown, so that nobody has to guess which one was meant.
    assert "serial ROOT0001" in "".join(wanted.refusals)
    for serial in SERIALS:
        machine.facts["nvme"][machine.kname(serial)]["model"] = "SAMSUNG MZQL23T8"
    assert steps(machine.decide(match="SAMSUNG MZQL2*", count=3)) == OUR_STEPS
    assert "exact number" in machine.refusals(match="SAMSUNG*")[0]


def test_devices_and_pattern_together_are_refused() -> None:
    assert "both set" in before().refusals(*SERIALS, match="QEMU*", count=3)[0]


def test_one_drive_is_no_stripe() -> None:
    assert before().refusals("DATA0001") == ["RAID-0 needs two drives or more, 1 chosen"]


def test_every_refusal_comes_in_one_run() -> None:
    refusals = "\n".join(
        before().refusals("ROOT0001", "LVM0001", "SWAP0001", "PART0001", "ODD0001", "nvme1n1", "NOSUCH")
    )
    for part in (
        "backs /",
        "LVM",
        "backs swap",
        "partition table",
        "not alike in size",
        "kernel name",
        "no drive with",
    ):
        assert part in refusals


def test_a_refusal_names_drive_serial_and_reason() -> None:
    machine = before()
    refusals = machine.refusals("SWAP0001", "DATA0001")
    assert f"{BY_ID}SWAP0001 (serial SWAP0001, now {machine.kname('SWAP0001')}): backs swap" in refusals


# In use, by whatever stack


@pytest.mark.parametrize("point", ["/", "/boot", "/usr", "/var"])
def test_a_drive_below_a_system_mount_through_crypt_and_lvm(point: str) -> None:
    machine = before()
    volume = {"kname": "dm-7", "path": "/dev/mapper/vg-sys", "maj:min": "254:7", "type": "lvm"}
    crypt = {"kname": "dm-6", "path": "/dev/mapper/luks", "maj:min": "254:6", "type": "crypt", "children": [volume]}
    machine.put_on(
        "DATA0001", {"kname": "px", "path": "/dev/px", "maj:min": "259:99", "type": "part", "children": [crypt]}
    )
    machine.mount(point, "254:7", "/dev/mapper/vg-sys")
    assert any(r.endswith(f"backs {point} through /dev/mapper/vg-sys") for r in machine.refusals(*SERIALS))


def test_a_volume_that_lsblk_shows_below_another_drive_only() -> None:
    """A logical volume on two drives: sysfs knows both as held by it."""
    machine = before()
    machine.put_on("DATA0004", {"kname": "dm-7", "path": "/dev/mapper/two", "maj:min": "254:7", "type": "lvm"})
    machine.facts["holders"][machine.kname("DATA0001")] = ["dm-7"]
    machine.mount("/srv", "254:7", "/dev/mapper/two")
    refusals = machine.refusals(*SERIALS)
    assert any("DATA0001" in r and "is mounted at /srv through /dev/mapper/two" in r for r in refusals)
    assert any("DATA0001" in r and "is held by dm-7" in r for r in refusals)


def test_a_btrfs_mount_has_a_device_number_of_its_own() -> None:
    machine = before()
    machine.mount("/data", "0:55", f"/dev/{machine.kname('DATA0002')}")
    assert any("is mounted at /data" in r for r in machine.refusals(*SERIALS))


def test_a_mount_in_a_container_only() -> None:
    machine = before()
    number = machine.disk("DATA0003")["maj:min"]
    machine.mount("/data", number, "/dev/x", own=False, process="812 (postgres)")
    assert any(r.endswith("is mounted at /data, as process 812 (postgres) sees it") for r in machine.refusals(*SERIALS))


def test_mounts_that_can_not_be_seen_may_be_of_a_chosen_drive() -> None:
    machine = before()
    machine.facts["unseen"] = ["1 (init)"]
    assert machine.refusals(*SERIALS) == [
        "the mounts of 1 processes can't be seen (1 (init)); is this root of the whole host?"
    ]
    assert machine.teardown().refusals == []
    machine = made()
    machine.facts["unseen"] = ["1 (init)"]
    assert "(1 (init))" in machine.teardown().refusals[0]


def test_a_swap_file_keeps_the_drive_below_it() -> None:
    machine = before()
    machine.facts["swaps"].append({"path": "/swapfile", "device": machine.disk("DATA0001")["maj:min"]})
    assert any("DATA0001" in r and "backs swap" in r for r in machine.refusals(*SERIALS))


@pytest.mark.parametrize(
    ("kind", "usage", "said"),
    [
        ("xfs", "filesystem", "holds xfs"),
        ("LVM2_member", "raid", "is an LVM physical volume"),
        ("zfs_member", "filesystem", "is part of a zfs pool"),
        ("crypto_LUKS", "crypto", "holds a LUKS container"),
        ("ceph_bluestore", "other", "is a ceph OSD"),
        ("isw_raid_member", "raid", "holds isw_raid_member"),
        ("bcache", "other", "holds bcache"),
        ("gpt", "partition-table", "has a partition table (gpt)"),
        ("dos", "partition-table", "has a partition table (dos)"),
    ],
)
def test_any_signature_is_refused(kind: str, usage: str, said: str) -> None:
    machine = before()
    machine.sign("DATA0002", kind, usage)
    refusals = machine.refusals(*SERIALS)
    assert len(refusals) == 1
    assert said in refusals[0]
    assert "DATA0002" in refusals[0]


def test_a_member_of_another_array_is_named() -> None:
    machine = made()
    refusals = machine.refusals(*SERIALS, name="other", mount_point="/mnt/other")
    uuid = machine.facts["arrays"]["md127"]["detail"]["MD_UUID"]
    assert any(r.endswith(f"is a member of an md array, any:fastpersist, UUID {uuid}") for r in refusals)


def test_a_member_of_an_unknown_array_without_mdadm() -> None:
    machine = before()
    machine.sign("DATA0002", "linux_raid_member", "raid", label="db:data")
    machine.facts["programs"].remove("mdadm")
    assert "(db:data, u-u); install mdadm to see which" in machine.refusals(*SERIALS)[0]


def test_partitions_without_a_known_table() -> None:
    machine = before()
    machine.put_on("DATA0001", {"kname": "p1", "path": "/dev/p1", "maj:min": "259:98", "type": "part"})
    assert any("partition table (unknown type)" in r for r in machine.refusals(*SERIALS))


def test_open_drives_are_refused() -> None:
    machine = before()
    machine.facts["exclusive"][machine.kname("DATA0001")] = "Device or resource busy"
    machine.facts["open_by"][machine.kname("DATA0002")] = ["77 (oracle)"]
    refusals = "\n".join(machine.refusals(*SERIALS))
    assert "can't be opened exclusively: Device or resource busy" in refusals
    assert "is open in process 77 (oracle)" in refusals


def test_a_read_only_drive_is_refused() -> None:
    machine = before()
    machine.disk("DATA0001")["ro"] = True
    assert "is read-only" in machine.refusals(*SERIALS)[0]


# Which kind of drive


def test_a_disk_that_is_not_nvme() -> None:
    machine = before()
    disk = {**machine.disk("DATA0001"), "kname": "sdb", "path": "/dev/sdb", "serial": "SATA1", "maj:min": "8:16"}
    machine.facts["lsblk"]["blockdevices"].append(disk)
    machine.facts["by_id"]["ata-SATA1"] = "sdb"
    for name in ("SATA1", "ata-SATA1"):
        assert "/dev/disk/by-id/ata-SATA1 (serial SATA1, now sdb): is not an NVMe drive" in machine.refusals(
            name, *SERIALS
        )


def test_the_hidden_path_of_a_multipath_namespace() -> None:
    machine = before()
    machine.facts["nvme"][machine.kname("DATA0001")]["hidden"] = True
    assert any("hidden path of a multipath namespace" in r for r in machine.refusals(*SERIALS))


def test_the_serial_of_a_multipath_namespace_means_the_namespace_not_its_paths() -> None:
    machine = before()
    head = machine.kname("DATA0001")
    machine.facts["nvme"]["nvme9c0n1"] = {**machine.facts["nvme"][head], "hidden": True}
    assert machine.decide(*SERIALS).drives[0].kname == head


def test_two_paths_to_one_namespace() -> None:
    machine = before()
    nvme = machine.facts["nvme"]
    nvme[machine.kname("DATA0002")]["wwid"] = nvme[machine.kname("DATA0001")]["wwid"]
    assert any("is the same namespace as" in r for r in machine.refusals(*SERIALS))


def test_a_serial_with_two_namespaces_is_no_single_drive() -> None:
    machine = before()
    machine.facts["nvme"][machine.kname("DATA0004")]["serial"] = "DATA0001"
    refusals = machine.refusals(*SERIALS)
    assert "serial DATA0001: is on 2 namespaces" in refusals[0]
    assert f"{BY_ID}DATA0004" in refusals[0]


def test_a_namespace_from_over_the_network_may_be_somebody_elses() -> None:
    machine = before()
    machine.facts["nvme"][machine.kname("DATA0001")]["transport"] = "tcp"
    assert any("NVMe over tcp" in r for r in machine.refusals(*SERIALS))


def test_a_namespace_whose_transport_is_not_known() -> None:
    machine = before()
    machine.facts["nvme"][machine.kname("DATA0001")]["transport"] = ""
    assert any("NVMe over an unknown transport" in r for r in machine.refusals(*SERIALS))


def test_lsblk_of_old_util_linux_writes_strings() -> None:
    machine = before()
    for disk in machine.facts["lsblk"]["blockdevices"]:
        disk.update({"size": str(disk["size"]), "log-sec": str(disk["log-sec"]), "ro": "0"})
    decision = machine.decide(*SERIALS)
    assert steps(decision) == OUR_STEPS
    assert decision.drives[0].size_bytes == 536870912
    machine.disk("DATA0001")["ro"] = "1"
    assert "is read-only" in machine.refusals(*SERIALS)[0]


def test_unequal_sizes_and_sectors() -> None:
    refusals = before().refusals("DATA0001", "ODD0001")
    assert [r.split(":")[0] for r in refusals] == [
        "the chosen drives are not alike in size",
        "the chosen drives are not alike in sector",
    ]
    assert "805306368 bytes" in refusals[0]


# Settings


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"name": "md0"}, "nvme_raid_name"),
        ({"name": "0"}, "nvme_raid_name"),
        ({"name": "a b"}, "nvme_raid_name"),
        ({"name": "x" * 29}, "nvme_raid_name"),
        ({"chunk_kib": 500}, "power of two"),
        ({"chunk_kib": 2}, "power of two"),
        ({"filesystem": "btrfs"}, "one of xfs, ext4"),
        ({"mount_point": "/"}, "nvme_raid_mount_point"),
        ({"mount_point": "mnt"}, "nvme_raid_mount_point"),
        ({"mount_point": "/mnt/../usr"}, "nvme_raid_mount_point"),
        ({"mount_options": "noatime 0 0"}, "white space"),
    ],
)
def test_settings_that_can_not_be_right(wanted: dict, said: str) -> None:
    assert said in before().refusals(*SERIALS, **wanted)[0]


# Making, and what is written


def test_a_first_run_shows_everything_before_mdadm_is_installed() -> None:
    machine = before()
    machine.facts["programs"] = [p for p in machine.facts["programs"] if p not in ("mdadm", "mkfs.xfs")]
    machine.facts["files"]["mdadm_conf"]["text"] = ""
    decision = rules.decide(model.Wanted(devices=SERIALS), machine.facts, model.NEW_ARRAY)
    assert steps(decision) == OUR_STEPS
    assert decision.files["mdadm_conf"] == "ARRAY /dev/md/fastpersist metadata=1.2 UUID=new-array\n"
    assert "UUID=new-filesystem /mnt/fastpersist xfs noatime,nofail" in decision.files["fstab"]


def test_the_configuration_comes_first_then_the_initramfs() -> None:
    order = steps(before().decide(*SERIALS))
    assert order.index("mdadm_conf") + 1 == order.index("initramfs")


def test_the_mount_does_not_hold_up_a_boot() -> None:
    line = before().decide(*SERIALS).files["fstab"].splitlines()[-1]
    spec, point, kind, options, *_ = line.split()
    assert spec == f"UUID={model.filesystem_uuid(NEW_UUID)}"
    assert (point, kind) == ("/mnt/fastpersist", "xfs")
    assert {"noatime", "nofail", "x-systemd.device-timeout=30s"} <= set(options.split(","))


def test_discard_only_when_asked_and_only_for_a_new_array() -> None:
    assert steps(before().decide(*SERIALS, blkdiscard=True)) == ["discard", *OUR_STEPS]
    assert steps(made().decide(*SERIALS, blkdiscard=True)) == []


def test_a_host_without_initramfs_tools() -> None:
    machine = before()
    machine.facts["initramfs_tool"] = ""
    assert "initramfs" not in steps(machine.decide(*SERIALS))


# An array that exists


def test_an_array_as_wanted_is_left_alone() -> None:
    assert steps(made().decide(*SERIALS)) == []


def test_nothing_that_is_recorded_depends_on_a_boot() -> None:
    machine = made()
    machine.rename_drives()
    assert steps(machine.decide(*SERIALS)) == []
    assert "nvme1n1" not in machine.text("array")
    assert "md127" not in machine.text("array") + machine.text("fstab") + machine.text("mdadm_conf")


def test_the_home_host_is_not_part_of_the_name() -> None:
    machine = made()
    for told in (machine.facts["arrays"]["md127"]["detail"], *machine.facts["members"].values()):
        told["MD_NAME"] = "oldname:fastpersist"
    assert steps(machine.decide(*SERIALS)) == []


def test_a_drive_that_vanished_is_no_reason_to_make_anything() -> None:
    """Recorded after a boot without it: of the array that didn't start, the kernel counts two devices, not three."""
    machine = vanished()
    assert machine.facts["arrays"]["md127"]["detail"]["MD_DEVICES"] == "2"
    refusals = machine.refusals(*SERIALS)
    assert "DATA0002: no drive with this serial or by-id name on this host" in refusals
    assert any("is degraded: 2 of its 3 members are here" in r for r in refusals)


def test_a_degraded_array_is_refused_for_the_drives_that_are_left() -> None:
    machine = made()
    machine.unplug("DATA0002")
    machine.stop_array()
    assert any("degraded" in r for r in machine.refusals("DATA0001", "DATA0003"))


def test_a_fresh_drive_in_the_place_of_a_lost_one() -> None:
    machine = made()
    machine.unplug("DATA0002")
    machine.stop_array()
    refusals = machine.refusals("DATA0001", "DATA0004", "DATA0003")
    assert any("degraded" in r for r in refusals)
    assert any("DATA0004" in r and "isn't a member" in r for r in refusals)


def test_a_superset_is_refused() -> None:
    refusals = made().refusals(*SERIALS, "DATA0004")
    assert len(refusals) == 1
    assert "DATA0004" in refusals[0]
    assert "is chosen, but isn't a member of the array fastpersist" in refusals[0]


def test_a_subset_is_refused() -> None:
    refusals = made().refusals("DATA0001", "DATA0002")
    assert len(refusals) == 1
    assert "DATA0003" in refusals[0]
    assert "but isn't chosen" in refusals[0]


def test_another_chunk_is_refused() -> None:
    refusals = made().refusals(*SERIALS, chunk_kib=256)
    assert len(refusals) == 1
    assert "has a chunk of 512 KiB, nvme_raid_chunk_kib is 256" in refusals[0]


@pytest.mark.parametrize(
    ("key", "value", "said"), [("MD_LEVEL", "raid1", "is raid1"), ("MD_METADATA", "1.0", "metadata 1.0")]
)
def test_an_array_of_another_kind_is_refused(key: str, value: str, said: str) -> None:
    machine = made()
    for member in machine.facts["members"].values():
        member[key] = value
    assert any(said in r for r in machine.refusals(*SERIALS))


def test_two_arrays_of_one_name() -> None:
    machine = made()
    member = {**machine.facts["members"][machine.kname("DATA0001")], "MD_UUID": NEW_UUID}
    machine.facts["members"][machine.kname("DATA0004")] = member
    assert any(r.startswith("2 arrays are called fastpersist") for r in machine.refusals(*SERIALS))


def test_a_stopped_array_is_assembled_never_remade() -> None:
    machine = made()
    machine.stop_array()
    assert steps(machine.decide(*SERIALS)) == ["assemble", "mount"]


def test_an_inactive_array_is_refused() -> None:
    machine = made()
    machine.facts["arrays"]["md127"]["state"] = "inactive"
    assert any("is inactive as md127" in r for r in machine.refusals(*SERIALS))


def test_an_array_without_a_filesystem_is_never_formatted() -> None:
    machine = made()
    machine.facts["arrays"]["md127"]["signatures"] = []
    assert "nothing on an existing array is ever formatted" in machine.refusals(*SERIALS)[0]


def test_an_array_with_another_filesystem_is_never_formatted() -> None:
    assert "holds xfs, nvme_raid_filesystem is ext4" in made().refusals(*SERIALS, filesystem="ext4")[0]


def test_a_filesystem_of_somebody_else_is_kept_only_when_fstab_says_so() -> None:
    machine = made()
    ours = machine.facts["arrays"]["md127"]["signatures"][0]["uuid"]
    machine.facts["arrays"]["md127"]["signatures"][0]["uuid"] = "f0f0"
    machine.facts["files"]["fstab"]["text"] = "UUID=1 / ext4 defaults 0 1\n"
    assert "that this role didn't make" in machine.refusals(*SERIALS)[0]
    machine.add_line("fstab", "UUID=f0f0 /mnt/fastpersist xfs defaults 0 0")
    decision = machine.decide(*SERIALS)
    assert steps(decision) == ["fstab", "record"]
    assert "UUID=f0f0 /mnt/fastpersist xfs noatime,nofail" in decision.files["fstab"]
    assert ours not in decision.files["fstab"]


def test_an_interrupted_run_is_completed() -> None:
    """Stopped after mdadm.conf: the initramfs is older than it, the rest is missing."""
    machine = made()
    machine.facts["initramfs_stale"] = True
    lines = machine.text("fstab").splitlines(keepends=True)
    machine.facts["files"]["fstab"]["text"] = "".join(line for line in lines if "fastpersist" not in line)
    machine.facts["files"]["array"]["text"] = ""
    machine.facts["mounts"] = [m for m in machine.facts["mounts"] if m["device"] != "9:127"]
    machine.facts["mount_point"]["entries"] = []
    decision = machine.decide(*SERIALS)
    assert steps(decision) == ["initramfs", "fstab", "mount", "record"]


def test_a_volume_on_the_array_is_refused() -> None:
    machine = made()
    machine.facts["holders"]["md127"] = ["dm-9"]
    assert any("is held by dm-9" in r for r in machine.refusals(*SERIALS))


# Places that belong to something else


def test_a_mount_point_in_use() -> None:
    machine = before()
    machine.mount("/mnt/fastpersist", "8:1", "/dev/sda1")
    assert machine.refusals(*SERIALS) == ["/dev/sda1 is already mounted at /mnt/fastpersist"]


def test_a_mount_would_hide_files() -> None:
    machine = before()
    machine.facts["mount_point"] = {"exists": True, "entries": ["precious"]}
    assert machine.refusals(*SERIALS) == [
        "/mnt/fastpersist is not empty (precious): the mount would hide what is in it"
    ]


def test_a_line_of_fstab_for_the_same_place() -> None:
    machine = before()
    machine.add_line("fstab", "UUID=dead /mnt/fastpersist xfs defaults 0 0")
    (refusal,) = machine.refusals(*SERIALS)
    assert "/etc/fstab line 3 mounts UUID=dead at /mnt/fastpersist" in refusal


def test_a_stale_array_line_of_the_same_name() -> None:
    machine = before()
    machine.add_line("mdadm_conf", "ARRAY /dev/md/fastpersist metadata=1.2 UUID=dddddddd:dddddddd:dddddddd:dddddddd")
    (refusal,) = machine.refusals(*SERIALS)
    assert "gives the name fastpersist to the array dddddddd:dddddddd:dddddddd:dddddddd" in refusal


def test_the_array_mounted_elsewhere_is_refused() -> None:
    assert any("the array is mounted at /mnt/fastpersist" in r for r in made().refusals(*SERIALS, mount_point="/mnt/b"))


# Taking apart


TEARDOWN = ["unmount", "fstab", "mdadm_conf", "initramfs", "forget", "wipe", "stop", "zero"]


def test_a_teardown_ends_with_the_superblocks() -> None:
    decision = made().teardown(*SERIALS)
    assert steps(decision) == TEARDOWN
    assert sorted(drive.serial for drive in decision.drives) == list(SERIALS)
    assert decision.files["fstab"] == before().text("fstab")
    assert decision.files["mdadm_conf"] == before().text("mdadm_conf")


def test_a_teardown_interrupted_before_the_superblocks_goes_on() -> None:
    machine = made()
    machine.apply(machine.teardown())
    machine.facts["files"]["array"]["text"] = ""
    machine.stop_array()
    assert steps(machine.teardown()) == ["zero"]


def test_a_teardown_of_nothing_does_nothing() -> None:
    assert steps(before().teardown()) == []


def test_a_teardown_takes_out_the_lines_of_an_array_whose_drives_are_gone() -> None:
    machine = made()
    machine.stop_array()
    for serial in SERIALS:
        machine.unplug(serial)
    decision = machine.teardown()
    assert steps(decision) == ["fstab", "mdadm_conf", "initramfs", "forget"]
    assert "fastpersist" not in decision.files["fstab"] + decision.files["mdadm_conf"].split("ARRAY")[-1]


def test_a_teardown_says_which_members_it_could_not_wipe() -> None:
    decision = vanished().teardown()
    assert steps(decision) == ["fstab", "mdadm_conf", "initramfs", "forget", "stop", "zero"]
    assert {drive.serial for drive in decision.drives} == {"DATA0001", "DATA0003"}
    assert decision.notes[0].startswith("1 of 3 members are not on this host")


@pytest.mark.parametrize("name", ["", "md127", "0"])
def test_a_teardown_needs_a_name_of_its_own(name: str) -> None:
    """Arrays of old metadata have no name: an empty one must not mean all of them."""
    machine = made()
    for told in (machine.facts["arrays"]["md127"]["detail"], *machine.facts["members"].values()):
        told["MD_NAME"] = name
    decision = machine.teardown(name=name)
    assert decision.steps == []
    assert "nvme_raid_name" in decision.refusals[0]


def test_a_teardown_touches_no_other_array() -> None:
    assert steps(made().teardown(name="other")) == []


@pytest.mark.parametrize(
    ("story", "said"),
    [
        (lambda m: m.facts["holders"].update({"md127": ["dm-9"]}), "is held by dm-9; take that apart first"),
        (lambda m: m.facts["swaps"].append({"path": "/dev/md127", "device": "9:127"}), "backs swap"),
        (
            lambda m: m.mount("/data", "9:127", "/dev/md127", own=False, process="9 (pg)"),
            "mounted at /data, as process 9",
        ),
        (lambda m: [k.update(MD_LEVEL="raid1") for k in m.facts["members"].values()], "is raid1 with metadata 1.2"),
        (lambda m: m.facts["arrays"]["md127"]["signatures"][0].update(type="LVM2_member"), "holds LVM2_member"),
        (lambda m: m.facts["holders"][m.kname("DATA0001")].append("dm-3"), "is also held by dm-3"),
    ],
)
def test_a_teardown_is_refused_while_something_stands_on_the_array(story, said: str) -> None:
    machine = made()
    story(machine)
    decision = machine.teardown(*SERIALS)
    assert decision.steps == []
    assert any(said in refusal for refusal in decision.refusals)


def test_a_teardown_with_drives_that_are_not_this_hosts_choice() -> None:
    decision = made().teardown("DATA0001", "DATA0002")
    assert any("DATA0003" in r and "isn't chosen for this host" in r for r in decision.refusals)


def test_the_description_for_the_benchmark() -> None:
    machine = made()
    described = json.loads(machine.text("array"))
    assert described["chunk_bytes"] == 524288
    assert [member["serial"] for member in described["members"]] == list(SERIALS)
