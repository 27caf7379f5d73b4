"""Op `dense_attention`: contract in api.py."""
