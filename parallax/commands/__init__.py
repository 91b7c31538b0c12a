"""The commands of the command line: each file adds its options to the parser and runs."""
