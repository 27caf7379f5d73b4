"""A whole sparse-attention MoE decoder layer of MiniMax-M3 in one launch; see README.md."""
