"""Promises of stores whose shards lie on shared storage, against a real S3 server (moto), looked into with boto3."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.configs.errors import DraftsmithError
from draftsmith.configs.schema import RunConfig
from draftsmith.data.harvest import harvest
from draftsmith.data.store import HarvestReader
from draftsmith.data.store_check import check_store
from draftsmith.data.store_edit import merge, split
from draftsmith.data.store_writer import attach
from draftsmith.data.synthesize import synthesize

_spec = importlib.util.spec_from_file_location("convert_remote", Path(__file__).parents[1] / "convert/remote.py")
assert _spec is not None and _spec.loader is not None
remote = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(remote)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with remote.s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        client = remote.s3_client(environment)
        for name in remote.s3_objects(client):  # moto's buckets outlive its servers
            client.delete_object(Bucket="shared", Key=name)
        yield client
        s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("codec", ["bf16", "fp8"])
def test_shards_on_s3_are_the_local_ones_and_read_the_same(
    make_config: Callable[..., RunConfig], bucket: Any, tmp_path: Path, codec: str
) -> None:
    here = make_config(harvest__codec=codec)
    there = make_config(name="there", harvest__codec=codec, harvest__location="s3://shared/states/")
    for config in (here, there):
        synthesize(config, "train")
    local, distant = HarvestReader(harvest(here, "train")), HarvestReader(harvest(there, "train"))
    assert [file.name for file in distant.path.iterdir()] == ["manifest.json"]
    objects = remote.s3_objects(bucket, "states/train/")
    assert sorted(objects) == ["manifest.json", *(shard.file for shard in local.manifest.shards)]
    for shard in local.manifest.shards:
        assert objects[shard.file] == (local.path / shard.file).read_bytes()
    for number, expected in enumerate(local):
        found = distant.window(number, 1, 7)
        for name in ("input_ids", "generated", "taps", "final", "argmax"):
            assert torch.equal(getattr(found, name), getattr(expected, name)[1:7])
        assert torch.equal(distant.tokens(number)[0], expected.input_ids)
    assert all(one.passed for one in check_store(distant.path))
    again = HarvestReader(attach("s3://shared/states/train", tmp_path / "elsewhere"))
    assert torch.equal(again[3].taps, local[3].taps)
    train, heldout = split(again.path, tmp_path / "t", tmp_path / "h", share=0.25, seed=0)
    assert all(
        one.passed for path in (train, heldout, merge([train, heldout], tmp_path / "m")) for one in check_store(path)
    )


def test_a_harvest_to_s3_goes_on_and_leaves_no_orphan(make_config: Callable[..., RunConfig], bucket: Any) -> None:
    config = make_config(harvest__location="s3://shared/states")
    synthesize(config, "train")
    path = harvest(config, "train")
    whole = remote.s3_objects(bucket, "states/train/")
    shutil.rmtree(path)
    with pytest.raises(DraftsmithError, match=r"finished store lies(.|\n)*store attach s3://shared/states/train"):
        harvest(config, "train")
    assert remote.s3_objects(bucket, "states/train/") == whole
    # a machine that was lost before the end: its records are gone, and nobody knows what the objects are
    bucket.delete_object(Bucket="shared", Key="states/train/manifest.json")
    shutil.rmtree(path, ignore_errors=True)
    bucket.put_object(Bucket="shared", Key="states/train/shard-00099.safetensors", Body=b"orphan")
    harvest(config, "train")
    assert remote.s3_objects(bucket, "states/train/") == whole


def test_a_cut_or_missing_object_is_named(make_config: Callable[..., RunConfig], bucket: Any) -> None:
    config = make_config(harvest__location="s3://shared/states")
    synthesize(config, "train")
    path = harvest(config, "train")
    body = remote.s3_objects(bucket, "states/train/")["shard-00001.safetensors"]
    bucket.put_object(Bucket="shared", Key="states/train/shard-00001.safetensors", Body=body[:-100])
    with pytest.raises(DraftsmithError, match=rf"another size(.|\n)*shard-00001(.|\n)*{len(body) - 100:,} bytes"):
        HarvestReader(path)
    bucket.delete_object(Bucket="shared", Key="states/train/shard-00001.safetensors")
    with pytest.raises(DraftsmithError, match="no such file"):
        HarvestReader(path)


def test_storage_that_cannot_be_written_is_one_error(make_config: Callable[..., RunConfig], bucket: Any) -> None:
    config = make_config(harvest__location="s3://absent/states")
    synthesize(config, "train")
    with pytest.raises(DraftsmithError, match=r"shared storage could not be(.|\n)*s3://absent(.|\n)*AWS_"):
        harvest(config, "train")
