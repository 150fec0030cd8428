"""From logits to text: sampling, detokenization, and the parts of an answer that are thinking."""
