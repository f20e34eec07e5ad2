"""Text generation: greedy decoding, beam search, sampling."""
