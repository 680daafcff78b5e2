"""An S3 server on loopback that is fast enough to measure clients with: objects in memory, no signatures checked.

For benchmarks. It speaks as much of the protocol as checkpoints need, of any client: objects, ranges, conditions,
uploads in parts, copies and listings.
"""

from integration_tests.benchmarks.loopback_s3.running import LoopbackS3

__all__ = ["LoopbackS3"]
