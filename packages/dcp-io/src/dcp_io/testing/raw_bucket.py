"""`RawBucket`: direct access to a folder of an S3 server, by another client than the one under test. Needs boto3."""

from __future__ import annotations

import boto3

from dcp_io.testing.s3_server import CREDENTIALS, S3Server

__all__ = ["RawBucket"]


class RawBucket:
    """Direct access to the objects in one folder of the server's bucket; implements `RawFolder`."""

    def __init__(self, server: S3Server, folder: str) -> None:
        key, secret, region = CREDENTIALS.values()
        self._bucket = boto3.resource(
            "s3", endpoint_url=server.url, aws_access_key_id=key, aws_secret_access_key=secret, region_name=region
        ).Bucket(server.bucket)
        self._folder = f"{folder}/"

    def names(self) -> list[str]:
        """Return the names of the objects in the folder and its subfolders."""
        return [each.key[len(self._folder) :] for each in self._bucket.objects.filter(Prefix=self._folder)]

    def get(self, name: str) -> bytes:
        """Return all bytes of an object."""
        data: bytes = self._bucket.Object(self._folder + name).get()["Body"].read()
        return data

    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object."""
        self._bucket.put_object(Key=self._folder + name, Body=data)

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._bucket.Object(self._folder + name).delete()

    def uploads(self) -> list[str]:
        """Return the keys of unfinished multipart uploads."""
        return [each.object_key for each in self._bucket.multipart_uploads.filter(Prefix=self._folder)]
