"""Op `sparse_prefill`: contract in api.py."""
