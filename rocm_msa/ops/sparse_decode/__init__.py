"""Op `sparse_decode`: contract in api.py."""
