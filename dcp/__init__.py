"""Indexer decode context parallelism: the ranks of a group share the scan of the index cache.

Every rank scores all index heads on its share of the blocks and sends each head's results to the
ranks that own the head, which select. README.md is the protocol, `api.Exchange` the interface.
"""
