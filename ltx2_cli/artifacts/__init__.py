"""Files that commands write and read: their names, whole files under one lock, and files of tensors."""
