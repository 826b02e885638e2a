"""Mutations: small mistakes put into the library, one at a time, that tests must detect; see docs/mutants.md."""
