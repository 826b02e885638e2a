"""Tests of third-party models: unedited, sharded from outside and compared with one device; run for minutes."""
