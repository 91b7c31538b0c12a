"""The commands of the command line. Each file adds commands to the parser, and runs them."""
