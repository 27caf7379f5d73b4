"""index_score_decode and block_topk in one launch: see ops/select_decode.py."""
