"""Op `qkv_insert`: contract in api.py."""
