"""The one way tensors enter: declared once, checked against the file's header, read one at a time."""
