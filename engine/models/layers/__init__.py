"""The layers of decoder and encoder: attention, MLP, experts, norms, embeddings."""
