"""The layout of the published single files: their tensors' names, and the values in their configs."""
