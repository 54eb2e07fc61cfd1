"""Producers: compilers' output as ops. One module a compiler; docs/producers.md describes each."""
