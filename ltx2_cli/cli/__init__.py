"""The command line: options are read, the library is called, results are printed."""
