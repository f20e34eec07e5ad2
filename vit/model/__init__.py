"""The network: images to logits, in torch and einops only."""
