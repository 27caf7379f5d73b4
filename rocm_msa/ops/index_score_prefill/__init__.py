"""Op `index_score_prefill`: contract in api.py."""
