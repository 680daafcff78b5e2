"""`RawBucket`: direct access to a folder of an S3 server. Needs boto3."""

from __future__ import annotations

import boto3

from integration_tests.kits.s3_server import CREDENTIALS, S3Server

__all__ = ["RawBucket"]


class RawBucket:
    """Implements `RawFolder` for one folder of the server's bucket."""

    def __init__(self, server: S3Server, folder: str) -> None:
        key, secret, region = CREDENTIALS.values()
        self._bucket = boto3.resource(
            "s3", endpoint_url=server.url, aws_access_key_id=key, aws_secret_access_key=secret, region_name=region
        ).Bucket(server.bucket)
        self._folder = f"{folder}/"

    def names(self) -> list[str]:
        return [each.key[len(self._folder) :] for each in self._bucket.objects.filter(Prefix=self._folder)]

    def get(self, name: str) -> bytes:
        data: bytes = self._bucket.Object(self._folder + name).get()["Body"].read()
        return data

    def put(self, name: str, data: bytes) -> None:
        self._bucket.put_object(Key=self._folder + name, Body=data)

    def delete(self, name: str) -> None:
        self._bucket.Object(self._folder + name).delete()

    def uploads(self) -> list[str]:
        """Return the keys of unfinished multipart uploads."""
        return [each.object_key for each in self._bucket.multipart_uploads.filter(Prefix=self._folder)]
