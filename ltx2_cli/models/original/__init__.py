"""The published single files: which names their tensors have, and what their configs describe."""
