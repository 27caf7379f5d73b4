"""Op `block_topk`: contract in api.py."""
