"""Real servers for tests of the delivery: moto speaks S3 over HTTP; boto3, which the tool does not use, looks inside."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

KEY, SECRET = "AKIDTESTKEY000000000", "s3cr3t/that/must/never/be/shown"


def start_s3() -> tuple[dict[str, str], Callable[[], None]]:
    """A server with one bucket, `shared`; gives the environment that finds it, and how to stop it."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    s3_client(environment).create_bucket(Bucket="shared")
    return environment, server.stop


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """The environment that finds a server with one bucket, `shared`."""
    environment, stop = start_s3()
    try:
        yield environment
    finally:
        stop()


def s3_client(environment: dict[str, str]):
    import boto3

    return boto3.client(
        "s3", endpoint_url=environment["AWS_ENDPOINT_URL"], aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"], region_name="us-east-1",
    )  # fmt: skip


def s3_objects(client, prefix: str = "") -> dict[str, bytes]:
    """Every object of the bucket below `prefix`, by its key without the prefix."""
    found = client.list_objects_v2(Bucket="shared", Prefix=prefix).get("Contents", [])
    return {
        entry["Key"][len(prefix) :]: client.get_object(Bucket="shared", Key=entry["Key"])["Body"].read()
        for entry in found
    }


def closed_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
