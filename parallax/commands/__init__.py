"""The commands of the command line. Each file adds commands to the parser, and has the functions
that run them. `options.py` has the options that several commands share."""
