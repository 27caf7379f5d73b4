"""Op `index_score_decode`: contract in api.py."""
