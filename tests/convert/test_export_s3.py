"""Delivery to object storage: a real S3 server over HTTP, and other kinds that fsspec reaches."""

from __future__ import annotations

import hashlib
import json
import threading
import time

import pytest

from draftsmith.configs.errors import DraftsmithError
from draftsmith.convert.delivery import driver as driver_module
from draftsmith.convert.export import export
from tests.convert.conftest import edit_config, listing
from tests.convert.remote import SECRET, closed_port, s3_client, s3_objects, s3_server, start_s3

FILES = {"config.json", "draftsmith.json", "model.safetensors", "README.md"}


@pytest.fixture(scope="module")
def server():
    with s3_server() as environment:
        yield environment


@pytest.fixture
def s3(server, monkeypatch, tmp_path):
    """The bucket, empty, and the environment of a user of it."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    client = s3_client(server)
    for key in s3_objects(client):
        client.delete_object(Bucket="shared", Key=key)
    return client


def refused(*arguments, **options) -> str:
    with pytest.raises(DraftsmithError) as caught:
        export(*arguments, **options)
    message = str(caught.value)
    assert SECRET not in message and "Traceback" not in message
    return message


def test_a_version_holds_every_file_and_its_hash(s3, drafter, target, capsys):
    address = export(drafter, "s3://shared/models/mine/", target, version="v1")
    assert address == "s3://shared/models/mine/v1"
    found = s3_objects(s3, "models/mine/")
    manifest = json.loads(found["v1/manifest.json"])
    assert manifest["files"].keys() == FILES and manifest["version"] == "v1" and "unfinished" in manifest["note"]
    assert found.keys() == {"latest.json", "v1/manifest.json", *(f"v1/{name}" for name in FILES)}
    for name, entry in manifest["files"].items():
        data = found[f"v1/{name}"]
        assert hashlib.sha256(data).hexdigest() == entry["sha256"] and len(data) == entry["bytes"]
        assert name == "README.md" or data == (drafter / name).read_bytes()
    assert json.loads(found["latest.json"])["version"] == "v1"
    said = capsys.readouterr().err
    assert "aws s3 sync s3://shared/models/mine/v1 DRAFTER && python -m sglang.launch_server" in said.replace("\n", " ")
    assert SECRET not in said and not any(SECRET.encode() in data for data in found.values())


def test_the_same_files_come_out_as_from_a_folder(s3, tmp_path, drafter, target):
    place = export(drafter, tmp_path / "local", target)
    address = export(drafter, "s3://shared/x", target)
    assert address.rsplit("/", 1)[1] == place.rsplit("/", 1)[1]
    assert s3_objects(s3, "x/" + address.rsplit("/", 1)[1] + "/") == listing(tmp_path / "local" / place)


def test_a_second_export_writes_nothing_but_the_pointer_and_a_damaged_file_is_mended(s3, drafter, target, capsys):
    export(drafter, "s3://shared/x", target, version="v1")
    before = s3_objects(s3)
    stamps = {e["Key"]: e["LastModified"] for e in s3.list_objects_v2(Bucket="shared")["Contents"]}
    time.sleep(1.1)
    export(drafter, "s3://shared/x", target, version="v1")
    again = {e["Key"]: e["LastModified"] for e in s3.list_objects_v2(Bucket="shared")["Contents"]}
    assert {key for key in stamps if stamps[key] != again[key]} == {"x/latest.json"}
    weights = bytearray(before["x/v1/model.safetensors"])
    weights[-1] ^= 1
    s3.put_object(Bucket="shared", Key="x/v1/model.safetensors", Body=bytes(weights))
    s3.delete_object(Bucket="shared", Key="x/v1/README.md")
    export(drafter, "s3://shared/x", target, version="v1")
    said = capsys.readouterr().err.replace("\n", "")
    assert "is damaged (model.safetensors, README.md)" in said and s3_objects(s3) == before


def test_versions_stand_side_by_side_and_never_change(s3, drafter, target):
    export(drafter, "s3://shared/x", target, version="v1")
    first = s3_objects(s3, "x/v1/")
    edit_config(drafter, transformers_version="5.19.0")
    export(drafter, "s3://shared/x", target, version="v2")
    assert "other files go by this version's name" in refused(drafter, "s3://shared/x", target, version="v1")
    assert s3_objects(s3, "x/v1/") == first and json.loads(s3_objects(s3)["x/latest.json"])["version"] == "v2"


def test_an_interrupted_export_of_other_files_does_not_mix(s3, drafter, target, monkeypatch):
    """The claim of a living exporter refuses; that of a dead one is taken over, and its files go."""
    claim = json.dumps({"content": "f" * 64, "since": int(time.time())})
    s3.put_object(Bucket="shared", Key="x/.exporting/v1.json", Body=claim)
    s3.put_object(Bucket="shared", Key="x/v1/other.safetensors", Body=b"half")
    before = s3_objects(s3)
    message = refused(drafter, "s3://shared/x", target, version="v1")
    assert "another export is delivering" in message and "x/.exporting/v1.json" in message and s3_objects(s3) == before
    monkeypatch.setattr("draftsmith.convert.delivery.objects.STALE_SECONDS", -5)
    export(drafter, "s3://shared/x", target, version="v1")
    assert s3_objects(s3, "x/v1/").keys() == FILES | {"manifest.json"} and not s3_objects(s3, "x/.exporting")


def test_an_interrupted_export_goes_on_and_its_unfinished_uploads_go(s3, drafter, target):
    """What is there and right is not sent again; what is there and wrong is."""
    s3.put_object(Bucket="shared", Key="x/v1/model.safetensors", Body=(drafter / "model.safetensors").read_bytes())
    s3.put_object(Bucket="shared", Key="x/v1/config.json", Body=b"{")
    stamp = s3.head_object(Bucket="shared", Key="x/v1/model.safetensors")["LastModified"]
    mine = s3.create_multipart_upload(Bucket="shared", Key="x/v1/model.safetensors")["UploadId"]
    other = s3.create_multipart_upload(Bucket="shared", Key="x/v10/model.safetensors")["UploadId"]
    time.sleep(1.1)
    export(drafter, "s3://shared/x", target, version="v1")
    assert s3.head_object(Bucket="shared", Key="x/v1/model.safetensors")["LastModified"] == stamp
    assert s3_objects(s3, "x/v1/")["config.json"] == (drafter / "config.json").read_bytes()
    left = [upload["UploadId"] for upload in s3.list_multipart_uploads(Bucket="shared").get("Uploads", [])]
    assert mine not in left and other in left
    s3.abort_multipart_upload(Bucket="shared", Key="x/v10/model.safetensors", UploadId=other)


def race(jobs):
    start, errors = threading.Barrier(len(jobs)), []

    def run(job):
        start.wait()
        try:
            job()
        except DraftsmithError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_exporters_of_the_same_files_at_the_same_time_all_succeed(s3, drafter, target, tmp_path):
    errors = race([lambda: export(drafter, "s3://shared/x", target, version="v1")] * 4)
    alone = listing(tmp_path / export(drafter, tmp_path / "alone", target, version="v1"))
    assert not errors and s3_objects(s3, "x/v1/") == alone and not s3_objects(s3, "x/.exporting")


def test_exporters_of_other_files_at_the_same_time_leave_one_whole_version(s3, drafter, target, tmp_path):
    import shutil

    others = []
    for number in range(3):
        others.append(tmp_path / f"drafter-{number}")
        shutil.copytree(drafter, others[-1])
        edit_config(others[-1], transformers_version=f"5.19.{number}")
    jobs = [lambda place=place: export(place, "s3://shared/x", target, version="v1") for place in others]
    errors = race(jobs)
    assert len(errors) == 2 and all("version's name" in error for error in errors), errors
    found = s3_objects(s3, "x/v1/")
    for name, entry in json.loads(found["manifest.json"])["files"].items():
        assert hashlib.sha256(found[name]).hexdigest() == entry["sha256"]
    assert found["config.json"] in [(place / "config.json").read_bytes() for place in others]


def test_large_files_travel_in_parts(s3, tmp_path, monkeypatch):
    """Parts of S3's least size; the file that arrives has the part count in its ETag."""
    monkeypatch.setattr(driver_module, "PART", 5 << 20)
    store = driver_module.open_store("s3", "shared/x")
    big = tmp_path / "big.bin"
    big.write_bytes(bytes(range(256)) * (12 << 12))
    counted = []
    store.upload(big, "big.bin", counted.append)
    head = s3.head_object(Bucket="shared", Key="x/big.bin")
    assert head["ETag"].strip('"').endswith("-3") and sum(counted) == big.stat().st_size
    assert store.sha256("big.bin", lambda _count: None) == hashlib.sha256(big.read_bytes()).hexdigest()


def test_no_such_bucket(s3, drafter, target):
    message = refused(drafter, "s3://nobody-made-this/x", target)
    assert "there is no such bucket" in message and "create it first" in message


def test_no_credentials(s3, drafter, target, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    message = refused(drafter, "s3://shared/x", target)
    assert "there are no valid credentials" in message and "set AWS_ACCESS_KEY_ID" in message


@pytest.mark.slow
def test_a_vanished_network(s3, drafter, target, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed_port()}")
    began = time.monotonic()
    message = refused(drafter, "s3://shared/x", target)
    assert "the storage cannot be reached" in message and time.monotonic() - began < 60


@pytest.mark.slow
def test_a_network_that_vanishes_midway_leaves_no_version_and_the_next_run_goes_on(drafter, target, monkeypatch):
    """The server dies while the files travel; the storage, here another server with the same objects, comes back."""
    first, stop = start_s3()
    for name, value in first.items():
        monkeypatch.setenv(name, value)
    client = s3_client(first)
    export(drafter, "s3://shared/x", target, version="v1")
    edit_config(drafter, transformers_version="5.19.0")
    send, kept = driver_module.Store.upload, {}

    def vanish(store, source, path, advance):
        send(store, source, path, advance)
        kept.update(s3_objects(client))
        stop()

    monkeypatch.setattr(driver_module.Store, "upload", vanish)
    assert "cannot be reached" in refused(drafter, "s3://shared/x", target, version="v2")
    monkeypatch.setattr(driver_module.Store, "upload", send)
    assert "x/v2/config.json" in kept and "x/v2/manifest.json" not in kept
    assert json.loads(kept["x/latest.json"])["version"] == "v1"
    with s3_server() as second:
        monkeypatch.setenv("AWS_ENDPOINT_URL", second["AWS_ENDPOINT_URL"])
        client = s3_client(second)
        for key, data in kept.items():
            client.put_object(Bucket="shared", Key=key, Body=data)
        export(drafter, "s3://shared/x", target, version="v2")
        found = s3_objects(client, "x/")
        assert json.loads(found["latest.json"])["version"] == "v2" and "v2/manifest.json" in found
        assert {key: data for key, data in found.items() if key.startswith("v1/")} == {
            key[2:]: data for key, data in kept.items() if key.startswith("x/v1/")
        }


def test_no_permission(s3, server, drafter, target):
    """moto's own access control: a user whose policy allows reading only."""
    s3.put_bucket_policy(
        Bucket="shared",
        Policy=json.dumps({"Version": "2012-10-17", "Statement": [
            {"Effect": "Deny", "Principal": "*", "Action": ["s3:PutObject"], "Resource": "arn:aws:s3:::shared/*"}]}),
    )  # fmt: skip
    try:
        message = refused(drafter, "s3://shared/x", target)
    finally:
        s3.delete_bucket_policy(Bucket="shared")
    assert "refuses these credentials or this action" in message and not s3_objects(s3)


def test_a_missing_driver_names_the_pip_command(drafter, target, monkeypatch):
    import sys

    import fsspec

    assert fsspec.available_protocols()
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    assert "pip install 'draftsmith[s3]'" in refused(drafter, "s3://shared/x", target)


def test_memory(drafter, target, tmp_path):
    import fsspec

    fs = fsspec.filesystem("memory")
    address = export(drafter, "memory://shelf/x", target, version="v1")
    assert address == "memory://shelf/x/v1" and export(drafter, "memory://shelf/x", target, version="v1") == address
    alone = listing(tmp_path / export(drafter, tmp_path / "alone", target, version="v1"))
    assert {name: fs.cat_file(f"/shelf/x/v1/{name}") for name in alone} == alone
    assert fs.ls("/shelf/x/v1", detail=False) == [f"/shelf/x/v1/{name}" for name in sorted(alone)]
    assert json.loads(fs.cat_file("/shelf/x/latest.json"))["version"] == "v1"


def test_storage_with_folders_and_renames(drafter, target, tmp_path):
    """fsspec's own local driver under another name stands for sftp, smb, hdfs: folders are made, the pointer renamed."""
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    class Disk(LocalFileSystem):
        protocol = "disk"

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(str(path).removeprefix("disk://"))

    fsspec.register_implementation("disk", Disk, clobber=True)
    for version in ("v1", "v2", "v1"):
        export(drafter, f"disk://{tmp_path}/far", target, version=version)
        assert json.loads((tmp_path / "far" / "latest.json").read_text())["version"] == version
    alone = listing(tmp_path / export(drafter, tmp_path / "alone", target, version="v1"))
    assert listing(tmp_path / "far" / "v1") == alone
    assert {entry.name for entry in (tmp_path / "far").iterdir()} <= {"v1", "v2", "latest.json", ".exporting"}
    (tmp_path / "far" / "v1" / "config.json").write_text("{")
    export(drafter, f"disk://{tmp_path}/far", target, version="v1")
    assert listing(tmp_path / "far" / "v1") == alone
