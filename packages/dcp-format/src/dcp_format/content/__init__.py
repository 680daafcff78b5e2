"""`Content`, the tensors and objects that a conversion carries between formats; atomic creation of output files."""
