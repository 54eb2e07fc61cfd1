"""Producers: what compilers give, as ops. One module a compiler; docs/producers.md shows each."""
